// flashnext._core.Trace: routing traces and their replay.
#include "cpp/base/errors.h"
#include "cpp/cache/profile.h"
#include "cpp/cache/replay.h"
#include "cpp/cache/synthetic_trace.h"
#include "cpp/cache/trace.h"
#include "python/bind/outside.h"
#include "python/bind/policy.h"

#include <algorithm>
#include <memory>

namespace flashnext::bind {

namespace {

using cache::Trace;
using cache::TraceKind;
using cache::TraceRecord;
using Uses = py::array_t<std::uint64_t, py::array::c_style | py::array::forcecast>;

// (layers, experts) distinct uses a step, as the planner counts them.
Uses uses_of(const Trace& t) {
  Uses out({t.head.layers, t.head.experts});
  std::uint64_t* counts = out.mutable_data();
  std::fill(counts, counts + out.size(), 0);
  std::vector<std::uint16_t> distinct;
  for (const TraceRecord& r : t.records) {
    for (std::int32_t i = 0; i < r.layers; ++i) {
      const auto ids = t.choices(r, i);
      distinct.assign(ids.begin(), ids.end());
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      std::uint64_t* layer = counts + static_cast<std::int64_t>(r.first + i) * t.head.experts;
      for (const std::uint16_t id : distinct) ++layer[id];
    }
  }
  return out;
}

py::dict info(const Trace& t) {
  std::int64_t steps = 0, step_rows = 0, prompt_rows = 0;
  for (const TraceRecord& r : t.records) {
    const bool is_step = r.kind == TraceKind::kStep;
    steps += is_step ? 1 : 0;
    (is_step ? step_rows : prompt_rows) += r.rows;
  }
  py::dict d;
  d["layers"] = t.head.layers;
  d["experts"] = t.head.experts;
  d["top_k"] = t.head.top_k;
  d["line_bytes"] = t.head.line_bytes;
  d["fingerprint"] = t.head.fingerprint;
  d["records"] = t.records.size();
  d["steps"] = steps;
  d["step_rows"] = step_rows;
  d["prompt_rows"] = prompt_rows;
  return d;
}

template <class T, class Get>
py::array_t<std::int64_t> column(const std::vector<T>& items, Get&& get) {
  py::array_t<std::int64_t> out(static_cast<py::ssize_t>(items.size()));
  std::int64_t* data = out.mutable_data();
  for (const T& item : items) *data++ = static_cast<std::int64_t>(get(item));
  return out;
}

py::dict result_dict(const cache::ReplayResult& r) {
  py::dict layers, steps, d;
  using L = cache::LayerReplay;
  using S = cache::StepReplay;
  layers["hits"] = column(r.layers, [](const L& l) { return l.hits; });
  layers["fetched"] = column(r.layers, [](const L& l) { return l.fetched; });
  layers["installed"] = column(r.layers, [](const L& l) { return l.installed; });
  layers["on_cpu"] = column(r.layers, [](const L& l) { return l.on_cpu; });
  layers["promoted"] = column(r.layers, [](const L& l) { return l.promoted; });
  layers["prompt_uses"] = column(r.layers, [](const L& l) { return l.prompt_uses; });
  layers["prompt_hits"] = column(r.layers, [](const L& l) { return l.prompt_hits; });
  steps["sequence"] = column(r.steps, [](const S& s) { return s.sequence; });
  steps["rows"] = column(r.steps, [](const S& s) { return s.rows; });
  steps["hits"] = column(r.steps, [](const S& s) { return s.counts.hits; });
  steps["fetched"] = column(r.steps, [](const S& s) { return s.counts.fetched; });
  d["layers"] = layers;
  d["steps"] = steps;
  d["bytes"] = r.bytes;
  d["hit_rate"] = r.hit_rate();
  d["policy"] = r.policy;
  d["fault"] = r.fault ? py::object(py::str(r.fault->message())) : py::none();
  d["plans"] = r.plans;
  d["plan_seconds"] = r.plan_seconds;
  return d;
}

py::dict replay(const Trace& t, std::int32_t lines, const py::object& policy, std::uint64_t seed,
                std::int32_t plan_every, double plan_limit, const std::optional<Uses>& profile,
                const std::vector<std::int32_t>& cpu_of) {
  const std::shared_ptr<cache::Policy> plans = policy_from(policy, seed);
  cache::ReplayOptions o;
  o.plan_every = plan_every;
  o.planner.plan_limit = plan_limit;
  o.cpu_of = cpu_of;
  if (profile) o.profile.assign(profile->data(), profile->data() + profile->size());
  cache::ReplayResult result;
  {
    const Outside outside;
    result = cache::replay(t, cache::shape_of(t.head, lines), plans, o);
  }
  return result_dict(result);
}

py::tuple synthetic(std::int32_t layers, std::int32_t experts, std::int32_t top_k,
                    std::int64_t line_bytes, std::int32_t steps, std::int32_t rows, double zipf,
                    double recency, std::int32_t window, std::uint64_t seed, std::int32_t lines,
                    double hit_rate) {
  cache::SyntheticTraceOptions o;
  o.head = {layers, experts, top_k, line_bytes, 0};
  o.steps = steps;
  o.rows = rows;
  o.zipf = zipf;
  o.recency = recency;
  o.window = window;
  o.seed = seed;
  const Outside outside;
  cache::TunedTrace t{{}, recency, 0};
  if (lines > 0) {
    t = cache::tuned_trace(o, lines, hit_rate);
  } else {
    t.trace = cache::synthetic_trace(o);
  }
  auto trace = std::make_unique<Trace>(std::move(t.trace));
  const py::gil_scoped_acquire gil;
  return py::make_tuple(std::move(trace), t.recency, t.hit_rate);
}

py::tuple load_profile(const std::string& path, std::uint64_t fingerprint, std::int32_t layers,
                       std::int32_t experts) {
  const cache::Profile p = cache::load_profile(path, fingerprint, layers, experts);
  if (p.uses.empty()) return py::make_tuple(py::none(), p.note);
  Uses uses({layers, experts});
  std::copy(p.uses.begin(), p.uses.end(), uses.mutable_data());
  return py::make_tuple(uses, p.note);
}

}  // namespace

void bind_traces(py::module_& m) {
  py::class_<Trace>(m, "Trace")
      .def(py::init(&cache::read_trace), py::arg("path"))
      .def_static("synthetic", &synthetic, py::arg("layers"), py::arg("experts"), py::arg("top_k"),
                  py::kw_only(), py::arg("line_bytes") = 0, py::arg("steps") = 256,
                  py::arg("rows") = 1, py::arg("zipf") = 0.6, py::arg("recency") = 0.5,
                  py::arg("window") = 8, py::arg("seed") = 1, py::arg("lines") = 0,
                  py::arg("hit_rate") = 0.0)
      .def("info", &info)
      .def("uses", &uses_of)
      .def("save", [](const Trace& t, const std::string& path) { cache::write_trace(path, t); })
      .def("replay", &replay, py::arg("lines"), py::arg("policy") = py::none(), py::kw_only(),
           py::arg("seed") = 0, py::arg("plan_every") = 16, py::arg("plan_limit") = 0.05,
           py::arg("profile") = py::none(), py::arg("cpu_of") = std::vector<std::int32_t>{});
  m.def("load_profile", &load_profile, py::arg("path"), py::arg("fingerprint"), py::arg("layers"),
        py::arg("experts"));
}

}  // namespace flashnext::bind
