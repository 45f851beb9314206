// The Python face of a Session, shared by the files that bind its calls. Any number of threads may
// call at once. No lock is waited for with the GIL.
#pragma once

#include "cpp/session/session.h"
#include "python/bind/outside.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace flashnext::bind {

// Throws when the caller wants a job to end (Ctrl-C, the end of the interpreter).
using Poll = std::function<void()>;
using When = EngineThread::When;

py::dict stats_dict(const Session& session);
py::dict cache_dict(const Session& session, const CacheStats& cache);

// Empty for None but for a check whether the interpreter ends. The callback is called with the GIL.
Progress progress_hook(const py::object& callback);

class PySubmission;

// InputError on the engine's own thread, i.e. in a policy, which must not wait for it.
void refuse_own_thread(Session& session);

class PySession {
 public:
  // `open` runs without the GIL.
  explicit PySession(const std::function<std::shared_ptr<Session>()>& open);
  ~PySession();

  // The session, kept alive for the caller. InputError when it is closed.
  std::shared_ptr<Session> session() const;

  std::unique_ptr<PySubmission> submit(const py::list& requests);
  // Logits or scores of a sequence, beside what else runs.
  std::vector<float> every_logit(const std::vector<std::int32_t>& ids, std::int32_t chunk,
                                 bool scores);

  // Runs call(session, poll) as a job of the engine's thread and returns its result; Ctrl-C ends it
  // at its next poll. InputError on the engine's own thread, i.e. from a policy.
  template <class Call>
  auto run(When when, Call&& call) {
    using Result = decltype(call(std::declval<Session&>(), std::declval<const Poll&>()));
    if constexpr (std::is_void_v<Result>) {
      run_job(when, [&](Session& s, const Poll& poll) { call(s, poll); });
    } else {
      std::optional<Result> result;
      run_job(when, [&](Session& s, const Poll& poll) { result.emplace(call(s, poll)); });
      return std::move(*result);
    }
  }

  void cancel();
  // Ends what runs as cancelled and frees the session. Returns what of its files (profile, trace)
  // could not be written.
  std::string close();

 private:
  void run_job(When when, const std::function<void(Session&, const Poll&)>& job);
  std::string close_outside();
  mutable std::mutex mutex_;  // of the pointer; never held for long, nor across a call
  std::shared_ptr<Session> session_;
  friend void shutdown();
};

// Requests under way. What nobody holds any more is cancelled.
class PySubmission {
 public:
  PySubmission(std::weak_ptr<Session> session, std::shared_ptr<Submission> submission)
      : session_(std::move(session)), submission_(std::move(submission)) {}
  ~PySubmission();
  PySubmission(const PySubmission&) = delete;
  PySubmission& operator=(const PySubmission&) = delete;

  // (request, kind, a, b) each: kind 0 prefill (done, total), 1 token (id, 0), 2 end. Waits up to
  // `seconds` (negative: without limit) for the first, until all have ended.
  py::list updates(double seconds);
  void cancel(std::optional<std::size_t> request);
  bool ended() const;
  py::dict completion(std::size_t request) const;
  int descriptor() const;

 private:
  std::weak_ptr<Session> session_;
  std::shared_ptr<Submission> submission_;
};

}  // namespace flashnext::bind
