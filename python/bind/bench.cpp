// What benches need of flashnext._core: sessions on synthetic checkpoints, runs timed step by step,
// and the bounds of this machine.
#include "cpp/checkpoint/synthetic.h"
#include "python/bind/py_session.h"

namespace flashnext::bind {

namespace {

// Options of a session by the names of Session.__init__.
SessionOptions session_options(const py::kwargs& given) {
  SessionOptions o;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
#define FN_OPTION(field)                       \
  if (name == #field) {                        \
    o.field = value.cast<decltype(o.field)>(); \
    continue;                                  \
  }
    FN_OPTION(device)
    FN_OPTION(window)
    FN_OPTION(lanes)
    FN_OPTION(threads)
    FN_OPTION(levels)
    FN_OPTION(seed)
    FN_OPTION(isa)
    FN_OPTION(graphs)
    FN_OPTION(chunk)
    FN_OPTION(memory_limit)
    FN_OPTION(token_limit)
    FN_OPTION(taps)
    FN_OPTION(capabilities)
#undef FN_OPTION
    if (name != "prefix_snapshots") {
      throw py::type_error("no option is named \"" + name + "\"");
    }
    o.snapshots = value.cast<std::int32_t>();
  }
  return o;
}

}  // namespace

void bind_bench(py::module_& m) {
  m.def(
      "synthetic_session",
      [](const std::string& like, std::int32_t layers, std::uint64_t synthetic_seed,
         std::size_t pool_bytes, const py::object& progress, const py::kwargs& options) {
        const SessionOptions o = session_options(options);
        const Progress hook = progress_hook(progress);
        return std::make_unique<PySession>([&] {
          const ModelShape shape = synthetic_shape(like, layers);
          return Session::open(Checkpoint::synthetic(shape, {synthetic_seed, pool_bytes}), o, hook);
        });
      },
      py::arg("like"), py::arg("layers") = 0, py::kw_only(), py::arg("synthetic_seed") = 1,
      py::arg("pool_bytes") = SyntheticOptions{}.pool_bytes, py::arg("progress") = py::none());
}

}  // namespace flashnext::bind
