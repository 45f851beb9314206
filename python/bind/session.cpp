// flashnext._core.Session.
#include "python/bind/options.h"
#include "python/bind/py_session.h"

namespace flashnext::bind {

Progress progress_hook(const py::object& callback) {
  if (callback.is_none()) return {};
  return [callback](std::string_view stage, std::uint64_t done, std::uint64_t total) {
    py::gil_scoped_acquire gil;
    callback(std::string(stage), done, total);
  };
}

py::list PySession::generate(const std::vector<std::vector<std::int32_t>>& prompts,
                             std::int32_t max_new_tokens, const SampleParams& sampling,
                             const std::vector<std::int32_t>& stop_ids, const py::object& on_token,
                             const py::object& on_prefill) {
  std::vector<Request> requests;
  for (const auto& prompt : prompts)
    requests.push_back({prompt, max_new_tokens, sampling, stop_ids});
  GenerateHooks hooks;
  hooks.poll = [] {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  if (!on_token.is_none()) {
    hooks.on_token = [&on_token](std::size_t request, std::int32_t token) {
      py::gil_scoped_acquire gil;
      return on_token(request, token).template cast<bool>();
    };
  }
  if (!on_prefill.is_none()) {
    hooks.on_prefill = [&on_prefill](std::size_t request, std::int32_t done, std::int32_t total) {
      py::gil_scoped_acquire gil;
      on_prefill(request, done, total);
    };
  }
  const std::vector<Completion> done = run([&](Session& s) { return s.generate(requests, hooks); });
  py::list out;
  for (const Completion& c : done) {
    py::dict d;
    d["tokens"] = c.tokens;
    d["finish"] = to_string(c.finish);
    d["prompt_tokens"] = c.prompt_tokens;
    d["reused_tokens"] = c.reused_tokens;
    d["prefill_seconds"] = c.prefill_seconds;
    d["decode_seconds"] = c.decode_seconds;
    out.append(d);
  }
  return out;
}

py::dict PySession::stats() {
  const std::lock_guard lock(mutex_);
  Session& s = session();
  py::dict d;
  const Engine::Counters& e = s.engine().counters();
  const Scheduler::Counters& c = s.scheduler().counters();
  d["steps"] = e.steps;
  d["rows"] = e.rows;
  d["rewinds"] = e.rewinds;
  d["snapshots"] = e.snapshots;
  d["restores"] = e.restores;
  d["graphs"] = e.graphs;
  d["ops_per_step"] = e.ops_per_token;
  d["requests"] = c.requests;
  d["prompt_tokens"] = c.prompt_tokens;
  d["reused_tokens"] = c.reused_tokens;
  d["decode_tokens"] = c.new_tokens;
  d["prefill_seconds"] = c.prefill_seconds;
  d["decode_seconds"] = c.decode_seconds;
  d["remembered_prefixes"] = s.scheduler().prefixes().size();
  d["pages"] = s.engine().state().num_pages();
  d["pages_free"] = s.engine().state().free_pages();
  py::dict memory;
  for (const Allocated& a : s.device().allocations()) {
    const auto key = py::str(std::string(to_string(a.space)) + ": " + a.what);
    memory[key] = (memory.contains(key) ? memory[key].cast<std::uint64_t>() : 0) + a.bytes;
  }
  d["memory"] = memory;
  d["device"] = s.device().description();
  if (s.cache() != nullptr) d["cache"] = cache_stats(s);
  return d;
}

namespace {

using Ids = std::vector<std::int32_t>;

}  // namespace

void bind_session(py::module_& m) {
  py::class_<PySession>(m, "Session")
      .def(py::init(
               [](const std::string& path, const py::object& progress, const py::kwargs& options) {
                 const SessionOptions o = session_options(options);
                 const Progress hook = progress_hook(progress);
                 return std::make_unique<PySession>([&] { return Session::open(path, o, hook); });
               }),
           py::arg("path"), py::kw_only(), py::arg("progress") = py::none())
      .def_property_readonly("shape", [](PySession& s) { return shape_dict(s.session().shape()); })
      .def_property_readonly("window", [](PySession& s) { return s.session().options().window; })
      .def_property_readonly("lanes", [](PySession& s) { return s.session().options().lanes; })
      .def_property_readonly("device", [](PySession& s) { return s.session().device_name(); })
      .def_property_readonly("notes", [](PySession& s) { return s.session().notes(); })
      .def(
          "generate",
          [](PySession& s, const std::vector<Ids>& prompts, std::int32_t max_new_tokens,
             float temperature, float top_p, std::int32_t top_k, float min_p, std::uint64_t seed,
             const Ids& stop_ids, const py::object& on_token, const py::object& on_prefill) {
            SampleParams p{};
            p.seed = seed;
            p.temperature = temperature;
            p.top_p = top_p;
            p.min_p = min_p;
            p.top_k = top_k;
            return s.generate(prompts, max_new_tokens, p, stop_ids, on_token, on_prefill);
          },
          py::arg("prompts"), py::kw_only(), py::arg("max_new_tokens") = 256,
          py::arg("temperature") = 0.0f, py::arg("top_p") = 1.0f, py::arg("top_k") = 0,
          py::arg("min_p") = 0.0f, py::arg("seed") = 0, py::arg("stop_ids") = Ids{},
          py::arg("on_token") = py::none(), py::arg("on_prefill") = py::none())
      .def("cancel", &PySession::cancel)
      .def(
          "logits",
          [](PySession& s, const Ids& ids, std::int32_t chunk) {
            const auto v = s.run([&](Session& c) { return c.logits(ids, chunk); });
            return matrix(v, s.session().shape().vocab);
          },
          py::arg("ids"), py::arg("chunk") = 0)
      .def("score",
           [](PySession& s, const Ids& ids) {
             const auto v = s.run([&](Session& c) { return c.score(ids); });
             return py::array_t<float>(static_cast<py::ssize_t>(v.size()), v.data());
           })
      .def("mtp_logits",
           [](PySession& s, const Ids& ids) {
             const auto v = s.run([&](Session& c) { return c.mtp_logits(ids); });
             return matrix(v, s.session().shape().vocab);
           })
      .def("streams",
           [](PySession& s, const Ids& ids) {
             const auto v = s.run([&](Session& c) { return c.streams(ids); });
             return matrix(v, s.session().shape().stack());
           })
      .def("stats", &PySession::stats)
      .def(
          "record",
          [](PySession& s, const std::string& path) { s.run([&](Session& c) { c.record(path); }); },
          py::arg("path"))
      .def("stop_recording",
           [](PySession& s) { return s.run([](Session& c) { return c.stop_recording(); }); })
      .def("close", &PySession::close);
}

}  // namespace flashnext::bind
