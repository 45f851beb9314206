#include "cpp/session/engine_thread.h"

#include <algorithm>
#include <csignal>
#include <unistd.h>

namespace flashnext {

namespace {

constexpr auto kPublishEvery = std::chrono::milliseconds(20);

// Signals belong to the threads of the program that uses the engine.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGBUS, SIGFPE, SIGILL, SIGSEGV}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

std::thread start(std::function<void()> work) {
  const SignalsBlocked blocked;  // the new thread inherits it
  return std::thread(std::move(work));
}

}  // namespace

EngineThread::EngineThread(Scheduler& scheduler, std::function<void()> publish)
    : scheduler_(scheduler),
      publish_(std::move(publish)),
      process_(::getpid()),
      thread_(start([this] { work(); })) {}

void EngineThread::stop() {
  if (!thread_.joinable()) return;
  if (!is_this_process()) {  // the thread stayed in the parent process
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

bool EngineThread::is_this_process() const noexcept { return process_ == ::getpid(); }

// Before any lock is taken: in a child the parent's threads may hold it for ever.
void EngineThread::refuse_if_forked() const {
  if (is_this_process()) return;
  throw InputError(
      "the session was opened by the parent of this process, where its thread is; open one in each "
      "process");
}

void EngineThread::refuse_if_failed() const {
  if (!failure_.empty()) {
    throw DeviceError(
        "the session failed before and cannot go on; open a new one. First failure: " + failure_);
  }
  if (closing_) throw InputError("the session is closed; open a new one");
}

std::shared_ptr<Submission> EngineThread::submit(std::vector<Request> requests, bool scores) {
  refuse_if_forked();
  if (requests.empty()) throw InputError("there is no request");
  for (std::size_t i = 0; i < requests.size(); ++i) {
    try {
      scheduler_.validate(requests[i]);
    } catch (const InputError& e) {
      if (requests.size() == 1) throw;
      throw InputError("request " + std::to_string(i) + ": " + e.what());
    }
  }
  auto submission = std::make_shared<Submission>(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].every_logit) {
      submission->expect_logits(i, requests[i].prompt, scheduler_.vocab(), scores);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    refuse_if_failed();
    arrivals_.push_back({submission, std::move(requests)});
  }
  wake_.notify_all();
  return submission;
}

void EngineThread::add(Cancel cancel) {
  if (!is_this_process()) return;  // nothing of the parent's runs here
  {
    const std::lock_guard lock(mutex_);
    cancels_.push_back(std::move(cancel));
  }
  wake_.notify_all();
}

void EngineThread::cancel(const std::shared_ptr<Submission>& s) { add({s, kEvery}); }
void EngineThread::cancel(const std::shared_ptr<Submission>& s, std::size_t i) { add({s, i}); }

// What waits to be taken over is named, since requests may follow it before the thread looks.
void EngineThread::cancel_all() {
  {
    const std::lock_guard lock(mutex_);
    cancels_.push_back({nullptr, kEvery});
    for (const Arrival& a : arrivals_) cancels_.push_back({a.submission, kEvery});
  }
  wake_.notify_all();
}

std::future<void> EngineThread::post(When when, std::function<void()> job) {
  refuse_if_forked();
  std::packaged_task<void()> task([this, job = std::move(job)] {
    try {
      job();
      publish_();  // what it changed is told before its end is
    } catch (const DeviceError& e) {
      note_failure(e);
      throw;
    }
  });
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    refuse_if_failed();
    jobs_.push_back({when, std::move(task)});
  }
  wake_.notify_all();
  return done;
}

void EngineThread::run(When when, const std::function<void()>& job) {
  if (is_this_thread()) {
    throw InputError("a policy cannot wait for the session that asks it; plan from the counters");
  }
  std::future<void> done = post(when, job);
  try {
    done.get();
  } catch (const std::future_error&) {  // nobody will run it any more
    throw InputError("the session was closed");
  }
}

void EngineThread::note_failure(const DeviceError& error) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = error.what();
}

void EngineThread::work() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] {
        return closing_ || !arrivals_.empty() || !jobs_.empty() || !cancels_.empty();
      });
      if (closing_) break;
    }
    while (turn()) {
      const std::lock_guard lock(mutex_);
      if (closing_) break;
    }
  }
  // What is under way ends as cancelled, and jobs that nobody ran break their promises.
  std::vector<Arrival> arrivals;
  std::vector<Cancel> cancels;
  take(arrivals, cancels);
  scheduler_.cancel_all();
  try {
    deliver(scheduler_.step());
  } catch (...) {
    fail_all(std::current_exception());
  }
  const auto closed = std::make_exception_ptr(InputError("the session was closed"));
  for (const auto& [id, target] : targets_) target.submission->fail(closed);
  std::vector<Job> never_run;
  const std::lock_guard lock(mutex_);
  never_run.swap(jobs_);
}

// Cancels of all that runs, then new requests, then other cancels: each finds what was submitted
// before it and nothing else.
void EngineThread::take(std::vector<Arrival>& arrivals, std::vector<Cancel>& cancels) {
  {
    const std::lock_guard lock(mutex_);
    arrivals.swap(arrivals_);
    cancels.swap(cancels_);
  }
  for (const Cancel& c : cancels) {
    if (!c.submission) scheduler_.cancel_all();
  }
  for (Arrival& a : arrivals) {
    for (std::size_t i = 0; i < a.requests.size(); ++i) {
      targets_[scheduler_.submit(std::move(a.requests[i]))] = {a.submission, i};
    }
  }
  for (const Cancel& c : cancels) {
    for (const auto& [id, target] : targets_) {
      if (target.submission != c.submission) continue;
      if (c.request == kEvery || c.request == target.request) scheduler_.cancel(id);
    }
  }
}

bool EngineThread::turn() {
  std::vector<Arrival> arrivals;
  std::vector<Cancel> cancels;
  take(arrivals, cancels);
  run_jobs();
  if (scheduler_.idle()) {
    publish_();
    return false;
  }
  try {
    deliver(scheduler_.step());
  } catch (const DeviceError& e) {
    note_failure(e);
    fail_all(std::current_exception());
  } catch (...) {
    fail_all(std::current_exception());
  }
  return true;
}

void EngineThread::deliver(const std::vector<RequestEvent>& events) {
  const bool ends = std::any_of(events.begin(), events.end(), [](const RequestEvent& e) {
    return e.kind == RequestEvent::Kind::kEnd;
  });
  const auto now = std::chrono::steady_clock::now();
  if (ends || now - published_ >= kPublishEvery) {
    publish_();
    published_ = now;
  }
  for (const RequestEvent& e : events) {
    const auto target = targets_.find(e.id);
    if (target == targets_.end()) continue;
    target->second.submission->deliver(target->second.request, e);
    if (e.kind == RequestEvent::Kind::kEnd) targets_.erase(target);
  }
}

// All requests end with this error.
void EngineThread::fail_all(std::exception_ptr error) {
  scheduler_.abandon("the engine failed");
  publish_();
  std::vector<Target> all;
  for (const auto& [id, target] : targets_) all.push_back(target);
  targets_.clear();
  for (const Target& t : all) t.submission->fail(error);
}

void EngineThread::run_jobs() {
  const bool alone = scheduler_.running() == 0;
  std::vector<Job> due;
  {
    const std::lock_guard lock(mutex_);
    for (auto job = jobs_.begin(); job != jobs_.end();) {
      if (job->when == When::kAlone && !alone) {
        ++job;
        continue;
      }
      due.push_back(std::move(*job));
      job = jobs_.erase(job);
    }
    // Those who want the engine alone get their turn: nobody new begins before.
    scheduler_.hold(!jobs_.empty());
  }
  for (Job& job : due) job.task();
}

}  // namespace flashnext
