// What benches need of flashnext._core: sessions on synthetic checkpoints, runs timed step by step,
// and the bounds of this machine.
#include "cpp/cache/trace.h"
#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/bounds.h"
#include "cpp/session/measure.h"
#include "python/bind/options.h"
#include "python/bind/py_session.h"

#include <algorithm>
#include <optional>
#include <span>

namespace flashnext::bind {

namespace {

py::dict cost_dict(const OpCost& cost) {
  py::dict d;
  d["weight_bytes"] = cost.weight_bytes;
  d["other_bytes"] = cost.other_bytes;
  d["exl3_macs"] = cost.exl3_macs;
  d["half_macs"] = cost.half_macs;
  return d;
}

py::dict profile_dict(const StepProfile& p) {
  py::dict d;
  py::list families;
  for (const OpFamily& f : p.families) {
    py::dict e = cost_dict(f.cost);
    e["name"] = f.name;
    e["launches"] = f.launches;
    e["nodes"] = f.nodes;
    e["seconds"] = f.seconds;
    families.append(e);
  }
  d["rows"] = p.rows;
  d["seconds"] = p.seconds;
  d["nodes"] = p.nodes;
  d["experts"] = p.experts;
  d["families"] = families;
  return d;
}

using Ids = py::array_t<std::int32_t, py::array::c_style | py::array::forcecast>;

std::span<const std::int32_t> span_of(const std::optional<Ids>& ids) {
  if (!ids) return {};
  return {ids->data(), static_cast<std::size_t>(ids->size())};
}

py::dict experts_dict(const std::vector<StepExperts>& steps) {
  py::dict d;
#define FN_COUNT(field)                                           \
  {                                                               \
    std::vector<std::uint64_t> column;                            \
    for (const StepExperts& s : steps) column.push_back(s.field); \
    d[#field] = column;                                           \
  }
  FN_COUNT(hits)
  FN_COUNT(fetched)
  FN_COUNT(installed)
  FN_COUNT(on_cpu)
  FN_COUNT(promoted)
  FN_COUNT(fetched_bytes)
  FN_COUNT(cpu_bytes)
  FN_COUNT(fetch_ns)
  FN_COUNT(wait_ns)
#undef FN_COUNT
  return d;
}

// Times of one run, and with `repeats` > 0 the profile of its last step.
py::dict measure(PySession& s, const std::vector<std::int32_t>& prompt, std::int32_t new_tokens,
                 std::int32_t chunk, bool graphs, int repeats, const std::optional<Ids>& feed,
                 const std::optional<Ids>& routing, std::int32_t resident_sets,
                 std::int32_t lanes) {
  MeasureOptions o;
  o.lanes = lanes;
  o.new_tokens = new_tokens;
  o.chunk = chunk;
  o.graphs = graphs;
  o.feed = span_of(feed);
  o.routing = span_of(routing);
  o.resident_sets = resident_sets;
  o.profile = repeats;
  const RunTimes times = s.run(When::kAlone, [&](Session& session, const Poll& poll) {
    o.poll = poll;
    return measure_run(session, prompt, o);
  });
  py::dict d;
  d["chunk_ns"] = times.chunk_ns;
  d["decode_ns"] = times.decode_ns;
  d["tokens"] = times.tokens;
  d["experts"] = experts_dict(times.experts);
  d["streamed_bytes"] = times.streamed_bytes;
  if (repeats > 0) d["profile"] = profile_dict(times.profile);
  return d;
}

// (steps, layers, top_k) of the steps of one row that ran over all layers of a trace, for measure()
// and warm_cache().
Ids routing_of(const cache::Trace& trace) {
  const cache::TraceHead& h = trace.head;
  std::vector<std::int32_t> ids;
  py::ssize_t steps = 0;
  for (const cache::TraceRecord& r : trace.records) {
    if (r.kind != cache::TraceKind::kStep || r.rows != 1 || r.layers != h.layers) continue;
    ++steps;
    for (std::int32_t l = 0; l < h.layers; ++l) {
      const auto choice = trace.choices(r, l);
      ids.insert(ids.end(), choice.begin(), choice.end());
    }
  }
  Ids out({steps, static_cast<py::ssize_t>(h.layers), static_cast<py::ssize_t>(h.top_k)});
  std::copy(ids.begin(), ids.end(), out.mutable_data());
  return out;
}

py::dict host_bounds(int threads, const std::string& isa) {
  const HostBounds b = [&] {
    const Outside outside;
    return measure_host_bounds(threads, exl3::isa_named(isa));
  }();
  py::dict d;
  d["threads"] = b.threads;
  d["core_read"] = b.core_read;
  d["all_read"] = b.all_read;
  d["core_exl3"] = b.core_exl3;
  d["all_exl3"] = b.all_exl3;
  d["core_read_cached"] = b.core_read_cached;
  d["all_read_cached"] = b.all_read_cached;
  d["core_exl3_cached"] = b.core_exl3_cached;
  d["all_exl3_cached"] = b.all_exl3_cached;
  d["core_exl3_macs"] = b.core_exl3_macs;
  d["all_exl3_macs"] = b.all_exl3_macs;
  return d;
}

py::dict cuda_bounds(int ordinal) {
  const CudaBounds b = [&] {
    const Outside outside;
    return measure_cuda_bounds(ordinal);
  }();
  py::dict d;
  d["read"] = b.read;
  d["copy"] = b.copy;
  d["graph_node"] = b.graph_node;
  d["graph_launch"] = b.graph_launch;
  d["int8_ops"] = b.int8_ops;
  d["half_flops"] = b.half_flops;
  py::list link;
  for (const CopyRate& rate : b.link) {
    py::dict e;
    e["bytes"] = rate.bytes;
    e["to_device"] = rate.to_device;
    e["to_host"] = rate.to_host;
    link.append(e);
  }
  d["link"] = link;
  return d;
}

py::dict machine_of(int ordinal) {
  const CudaMachine m = cuda_machine(ordinal);
  py::dict d;
  d["name"] = m.name;
  d["uuid"] = m.uuid;
  d["capability"] = py::make_tuple(m.major, m.minor);
  d["multiprocessors"] = m.multiprocessors;
  d["memory_bytes"] = m.memory_bytes;
  d["driver"] = m.driver;
  d["runtime"] = m.runtime;
  d["clock_khz"] = m.clock_khz;
  d["memory_clock_khz"] = m.memory_clock_khz;
  d["ecc"] = m.ecc;
  d["compiler"] = m.compiler;
  return d;
}

}  // namespace

void bind_bench(py::module_& m) {
  m.def(
      "synthetic_session",
      [](const std::string& like, std::int32_t layers, std::uint64_t synthetic_seed,
         std::size_t pool_bytes, const py::object& progress, const py::kwargs& options) {
        const SessionOptions o = session_options(options);
        const Progress hook = progress_hook(progress);
        return std::make_unique<PySession>([&]() -> std::shared_ptr<Session> {
          const ModelShape shape = synthetic_shape(like, layers);
          return Session::open(Checkpoint::synthetic(shape, {synthetic_seed, pool_bytes}), o, hook);
        });
      },
      py::arg("like"), py::arg("layers") = 0, py::kw_only(), py::arg("synthetic_seed") = 1,
      py::arg("pool_bytes") = SyntheticOptions{}.pool_bytes, py::arg("progress") = py::none());
  m.def(
      "write_synthetic",
      [](const std::string& folder, const std::string& like, std::int32_t layers,
         std::uint64_t seed, std::size_t pool_bytes, const py::object& progress) {
        const Progress hook = progress_hook(progress);
        const Outside outside;
        write_synthetic(folder, synthetic_shape(like, layers), {seed, pool_bytes}, hook);
      },
      py::arg("folder"), py::arg("like"), py::arg("layers") = 0, py::kw_only(), py::arg("seed") = 1,
      py::arg("pool_bytes") = SyntheticOptions{}.pool_bytes, py::arg("progress") = py::none());
  m.def(
      "synthetic_disk_bytes",
      [](const std::string& like, std::int32_t layers) {
        return synthetic_disk_bytes(synthetic_shape(like, layers));
      },
      py::arg("like"), py::arg("layers") = 0);
  m.def("measure", &measure, py::arg("session"), py::arg("prompt"), py::kw_only(),
        py::arg("new_tokens") = 32, py::arg("chunk") = 0, py::arg("graphs") = true,
        py::arg("profile") = 0, py::arg("feed") = py::none(), py::arg("routing") = py::none(),
        py::arg("resident_sets") = 0, py::arg("lanes") = 1);
  m.def("routing_of", &routing_of, py::arg("trace"));
  m.def(
      "warm_cache",
      [](PySession& s, const Ids& routing) {
        const std::span<const std::int32_t> ids = span_of(routing);
        s.run(When::kAlone,
              [&](Session& session, const Poll& poll) { warm_cache(session, ids, poll); });
      },
      py::arg("session"), py::arg("routing"));
  m.def(
      "force_routing",
      [](PySession& s, const std::vector<std::int32_t>& ids, std::int32_t rows) {
        s.run(When::kBetweenSteps,
              [&](Session& session, const Poll&) { session.engine().force_routing(ids, rows); });
      },
      py::arg("session"), py::arg("ids"), py::arg("rows") = 1);
  m.def("host_bounds", &host_bounds, py::arg("threads") = 0, py::arg("isa") = "auto");
  m.def("cuda_bounds", &cuda_bounds, py::arg("ordinal") = 0);
  m.def("cuda_machine", &machine_of, py::arg("ordinal") = 0);
}

}  // namespace flashnext::bind
