// Engine: runs steps. Owns sequence state, activations, programs and their graphs for one device;
// knows lanes and tokens, but no requests and no text. Threads: one thread drives an engine.
// Nothing is allocated on the device after construction.
#pragma once

#include "cpp/bank/weights.h"
#include "cpp/base/thread_pool.h"
#include "cpp/cache/stream.h"
#include "cpp/model/layer_graph.h"
#include "cpp/model/op_cost.h"
#include "cpp/model/program.h"
#include "cpp/model/state.h"
#include "cpp/model/step_buffer.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace flashnext {

struct EngineOptions {
  std::int32_t lanes = 1;
  std::int32_t window = 0;       // positions a lane may hold, > 0
  std::uint64_t kv_bytes = 0;    // of the pages that the lanes share; 0: pool_pages() decides
  std::int32_t chunk = 512;      // most rows of a step
  std::int32_t levels = 32258;   // of an activation: 32258 or 127
  std::int32_t token_limit = 0;  // ids >= it are never sampled; 0: the vocabulary
  bool graphs = true;            // replay captured graphs; false: enqueue op by op
  bool mtp = false;              // build the MTP head, whose weights must be there
  std::int32_t snapshots = 8;    // snapshots that may exist at once
  bool taps = false;             // keep the streams after every layer (debugging, reference tests)
  bool forced_routing = false;   // decode steps may be told their experts (benches)
};

// Rows of one sequence in a step.
struct LaneRows {
  enum class Logits { kNone, kLast, kAll };
  std::int32_t lane;
  std::span<const std::int32_t> tokens;
  Logits logits = Logits::kLast;
  SampleParams sampling{};  // position is filled in by the engine
};

struct StepOutput {
  std::int32_t lane;
  std::int32_t pos;     // of the row; the token drawn belongs at pos + 1
  std::int32_t token;   // what the sampler drew
  const float* logits;  // host memory (vocab), valid until the next step; null unless fetched
};

// A sequence at one position, on the host, apart from its pages.
struct Snapshot {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> pages;  // held references
  std::int32_t block = -1;          // where the engine keeps the slot's copy
  std::int32_t mtp_length = 0;
};

class Engine;

// The right to drive one lane, which is empty at first. Whoever runs sequences borrows lanes, so
// that no two users drive the same one; the lane is emptied and given back at the end of the lease.
class LaneLease {
 public:
  LaneLease(Engine& engine, std::int32_t lane) noexcept : engine_(&engine), lane_(lane) {}
  LaneLease(LaneLease&& other) noexcept
      : engine_(std::exchange(other.engine_, nullptr)), lane_(other.lane_) {}
  LaneLease& operator=(LaneLease&&) = delete;
  ~LaneLease();
  std::int32_t lane() const noexcept { return lane_; }

 private:
  Engine* engine_;
  std::int32_t lane_;
};

// All ops of one kind in a step.
struct OpFamily {
  std::string name;
  std::int32_t launches;
  std::size_t nodes;  // work items of the device (0: it does not count them)
  double seconds;     // all of them, one after the other
  OpCost cost;
};

struct StepProfile {
  std::int32_t rows = 0;
  double seconds = 0;     // the whole step on the device, as step() runs it
  std::size_t nodes = 0;  // work items of its graph (0: not counted, or no graph)
  double experts = 0;     // distinct routed experts a layer, on average
  std::vector<OpFamily> families;
};

class Engine {
 public:
  // `cache` holds the routed experts that are not on the device; null: all are. Throws InputError
  // for options out of range, OutOfMemory.
  Engine(Device& device, const Checkpoint& checkpoint, const Weights& weights,
         const EngineOptions& options, cache::ExpertCache* cache = nullptr);
  ~Engine();

  const EngineOptions& options() const noexcept { return options_; }
  std::int32_t vocab() const noexcept { return shape_.vocab; }
  bool has_mtp() const noexcept { return mtp_; }
  // Most rows of a step whose logits may be asked for.
  std::int32_t max_outputs() const noexcept { return max_outputs_; }

  // Runs the rows: lanes distinct, tokens in the vocabulary, at most `chunk` rows, every lane
  // reserve()d. Outputs come in the order of `rows`. With `fetch_logits` their logits are copied to
  // the host. Throws InputError for bad rows (nothing has changed then), DeviceError.
  const std::vector<StepOutput>& step(std::span<const LaneRows> rows, bool fetch_logits);

  // Keeps the first `keep` rows of the lane's part of the last step, which had at most
  // decode_rows(lanes) rows in all and at least two in this lane (keep = all is always allowed).
  // Comes before the mtp_step of these rows.
  void rewind(std::int32_t lane, std::int32_t keep);

  // Makes room for `tokens` more positions; false when too few pages are free (drop snapshots, or
  // empty another lane, then try again): nothing has changed then.
  bool reserve(std::int32_t lane, std::int32_t tokens);
  // Whether a sequence of so many tokens would find pages beside the lanes that are in use, were
  // there no snapshots.
  bool could_hold(std::int32_t tokens) const;
  void reset(std::int32_t lane);
  std::int32_t length(std::int32_t lane) const;
  const std::vector<std::int32_t>& ids(std::int32_t lane) const;

  // A lane that nobody has, or none. The engine must outlive the lease.
  std::optional<LaneLease> borrow();
  std::int32_t free_lanes() const noexcept { return static_cast<std::int32_t>(free_lanes_.size()); }

  // Needs free_snapshots() > 0. The snapshot stays valid until release() gives its pages and its
  // block back. Its copy, and that of restore(), runs beside the steps: the lane may go on at once.
  Snapshot snapshot(std::int32_t lane);
  std::int32_t free_snapshots() const noexcept;
  // False when a page is needed for a copy and none is free; the lane is empty then.
  bool restore(std::int32_t lane, const Snapshot& snapshot);
  void release(Snapshot& snapshot);

  // Runs the MTP slots that the lane's part of the last step completes. Slot s pairs the trunk's
  // streams at s with token s + 1; `next` is the token after the last row, with which the sequence
  // must go on, or -1 when unknown (that slot is then left for the next call). Must be called after
  // every step of a lane from position 0 on, before any other step. Returns logits (slots, vocab).
  std::vector<float> mtp_step(std::int32_t lane, std::int32_t next);

  // Streams after every layer of the last row of the last step: (layers, S * D). Needs
  // options.taps.
  std::vector<float> taps();

  // Experts that the rows of the next decode steps take in place of their own choice:
  // (layers, rows, top_k) of the trunk, or empty to end it. Needs options.forced_routing and a
  // cache.
  void force_routing(std::span<const std::int32_t> ids, std::int32_t rows);
  cache::ExpertCache* cache() noexcept { return cache_; }
  void check_cache() { cache_->check_integrity(streams_.main()); }
  const cache::ExpertStream* stream() const noexcept { return stream_.get(); }

  // Whether steps replay their graphs (where options.graphs captured some) or enqueue op by op: the
  // same bits either way.
  void use_graphs(bool on) noexcept { use_graphs_ = on; }

  // Repeats the last step for measurement, as a whole and family by family. Sequences are spoilt by
  // it: every lane is empty afterwards.
  StepProfile profile(int repeats);

  struct Counters {
    std::uint64_t steps = 0, rows = 0, outputs = 0, rewinds = 0, snapshots = 0, restores = 0;
    std::uint64_t graphs = 0, ops_per_token = 0;
  };
  const Counters& counters() const noexcept { return counters_; }
  const StatePool& state() const noexcept { return *state_; }

 private:
  struct LaneState {
    std::vector<std::int32_t> ids;
    std::vector<std::int32_t> pages;
    std::int32_t slot = 0;   // current recurrent state
    std::int32_t spare = 0;  // the other slot of the lane
    // The lane's part of the last step, for rewind() and mtp_step(); `stepped`: it had one, and the
    // lane has not been emptied or restored since.
    Segment last{};
    bool stepped = false;
    bool rewindable = false;
    std::int32_t mtp_length = 0;
  };
  // A copy of a slot of recurrent state that may be under way, of which steps must know.
  struct SlotCopy {
    explicit SlotCopy(Device& device) : done(device) {}
    enum class Kind { kNone, kOut, kIn };
    Kind kind = Kind::kNone;
    Event done;
  };
  using Graphs = std::vector<Graph>;  // a part of a program; empty: not captured
  struct Built {
    Bucket bucket{};
    StepView step{};
    StepView mtp_step{};
    const StepBuffer* buffer = nullptr;
    const StepBuffer* mtp_buffer = nullptr;
    TrunkBuffers trunk{};
    MtpBuffers mtp{};
    Program trunk_program, mtp_program, rewind_program;
    Graphs trunk_graphs, mtp_graphs, rewind_graphs;
  };

  void build();
  void allocate(std::int32_t large_rows);
  std::vector<Bucket> buckets(std::int32_t large_rows) const;
  GraphBuilder::Sizes build_bucket(Built& built, std::byte* base, const GraphBuilder::Sizes& sizes);
  void capture(const Program& program, Graphs& graphs);
  void run(const Built& built, const Program& program, const Graphs& graphs, std::int32_t rows);
  // A program of a bucket, and the layers with experts [first, first + count) that it has.
  struct Part {
    const Program& program;
    const Graphs& graphs;
    const StepBuffer& buffer;
    std::int32_t first, count;
  };
  void run_layers(const Built& built, const Part& part, std::int32_t rows);
  void add_cache_results(Program& program, std::size_t first, std::size_t count) const;
  template <class Run>
  double time_run(Run&& enqueue, int repeats);
  std::int32_t count_experts(const RouteArgs& route, std::int32_t rows);
  Built& bucket_for(std::int32_t rows, std::int32_t outputs);
  LaneState& lane(std::int32_t index);
  const LaneState& lane(std::int32_t index) const;
  void validate(std::span<const LaneRows> rows) const;
  void fill(const Built& built, std::span<const LaneRows> rows);
  void fill_pages(const StepBuffer& buffer, std::int32_t lane);
  void gather_ngrams(const Built& built);
  void copy_mtp_state(std::int32_t to, std::int32_t from);  // slots
  void* snapshot_block(std::int32_t block) const;
  SlotCopy& copy_of(std::int32_t slot) { return slot_copies_[static_cast<std::size_t>(slot)]; }
  bool copied_out(std::int32_t slot);
  void copy_slot(std::int32_t slot, SlotCopy::Kind kind, void* to, const void* from);
  void settle(std::int32_t slot);
  friend class LaneLease;
  void give_back(std::int32_t lane) noexcept;

  Device& device_;
  const Checkpoint& checkpoint_;
  const Weights& weights_;
  const ModelShape& shape_;
  EngineOptions options_;
  cache::ExpertCache* cache_;
  bool mtp_ = false;
  bool use_graphs_ = true;
  std::int32_t max_pages_ = 0;
  std::int32_t max_outputs_ = 0;

  ProgramStreams streams_;
  std::unique_ptr<StatePool> state_;
  std::unique_ptr<StepBuffer> small_, large_, rewind_, mtp_small_, mtp_large_;
  std::unique_ptr<cache::ExpertStream> stream_;  // with a cache
  Block forced_, forced_host_, activations_, taps_, logits_host_, tokens_host_, packed_host_,
      taps_host_, snapshots_;
  std::vector<std::int32_t> free_snapshots_;
  std::vector<std::unique_ptr<Built>> built_;  // ascending by rows
  Built* last_ = nullptr;                      // bucket of the last step
  std::vector<LaneState> lanes_;
  std::vector<std::int32_t> free_lanes_;  // not borrowed; the lowest last
  Stream copies_;                         // of slots, from and to snapshots, in order
  std::vector<SlotCopy> slot_copies_;     // (slots)
  std::vector<StepOutput> outputs_;
  ThreadPool gather_pool_;
  Counters counters_;
};

}  // namespace flashnext
