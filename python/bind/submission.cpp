// flashnext._core.Submission: requests under way, read by Python threads and event loops.
#include "python/bind/py_session.h"

#include <algorithm>

namespace flashnext::bind {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(50);  // between two looks for Ctrl-C

Request request_of(const py::dict& given) {
  Request r;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
#define FN_FIELD(field, text)                  \
  if (name == text) {                          \
    r.field = value.cast<decltype(r.field)>(); \
    continue;                                  \
  }
    FN_FIELD(prompt, "prompt")
    FN_FIELD(max_new_tokens, "max_new_tokens")
    FN_FIELD(sampling.temperature, "temperature")
    FN_FIELD(sampling.top_p, "top_p")
    FN_FIELD(sampling.top_k, "top_k")
    FN_FIELD(sampling.min_p, "min_p")
    FN_FIELD(sampling.seed, "seed")
    FN_FIELD(stop_ids, "stop_ids")
    FN_FIELD(marks, "marks")
    FN_FIELD(shared_mark, "shared_mark")
#undef FN_FIELD
    if (name == "stop_texts") {
      for (const py::handle& text : value) r.stop_texts.push_back(text.cast<py::bytes>());
      continue;
    }
    throw py::type_error("a request has no field \"" + name + "\"");
  }
  return r;
}

}  // namespace

std::unique_ptr<PySubmission> PySession::submit(const py::list& requests) {
  const std::shared_ptr<Session> s = session();
  std::vector<Request> all;
  for (const py::handle& r : requests) all.push_back(request_of(r.cast<py::dict>()));
  std::shared_ptr<Submission> submission;
  {
    const Outside outside;
    submission = s->submit(std::move(all));
  }
  return std::make_unique<PySubmission>(s, std::move(submission));
}

std::vector<float> PySession::every_logit(const std::vector<std::int32_t>& ids, std::int32_t chunk,
                                          bool scores) {
  std::shared_ptr<Session> s = session();
  refuse_own_thread(*s);
  Request r;
  r.prompt = ids;
  r.chunk = chunk;
  r.every_logit = true;
  std::shared_ptr<Submission> submission;
  {
    const Outside outside;
    submission = s->thread().submit({std::move(r)}, scores);
  }
  // A signal handler may close the session, which waits until nobody else holds it.
  const std::weak_ptr<Session> waited_for = s;
  s.reset();
  bool interrupted = false;
  while (true) {
    bool ended;
    {
      const Outside outside;
      submission->wait(kSlice);
      ended = submission->ended();
    }
    if (ended) break;
    if (!interrupted && PyErr_CheckSignals() != 0) {
      interrupted = true;
      const Outside outside;
      if (const auto held = waited_for.lock()) held->thread().cancel(submission);
    }
  }
  if (interrupted) throw py::error_already_set();
  const Outside outside;
  if (submission->completion(0).finish == Finish::kCancelled) {
    throw InputError("the computation was cancelled, or its session closed");
  }
  return submission->take_logits(0);
}

PySubmission::~PySubmission() {
  const Outside outside;
  if (!submission_->ended()) {
    if (const auto session = session_.lock()) session->thread().cancel(submission_);
  }
}

py::list PySubmission::updates(double seconds) {
  const Clock::time_point until =
      seconds < 0
          ? Clock::time_point::max()
          : Clock::now() +
                std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9));
  if (seconds != 0) {
    if (const auto session = session_.lock()) refuse_own_thread(*session);
  }
  std::vector<Update> got;
  while (true) {
    bool ended;
    {
      const Outside outside;
      const auto left = until - Clock::now();
      got = submission_->wait(std::clamp<std::chrono::nanoseconds>(left, {}, kSlice));
      ended = submission_->ended();
    }
    if (!got.empty() || ended || Clock::now() >= until) break;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  py::list out;
  for (const Update& u : got) {
    const bool token = u.kind == Update::Kind::kToken;
    out.append(py::make_tuple(u.request, static_cast<int>(u.kind), token ? u.token : u.done,
                              token ? 0 : u.total));
  }
  return out;
}

void PySubmission::cancel(std::optional<std::size_t> request) {
  const Outside outside;
  const auto session = session_.lock();
  if (!session) return;
  if (request) {
    session->thread().cancel(submission_, *request);
  } else {
    session->thread().cancel(submission_);
  }
}

bool PySubmission::ended() const {
  const Outside outside;
  return submission_->ended();
}

py::dict PySubmission::completion(std::size_t request) const {
  const Completion c = [&] {
    const Outside outside;
    return submission_->completion(request);
  }();
  py::dict d;
  d["tokens"] = c.tokens;
  d["finish"] = to_string(c.finish);
  d["reason"] = c.reason;
  d["prompt_tokens"] = c.prompt_tokens;
  d["reused_tokens"] = c.reused_tokens;
  d["queued_seconds"] = c.queued_seconds;
  d["prefill_seconds"] = c.prefill_seconds;
  d["decode_seconds"] = c.decode_seconds;
  d["decode_steps"] = c.decode_steps;
  d["longest_wait"] = c.longest_wait;
  return d;
}

int PySubmission::descriptor() const {
  if (const auto session = session_.lock()) refuse_own_thread(*session);
  const Outside outside;
  return submission_->descriptor();
}

void bind_submission(py::module_& m) {
  py::class_<PySubmission>(m, "Submission")
      .def("updates", &PySubmission::updates, py::arg("seconds") = -1.0)
      .def("cancel", &PySubmission::cancel, py::arg("request") = py::none())
      .def_property_readonly("ended", &PySubmission::ended)
      .def("completion", &PySubmission::completion, py::arg("request") = 0)
      .def("fileno", &PySubmission::descriptor);
}

}  // namespace flashnext::bind
