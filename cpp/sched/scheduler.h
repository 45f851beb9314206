// Scheduler: requests -> steps. Several requests share the engine's lanes; each step is either a
// chunk of one prompt or one token of every lane that decodes. Prompts reuse the longest prefix
// that a snapshot remembers. A request that is cancelled or fails leaves the other lanes and the
// prefix cache intact.
#pragma once

#include "cpp/model/engine.h"
#include "cpp/sched/prefix_cache.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

namespace flashnext {

struct Request {
  std::vector<std::int32_t> prompt;
  std::int32_t max_new_tokens = 256;
  SampleParams sampling{};  // seed, temperature, top_p, top_k, min_p
  std::vector<std::int32_t> stop_ids;
};

enum class Finish { kStop, kLength, kCancelled, kCallback };
const char* to_string(Finish finish) noexcept;

struct Completion {
  std::vector<std::int32_t> tokens;  // without the stop id
  Finish finish = Finish::kLength;
  std::int32_t prompt_tokens = 0;
  std::int32_t reused_tokens = 0;  // of the prompt, taken from a snapshot
  double prefill_seconds = 0;      // from the request's first step to its first token
  double decode_seconds = 0;       // from the first token to the last
};

struct GenerateHooks {
  // (request, token) -> true to end that request with Finish::kCallback; the token is kept.
  std::function<bool(std::size_t, std::int32_t)> on_token;
  std::function<void(std::size_t, std::int32_t done, std::int32_t total)> on_prefill;
  // Called before every step; may throw to abandon all requests (their lanes are reset).
  std::function<void()> poll;
};

class Scheduler {
 public:
  explicit Scheduler(Engine& engine) : engine_(engine), prefixes_(engine) {}

  // Runs all requests to their end. Throws InputError for a bad request before anything runs, and
  // what hooks or the engine throw. One call at a time.
  std::vector<Completion> generate(std::span<const Request> requests, const GenerateHooks& hooks);

  // From any thread: requests that are running or queued end with Finish::kCancelled.
  void cancel() noexcept { cancelled_.store(true); }

  // Logits of every position of one sequence from position 0: visit(first position, logits (n,
  // vocab) rows as outputs). Uses lane 0, computes cold in steps of at most `chunk` rows (0: as
  // many as fit).
  void every_logit(std::span<const std::int32_t> ids, std::int32_t chunk,
                   const std::function<void(const std::vector<StepOutput>&)>& visit);

  PrefixCache& prefixes() noexcept { return prefixes_; }
  struct Counters {
    std::uint64_t requests = 0, prompt_tokens = 0, reused_tokens = 0, new_tokens = 0;
    double prefill_seconds = 0, decode_seconds = 0;
  };
  const Counters& counters() const noexcept { return counters_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Running {
    std::size_t request;
    std::int32_t lane;
    Clock::time_point started, first_token, last_token;
    bool decoding = false;
  };

  void validate(const Request& request, std::size_t index) const;
  void admit(std::span<const Request> requests, std::size_t index, std::int32_t lane,
             Completion& completion);
  void prefill(const Request& request, Running& running, Completion& completion,
               const GenerateHooks& hooks);
  bool accept(const Request& request, Running& running, Completion& completion, std::int32_t token,
              const GenerateHooks& hooks);
  void finish(Running& running, Completion& completion, Finish finish);
  void reserve(std::int32_t lane, std::int32_t tokens);

  Engine& engine_;
  PrefixCache prefixes_;
  std::atomic<bool> cancelled_{false};
  Counters counters_;
};

}  // namespace flashnext
