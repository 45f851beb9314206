// The Python face of a Session, shared by the files that bind its calls.
#pragma once

#include "cpp/session/session.h"
#include "python/bind/bind.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace flashnext::bind {

// What the cache of a session's experts did.
py::dict cache_stats(Session& session);

// Empty for None. The callback is called with the GIL.
Progress progress_hook(const py::object& callback);

// A Session and the lock that makes calls from several Python threads follow each other.
class PySession {
 public:
  // `open` runs without the GIL.
  explicit PySession(const std::function<std::unique_ptr<Session>()>& open) {
    py::gil_scoped_release release;
    session_ = open();
  }

  // Runs a call on the session without the GIL.
  template <class Call>
  auto run(Call&& call) {
    py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return call(session());
  }

  py::list generate(const std::vector<std::vector<std::int32_t>>& prompts,
                    std::int32_t max_new_tokens, const SampleParams& sampling,
                    const std::vector<std::int32_t>& stop_ids, const py::object& on_token,
                    const py::object& on_prefill);
  py::dict stats();

  Session& session() {
    if (!session_) throw InputError("the session is closed; open a new one");
    return *session_;
  }
  void cancel() {
    if (session_) session_->cancel();
  }
  // Frees the session. Returns what of its files (profile, trace) could not be written.
  std::string close() {
    py::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    std::string problem;
    if (session_) {
      problem = session_->save_profile();
      try {
        if (session_->recording()) session_->stop_recording();
      } catch (const InputError& e) {
        problem += (problem.empty() ? "" : "; ") + std::string(e.what());
      }
    }
    session_.reset();
    return problem;
  }

 private:
  std::unique_ptr<Session> session_;
  std::mutex mutex_;
};

}  // namespace flashnext::bind
