// ExpertCache: the lines of experts that a device keeps, and everything that moves them.
//
// Owns, on the device: a pool of lines a layer, staging lines that misses pass through (the ring of
// a prompt's streaming, stream.h, is the same memory), the tables that kResolve reads and changes,
// and what the ops of a step hand to each other. On the host: a mirror of the tables, kept by
// resolving every step again from its expert ids with the same rule, the planner, and copy streams.
//
// Around steps: before_step() lands finished promotions and, before the first step and every
// plan_every steps from there, asks the planner and starts new ones; a step runs; after_step()
// takes its ids and counters over. Only begin and end of a promotion touch the device's tables,
// between steps, by copies on the main stream, so that a step never sees half of a change. Threads:
// the engine's; workers of the processor's share are its own.
#pragma once

#include "cpp/bank/bank.h"
#include "cpp/cache/cpu_experts.h"
#include "cpp/cache/lines.h"
#include "cpp/cache/planner.h"
#include "cpp/cache/trace.h"
#include "cpp/device/device.h"

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace flashnext::cache {

struct CacheOptions {
  std::int32_t lines = 0;                  // a layer, >= 1
  std::int32_t trunk_layers = 0;           // of shape.layers; the MTP head's comes after them
  std::int32_t decode_rows = kDecodeRows;  // most rows of a decode step
  std::int32_t ring_lines = 0;             // staging lines at least; 0: what decode needs
  std::int32_t plan_every = 16;            // steps between plans; the first comes before step 1
  std::int32_t max_promotions = 32;        // that may be under way
  bool lockstep = false;  // promotions land before the next step: what a replay counts
  double link_limit = 0;  // bytes a second of a slower link that is played; 0: off
  bool cpu = false;       // misses may be computed by the processor
  CpuOptions cpu_options{};
  std::int64_t cpu_deadline_ns = 5'000'000'000;
};

// What the layer graph needs to know of one layer. Device memory.
struct LayerCache {
  CacheTables tables;
  LineLayout layout;
  const std::byte* bank;    // pinned lines, or null: none is pinned
  std::byte* pool;          // (lines) lines
  ExpertRef* experts;       // (experts)
  std::int32_t* group;      // (experts)
  std::int32_t* ids;        // (decode_rows, top_k): the step's choice, kept to its end
  CacheCounters* counters;  // (1)
};

// What the ops of a layer hand to each other; one layer after the other uses it. Device memory
// unless said otherwise.
struct StepCache {
  std::byte* staging;
  Fetch* fetches;             // (decode_rows * top_k)
  std::int32_t* num_fetches;  // (1)
  std::int32_t* cpu;          // (decode_rows * top_k)
  std::int32_t* num_cpu;      // (1)
  MailSequence* sequence;     // (1)
  MailView mail;              // pinned; null members without the processor's share
};

struct LayerStats {
  std::uint64_t steps = 0;  // in which the layer's experts were resolved
  std::uint64_t hits = 0, fetched = 0, installed = 0, on_cpu = 0;  // distinct experts a step
  std::uint64_t fetch_ns = 0, wait_ns = 0;
  std::uint64_t promoted = 0, streamed = 0;  // lines copied by the planner, and for prompts
};

// Of all layers.
struct CacheTotals {
  LayerStats sum;
  std::uint64_t fetched_bytes = 0, promoted_bytes = 0, cpu_bytes = 0, streamed_bytes = 0;
};

class ExpertCache {
 public:
  // Allocates everything; the bank and the device must outlive the cache.
  ExpertCache(Device& device, const Bank& bank, CacheShape shape, std::int32_t dim,
              std::int32_t inner, std::int32_t levels, const CacheOptions& options);
  ~ExpertCache();

  // Copies the first lines, the policy's choice, and makes the tables. `profile` (layers, experts)
  // or empty. `progress` hears stage "lines" in bytes.
  void fill(std::shared_ptr<Policy> policy, std::span<const std::uint64_t> profile,
            const Progress& progress);

  const CacheShape& shape() const noexcept { return shape_; }
  const CacheOptions& options() const noexcept { return options_; }
  const Bank& bank() const noexcept { return bank_; }
  const LayerCache& layer(std::size_t i) const { return layers_.at(i); }
  const StepCache& step() const noexcept { return step_; }
  std::int32_t staging_lines() const noexcept { return staging_lines_; }
  // (layers, decode_rows, top_k) and (layers): what a step's program copies to the host.
  void* ids_host() const noexcept { return ids_host_.data(); }
  void* counters_host() const noexcept { return counters_host_.data(); }
  std::size_t ids_bytes() const noexcept;  // of one layer

  // To be called before a step that resolves; returns its sequence. Enqueues on `main`.
  std::int32_t before_step(StreamId main);
  // The step of `rows` rows ran over layers [first, first + count), and its ids and counters are on
  // the host. False when the processor's workers missed the deadline: the step's results are then
  // undefined; it may be repeated, since all misses are fetched from now on, and stall() says what
  // happened. StalledError where experts cannot be fetched.
  bool after_step(std::int32_t first, std::int32_t count, std::int32_t rows);
  const std::string& stall() const noexcept { return stall_; }  // rank, layer, sequence; or empty
  // Work that may be done while a step runs.
  void catch_up();
  // What a prompt's rows chose (rows, top_k), and how many lines were streamed for them.
  void count_prompt(std::int32_t layer, std::span<const std::int32_t> ids, std::uint64_t streamed);

  // The processor computes cpu_of[m] of m misses from the next step on; (max misses + 1) entries.
  void share_misses(std::span<const std::int32_t> cpu_of);
  std::span<const std::int32_t> cpu_of() const noexcept { return cpu_of_; }
  bool has_cpu() const noexcept { return cpu_ != nullptr; }
  // Misses take no line and the policy is not asked: steps leave the cache as it is.
  void bypass(bool on);

  // Programs may run again and again, apart from steps: misses pass through staging, none goes to
  // the processor, and what the device notes about its lines meanwhile is forgotten at resume().
  // suspend() enqueues on `main`.
  void suspend(StreamId main);
  void resume();

  // The line that holds an expert now, or null. For prompts: nothing changes while they stream.
  const std::byte* line_of(std::int32_t layer, std::int32_t expert);
  ExpertRef ref_of(std::int32_t layer, const std::byte* line) const;
  // Enqueues the copy of `count` experts from `expert` on into lines that lie side by side, at the
  // rate of the link that is played.
  void copy_lines(StreamId stream, std::int32_t layer, std::int32_t expert, std::int32_t count,
                  std::byte* to);
  // Nanoseconds that the link which is played takes for so many bytes; 0: none is.
  std::int64_t link_ns(std::int64_t bytes) const noexcept {
    if (options_.link_limit <= 0) return 0;
    return static_cast<std::int64_t>(static_cast<double>(bytes) / options_.link_limit * 1e9);
  }
  std::int64_t line_bytes(std::int32_t layer) const { return bank_layer(layer).layout.bytes; }

  // Counts of every step's layers are also what a replay of this trace gives.
  void record(TraceWriter* trace) noexcept { trace_ = trace; }
  const std::vector<LayerStats>& stats() const noexcept { return stats_; }
  CacheTotals totals() const;
  const Planner& planner() const { return *planner_; }
  CpuExperts* cpu() noexcept { return cpu_.get(); }
  std::int32_t max_misses() const noexcept { return options_.decode_rows * shape_.top_k; }
  // Steps until now were not the user's and bypassed the lines: counters, stamps, what was seen and
  // the planner's memory start anew.
  void forget();
  // Throws LogicError unless mirror and device agree; waits for all work.
  void check_integrity(StreamId main);

 private:
  struct Promoted {
    Promoting at;
    std::size_t event;
  };
  struct Step {
    std::int32_t sequence, first, count, rows;
    std::vector<std::int32_t> ids;
  };
  // Offsets in the block of one layer's tables, in integers.
  struct TableLayout {
    std::int64_t line_of, expert_of, stamp, seen, order, rule, cpu_of, reachable, size;
  };

  void allocate();
  CacheTables tables_at(std::int32_t* base) const;
  bool stalled_now();
  void land();
  void plan();
  void upload(StreamId main);
  void touch(std::int32_t layer) { dirty_[static_cast<std::size_t>(layer)] = true; }
  const Bank::Layer& bank_layer(std::int32_t layer) const {
    return bank_.layers()[static_cast<std::size_t>(layer)];
  }

  Device& device_;
  const Bank& bank_;
  CacheShape shape_;
  const std::int32_t dim_, inner_, levels_;
  CacheOptions options_;
  TableLayout at_{};
  std::int32_t staging_lines_ = 0;
  Block pools_, staging_, tables_, tables_host_, refs_, groups_, ids_, ids_host_, counters_,
      counters_host_, handover_, mail_head_, mail_jobs_, mail_x_, mail_y_, pace_;
  std::vector<LayerCache> layers_;
  StepCache step_{};
  std::vector<Lines> lines_;  // the mirror
  std::vector<bool> dirty_;   // layers whose tables differ from the device's
  std::vector<std::int32_t> cpu_of_;
  bool bypass_ = false;
  std::vector<std::int32_t> suspended_share_;  // what resume() restores
  bool suspended_bypass_ = false;
  bool is_suspended_ = false;
  bool policy_installs_ = true;
  std::vector<std::vector<std::int32_t>> first_;  // (layers) what filled the lines
  std::unique_ptr<Planner> planner_;
  std::unique_ptr<CpuExperts> cpu_;
  Stream copies_;
  std::vector<Event> events_;  // of promotions
  std::vector<std::size_t> free_events_;
  std::vector<Promoted> under_way_;
  std::vector<Step> pending_;
  std::int32_t sequence_ = 0;
  std::string stall_;
  std::vector<LayerStats> stats_;
  TraceWriter* trace_ = nullptr;
};

}  // namespace flashnext::cache
