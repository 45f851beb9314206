// flashnext._core.Session.
#include "python/bind/options.h"
#include "python/bind/py_session.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <pthread.h>
#include <thread>
#include <unistd.h>

namespace flashnext::bind {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // between two looks for Ctrl-C
constexpr auto kLongestGoodbye = std::chrono::seconds(20);

std::atomic<bool> is_ending{false};
std::thread::id ending_thread;  // written before is_ending is set

// Every session that may be open. Guarded by its own lock, since sessions go on any thread.
struct Registry {
  std::mutex mutex;
  std::vector<PySession*> sessions;
};
Registry& registry() {
  static Registry* all = new Registry;  // outlives every static
  return *all;
}

}  // namespace

bool ending() noexcept { return is_ending.load(); }

void refuse_if_ending() {
  if (!ending()) return;
  if (PyGILState_Check() != 0 && std::this_thread::get_id() != ending_thread) {
    const Outside stop_here;
  }
  throw InputError("the interpreter is ending: no session can be used any more");
}

Outside::~Outside() {
  if (ending() && std::this_thread::get_id() != ending_thread) {
    --count();
    while (true) ::pause();
  }
  release_.reset();
  --count();
}

std::atomic<int>& Outside::count() noexcept {
  static std::atomic<int> threads{0};
  return threads;
}

void shutdown() {
  ending_thread = std::this_thread::get_id();
  is_ending.store(true);
  const py::gil_scoped_release release;
  const auto until = std::chrono::steady_clock::now() + kLongestGoodbye;
  {
    // A session whose object goes meanwhile waits for this lock, outside of the GIL.
    const std::lock_guard lock(registry().mutex);
    for (PySession* s : registry().sessions) s->close_outside();
  }
  while (Outside::count() > 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Progress progress_hook(const py::object& callback) {
  if (callback.is_none()) {
    return [](std::string_view, std::uint64_t, std::uint64_t) { refuse_if_ending(); };
  }
  return [callback](std::string_view stage, std::uint64_t done, std::uint64_t total) {
    refuse_if_ending();
    py::gil_scoped_acquire gil;
    callback(std::string(stage), done, total);
  };
}

void refuse_own_thread(Session& session) {
  if (!session.thread().is_this_thread()) return;
  throw InputError("a policy cannot wait for the session that asks it; plan from the counters");
}

PySession::PySession(const std::function<std::shared_ptr<Session>()>& open) {
  refuse_if_ending();
  const Outside outside;
  session_ = open();
  const std::lock_guard lock(registry().mutex);
  registry().sessions.push_back(this);
}

PySession::~PySession() {
  const Outside outside;
  {
    const std::lock_guard lock(registry().mutex);
    std::erase(registry().sessions, this);
  }
  if (session_ && session_->thread().is_this_thread()) {
    // Collected while its own policy runs: a thread cannot wait for itself.
    std::thread([s = std::move(session_)]() mutable { s.reset(); }).detach();
    return;
  }
  close_outside();
}

std::shared_ptr<Session> PySession::session() const {
  refuse_if_ending();
  const std::lock_guard lock(mutex_);  // held for the copy of a pointer alone
  if (!session_) throw InputError("the session is closed; open a new one");
  return session_;
}

void PySession::run_job(When when, const std::function<void(Session&, const Poll&)>& job) {
  std::shared_ptr<Session> s = session();
  refuse_own_thread(*s);
  std::atomic<bool> interrupted{false};
  const Poll poll = [&interrupted] {
    if (interrupted.load() || ending()) throw InputError("the run was interrupted");
  };
  std::future<void> done;
  {
    const Outside outside;
    // The thread that runs the job is the session's own, so that the session is there.
    done = s->thread().post(when, [&poll, &job, session = s.get()] {
      poll();
      job(*session, poll);
    });
  }
  s.reset();  // a signal handler may close the session, which waits until nobody else holds it
  // From here on the job may read what lies on this stack: it is waited for whatever happens.
  bool raised = false;
  while (true) {
    bool ready;
    {
      const Outside outside;
      ready = done.wait_for(kSlice) == std::future_status::ready;
    }
    if (ready) break;
    if (!raised && PyErr_CheckSignals() != 0) {
      raised = true;
      interrupted.store(true);
      py::error_scope keep;  // the exception waits for the job
      const Outside outside;
      done.wait();
    }
  }
  if (raised) throw py::error_already_set();
  try {
    done.get();
  } catch (const std::future_error&) {
    throw InputError("the session was closed");
  }
}

void PySession::cancel() {
  std::shared_ptr<Session> s;
  {
    const std::lock_guard lock(mutex_);
    s = session_;
  }
  const Outside outside;
  if (s) s->cancel();
  s.reset();
}

std::string PySession::close() {
  {
    const std::lock_guard lock(mutex_);
    if (session_ && session_->thread().is_this_thread()) {
      throw InputError("a policy cannot close the session that asks it");
    }
  }
  const Outside outside;
  return close_outside();
}

std::string PySession::close_outside() {
  std::shared_ptr<Session> s;
  {
    const std::lock_guard lock(mutex_);
    s.swap(session_);
  }
  if (!s) return {};
  if (!s->thread().is_this_process()) {
    // The parent's: its files are the parent's to write, and its device cannot be let go of here.
    static std::vector<std::shared_ptr<Session>>* const parents =
        new std::vector<std::shared_ptr<Session>>;
    parents->push_back(std::move(s));
    return {};
  }
  s->stop();
  std::string problem = s->save_profile();
  try {
    if (s->recording()) s->stop_recording();
  } catch (const InputError& e) {
    problem += (problem.empty() ? "" : "; ") + std::string(e.what());
  }
  // Calls of other threads that were under way end at once, now that the engine's thread has.
  while (s.use_count() > 1 && !ending()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return problem;
}

namespace {

using Ids = std::vector<std::int32_t>;

}  // namespace

void bind_session(py::module_& m) {
  // Threads that were outside when the process forked are not in the child.
  pthread_atfork(nullptr, nullptr, [] { Outside::count() = 0; });
  m.def("shutdown", &shutdown);
  py::class_<PySession>(m, "Session")
      .def(py::init(
               [](const std::string& path, const py::object& progress, const py::kwargs& options) {
                 const SessionOptions o = session_options(options);
                 const Progress hook = progress_hook(progress);
                 return std::make_unique<PySession>([&] { return Session::open(path, o, hook); });
               }),
           py::arg("path"), py::kw_only(), py::arg("progress") = py::none())
      .def_property_readonly("shape",
                             [](const PySession& s) { return shape_dict(s.session()->shape()); })
      .def_property_readonly("window",
                             [](const PySession& s) { return s.session()->options().window; })
      .def_property_readonly("lanes",
                             [](const PySession& s) { return s.session()->options().lanes; })
      .def_property_readonly("device",
                             [](const PySession& s) { return s.session()->device_name(); })
      .def_property_readonly("notes", [](const PySession& s) { return s.session()->notes(); })
      .def("submit", &PySession::submit, py::arg("requests"))
      .def("cancel", &PySession::cancel)
      .def(
          "logits",
          [](PySession& s, const Ids& ids, std::int32_t chunk) {
            const auto vocab = s.session()->shape().vocab;
            return matrix(s.every_logit(ids, chunk, false), vocab);
          },
          py::arg("ids"), py::arg("chunk") = 0)
      .def("score",
           [](PySession& s, const Ids& ids) {
             const std::vector<float> v = s.every_logit(ids, 0, true);
             return py::array_t<float>(static_cast<py::ssize_t>(v.size()), v.data());
           })
      .def("mtp_logits",
           [](PySession& s, const Ids& ids) {
             const std::shared_ptr<Session> session = s.session();
             std::vector<float> v = [&] {
               const Outside outside;
               return session->mtp_logits(ids);
             }();
             return matrix(std::move(v), session->shape().vocab);
           })
      .def("streams",
           [](PySession& s, const Ids& ids) {
             const std::shared_ptr<Session> session = s.session();
             std::vector<float> v = [&] {
               const Outside outside;
               return session->streams(ids);
             }();
             return matrix(std::move(v), session->shape().stack());
           })
      .def("stats", [](const PySession& s) { return stats_dict(*s.session()); })
      .def(
          "record",
          [](PySession& s, const std::string& path) {
            const std::shared_ptr<Session> session = s.session();
            const Outside outside;
            session->record(path);
          },
          py::arg("path"))
      .def("stop_recording",
           [](PySession& s) {
             const std::shared_ptr<Session> session = s.session();
             const Outside outside;
             return session->stop_recording();
           })
      .def("close", &PySession::close);
}

}  // namespace flashnext::bind
