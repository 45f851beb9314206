// THE SPINE. open() reads like the load: checkpoint, device, weights, engine, scheduler. A Session
// answers requests until it is closed; all memory is taken in open(). Threads: any thread may call;
// one thread of the session's own drives the engine (engine_thread.h), and none of the calls that
// return values of before (stats, notes) waits for it.
#pragma once

#include "cpp/bank/bank.h"
#include "cpp/bank/weights.h"
#include "cpp/cache/expert_cache.h"
#include "cpp/cache/trace.h"
#include "cpp/checkpoint/checkpoint.h"
#include "cpp/device/device.h"
#include "cpp/model/engine.h"
#include "cpp/sched/scheduler.h"
#include "cpp/session/engine_thread.h"
#include "cpp/session/stats.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace flashnext {

struct MemoryPlan;   // memory_plan.h
struct ShareReport;  // offload.h

struct SessionOptions {
  std::string device = "auto";  // "auto", "host", "cuda", "cuda:N"
  std::int32_t window =
      0;                   // positions a sequence may hold; 0: the smaller of 32768 and the model's
  std::int32_t lanes = 1;  // sequences at once
  // Bytes of the KV pages, which the lanes and the remembered prefixes share by need; at least
  // those of one window. 0: a window, and a quarter of one more for every further lane.
  std::uint64_t kv_bytes = 0;
  std::int32_t threads = 0;     // of the host device; 0: one a core
  std::int32_t levels = 32258;  // activation levels: 32258 or 127
  std::uint64_t seed = 0;       // of the host device's execution order (never of the text)
  std::string isa = "auto";     // of the host device: "auto", "scalar", "avx2", "avx512"
  bool graphs = true;
  // Most rows of a prefill step; 0: 512, or 2048 with experts in host memory, which are streamed
  // once a step.
  std::int32_t chunk = 0;
  std::int32_t snapshots = 16;  // remembered prefixes
  // Seconds that a request should wait at most between two tokens while prompts of others are read.
  double token_wait = 0.2;
  std::vector<std::string> vocabulary;  // bytes of every token, for stop texts of requests
  std::int32_t token_limit = 0;    // ids from here on are never sampled; 0: the whole vocabulary
  std::uint64_t memory_limit = 0;  // bytes; 0: none
  bool taps = false;               // keep the streams after every layer
  bool mtp = false;                // the MTP head, for drafts: without it it takes no memory
  // Where the routed experts live (design.md 4): "resident" on the device, "offload" in host memory
  // with `cache_lines` of them a layer on the device, "auto": resident when that fits memory_limit
  // and the card.
  std::string experts = "auto";
  std::int32_t cache_lines = 0;     // a layer; 0: as many as fit
  std::uint64_t host_limit = 0;     // bytes of RAM for experts; 0: what the machine has free
  std::string cpu_misses = "auto";  // of a layer's misses: "off", "auto" (measured), or at most N
  std::int32_t cpu_threads = 0;     // that compute misses; 0: one a core but one
  std::shared_ptr<cache::Policy> policy;  // null: recency
  std::string profile;       // file of expert uses: read at open, written at close; empty: none
  bool keep_profile = true;  // false: the profile is only read
  std::string trace;         // file that routing is recorded to from open on; empty: none
  double link_limit = 0;     // bytes a second of a slower link that is played (benches); 0: off
  std::int32_t ring_lines = 192;    // staging lines at least, through which prompts stream
  std::int32_t plan_every = 16;     // steps between two plans of the policy
  bool lockstep = false;            // promotions land before the next step: as a replay counts
  bool forced_routing = false;      // Engine::force_routing() may be used (benches)
  double cpu_deadline_seconds = 5;  // that a step waits for misses on the processor
  // CUDA capabilities that a gate receipt vouches for on this build, e.g. "sm_90"; others are
  // refused (design.md 8).
  std::vector<std::string> capabilities;
};

struct GenerateHooks {
  // (request, token) -> true to end that request as kCancelled with this token as its last. What it
  // throws ends the request as kFailed.
  std::function<bool(std::size_t, std::int32_t)> on_token;
  std::function<void(std::size_t, std::int32_t done, std::int32_t total)> on_prefill;
  // Called every few milliseconds; may throw to abandon all requests.
  std::function<void()> poll;
};

class Session {
 public:
  // Throws CheckpointError, InputError (options), OutOfMemory (names every part and the sum),
  // DeviceError.
  static std::unique_ptr<Session> open(const std::string& path, const SessionOptions& options,
                                       const Progress& progress = {});
  // The same over a checkpoint that is open already, e.g. a synthetic one.
  static std::unique_ptr<Session> open(Checkpoint checkpoint, const SessionOptions& options,
                                       const Progress& progress = {});
  ~Session();

  const ModelShape& shape() const noexcept { return checkpoint_.shape(); }
  const SessionOptions& options() const noexcept { return options_; }
  const std::string& device_name() const noexcept { return device_name_; }
  const std::string& device_description() const noexcept { return device_description_; }
  const std::vector<Allocated>& memory() const noexcept { return memory_; }  // all there ever is
  Device& device() noexcept { return *device_; }
  const Device& device() const noexcept { return *device_; }
  // The engine and all below it belong to the session's thread: reach them from its jobs, or while
  // no request runs.
  Engine& engine() noexcept { return *engine_; }
  Scheduler& scheduler() noexcept { return *scheduler_; }
  EngineThread& thread() noexcept { return *thread_; }
  cache::ExpertCache* cache() noexcept { return cache_.get(); }  // null: experts are resident
  const Bank* bank() const noexcept { return bank_.get(); }
  const ShareReport* cpu_share() const noexcept { return share_.get(); }
  // Throws LogicError unless the cache's books agree with the device.
  void check_cache();
  // What is worth knowing: of the load, and what went wrong since without ending the run.
  std::vector<std::string> notes() const { return stats()->notes; }

  // Records what experts steps choose into a file, which it replaces, until stop_recording() or the
  // end of the session. A replay gives this session's own counts when the record begins before the
  // first step. Throws InputError: experts are resident, a recording runs, no such folder.
  void record(const std::string& path);
  // Returns the number of records. Throws InputError when none runs or not all could be written.
  std::uint64_t stop_recording();
  bool recording() const { return stats()->cache && stats()->cache->recording; }
  // Writes the profile of expert uses now and not at the end of the session. Returns what went
  // wrong, or nothing, also when there is none to be written.
  std::string save_profile();

  // Requests that run together and with those of other calls. Throws InputError (nothing runs
  // then), and DeviceError when the device has failed: then every later call throws it again.
  std::shared_ptr<Submission> submit(std::vector<Request> requests) {
    return thread_->submit(std::move(requests));
  }
  // Submits, waits, and calls the hooks on the caller's thread.
  std::vector<Completion> generate(std::span<const Request> requests, const GenerateHooks& hooks);
  // Ends what runs as cancelled; from then on only the files may be written (save_profile,
  // stop_recording). Not from the engine's thread.
  void stop() { thread_->stop(); }
  // Requests that are running or queued end with Finish::kCancelled.
  void cancel() { thread_->cancel_all(); }
  // As of the last step but a few milliseconds; waits for nothing.
  std::shared_ptr<const SessionStats> stats() const;

  // Logits (tokens, vocab) of every position, computed cold in steps of at most `chunk` rows (0: as
  // many as fit), beside other requests.
  std::vector<float> logits(std::span<const std::int32_t> ids, std::int32_t chunk = 0);
  // Log-probability of every token but the first, given those before it: (tokens - 1).
  std::vector<float> score(std::span<const std::int32_t> ids);
  // MTP logits (tokens - 1, vocab): slot s predicts token s + 2. Needs options.mtp.
  std::vector<float> mtp_logits(std::span<const std::int32_t> ids);
  // Streams after every layer at the last position: (layers, streams * hidden). Needs options.taps.
  std::vector<float> streams(std::span<const std::int32_t> ids);

 private:
  Session(Checkpoint checkpoint, SessionOptions options);
  void open_device();
  void open_cache(const MemoryPlan& plan, const Progress& progress);
  void fill_cache(const Progress& progress);
  void note_cache();
  void open_cuda(int ordinal);
  void open_host();
  void publish();
  void between_steps(const std::function<void()>& job);
  std::vector<float> every_logit(std::span<const std::int32_t> ids, std::int32_t chunk,
                                 bool scores);
  void walk(std::span<const std::int32_t> ids,
            const std::function<void(std::int32_t lane, std::int32_t next)>& visit);

  Checkpoint checkpoint_;
  SessionOptions options_;
  std::vector<std::string> notes_;
  std::string device_name_, device_description_;
  std::vector<Allocated> memory_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<Bank> bank_;
  std::unique_ptr<cache::ExpertCache> cache_;
  std::unique_ptr<ShareReport> share_;
  bool keep_profile_ = false;                // the file of uses is ours to replace
  std::vector<std::uint64_t> profile_rest_;  // uses of it that are an MTP head's which is not here
  std::unique_ptr<cache::TraceWriter> trace_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Scheduler> scheduler_;
  mutable std::mutex stats_mutex_;  // held for the copy of a pointer
  std::shared_ptr<const SessionStats> stats_;
  std::unique_ptr<EngineThread> thread_;  // last: it stops first
};

}  // namespace flashnext
