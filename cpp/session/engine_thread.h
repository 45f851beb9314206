// EngineThread: the one thread that drives an engine. Requests come from any thread and their
// updates go back through Submissions; jobs that need the engine itself run between two steps, or
// when nothing else runs. A job or a request of another process (after a fork) is refused.
//
// Locks: one mutex guards the inbox. It is never held while a step runs, a job runs or an update is
// delivered, so that submit(), cancel() and post() return at once whatever the engine does.
#pragma once

#include "cpp/sched/scheduler.h"
#include "cpp/session/submission.h"

#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace flashnext {

class EngineThread {
 public:
  // `publish` is called on the thread before an end is delivered, after jobs, and now and then
  // between steps: the place to copy counters for others to read.
  EngineThread(Scheduler& scheduler, std::function<void()> publish);
  ~EngineThread() { stop(); }
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Ends all requests as cancelled and waits for the thread; later calls are refused. May be called
  // again, but not on the thread itself.
  void stop();
  bool stopped() const noexcept { return !thread_.joinable(); }

  // Throws InputError for a request that cannot run (nothing runs then), or what ended the engine:
  // after a DeviceError every call throws one. `scores`: requests with every_logit keep the scores
  // alone.
  std::shared_ptr<Submission> submit(std::vector<Request> requests, bool scores = false);
  // From any thread; the ends are delivered with the next step.
  void cancel(const std::shared_ptr<Submission>& submission);
  void cancel(const std::shared_ptr<Submission>& submission, std::size_t request);
  void cancel_all();

  enum class When {
    kBetweenSteps,
    kAlone,  // when no request has a lane; those that are queued wait until the job is done
  };
  // Runs a job on the thread. The future holds what it throws; a DeviceError ends the engine.
  std::future<void> post(When when, std::function<void()> job);
  // The same, waited for. InputError on the thread itself, i.e. from a policy.
  void run(When when, const std::function<void()>& job);
  // False in a child that was forked since: the thread stayed with the parent.
  bool is_this_process() const noexcept;
  bool is_this_thread() const noexcept { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  struct Job {
    When when;
    std::packaged_task<void()> task;
  };
  struct Arrival {
    std::shared_ptr<Submission> submission;
    std::vector<Request> requests;
  };
  struct Target {
    std::shared_ptr<Submission> submission;
    std::size_t request;
  };
  struct Cancel {
    std::shared_ptr<Submission> submission;  // null: all that run
    std::size_t request;                     // kEvery: all of it
  };
  static constexpr std::size_t kEvery = static_cast<std::size_t>(-1);

  void work();
  bool turn();  // false: nothing was there to be done
  void take(std::vector<Arrival>& arrivals, std::vector<Cancel>& cancels);
  void deliver(const std::vector<RequestEvent>& events);
  void run_jobs();
  void fail_all(std::exception_ptr error);
  void refuse_if_forked() const;
  void refuse_if_failed() const;
  void note_failure(const DeviceError& error);
  void add(Cancel cancel);

  Scheduler& scheduler_;
  std::function<void()> publish_;
  std::map<RequestId, Target> targets_;  // of the thread alone
  std::chrono::steady_clock::time_point published_{};

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Arrival> arrivals_;
  std::vector<Cancel> cancels_;
  std::vector<Job> jobs_;
  std::string failure_;  // the first DeviceError
  bool closing_ = false;
  int process_;
  std::thread thread_;  // last: it starts when all else is there
};

}  // namespace flashnext
