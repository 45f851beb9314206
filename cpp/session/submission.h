// Submission: requests that were submitted together, and what comes back of them. The engine's
// thread writes, any number of threads read. A reader never holds a lock that a step needs for
// longer than it takes to copy a few tokens, and what nobody reads is bounded by the requests' own
// limits, so that a slow reader slows nobody.
#pragma once

#include "cpp/sched/request.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

namespace flashnext {

// What became known of one request, in order.
struct Update {
  enum class Kind { kPrefill, kToken, kEnd };
  std::size_t request = 0;  // of the submission
  Kind kind = Kind::kEnd;
  std::int32_t token = -1;           // kToken
  std::int32_t done = 0, total = 0;  // kPrefill
};

class Submission {
 public:
  explicit Submission(std::size_t requests);
  ~Submission();
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  std::size_t size() const noexcept { return completions_.size(); }
  // What came since the last call, at once when there is something, else after `timeout` at the
  // latest.
  std::vector<Update> wait(std::chrono::nanoseconds timeout);
  // All requests have ended, whether or not their updates were taken.
  bool ended() const;
  bool ended(std::size_t request) const;
  // Of a request that has ended. Throws what ended it when that was a failure of the device or the
  // engine.
  Completion completion(std::size_t request) const;
  // Logits (tokens, vocab) of a request with every_logit, and log-probabilities (tokens - 1) of one
  // that asked for scores; to be taken once, after the end.
  std::vector<float> take_logits(std::size_t request);
  // A descriptor that polls readable while there are updates to take, for event loops; made by the
  // first call, closed with the submission. Throws Error when the system grants none.
  int descriptor();

  // ---- of the engine's thread
  // Before it runs: room for the logits of these ids, or for their scores alone. Throws
  // OutOfMemory.
  void expect_logits(std::size_t request, const std::vector<std::int32_t>& ids, std::size_t vocab,
                     bool scores);
  void deliver(std::size_t request, const RequestEvent& event);
  void fail(std::exception_ptr error);

 private:
  struct Logits {
    bool scores = false;
    std::size_t vocab = 0;
    std::vector<std::int32_t> ids;
    std::vector<float> values;
  };
  void signal();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Update> updates_;
  std::vector<std::optional<Completion>> completions_;
  std::vector<Logits> logits_;
  std::exception_ptr error_;
  std::size_t running_;
  int descriptor_ = -1;
};

}  // namespace flashnext
