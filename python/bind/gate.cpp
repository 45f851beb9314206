// What `flashnext gate` needs of flashnext._core: gates of the ops on a device, gates of the engine
// on a session.
#include "cpp/gate/gate.h"

#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"
#include "python/bind/py_session.h"

#include <charconv>

namespace flashnext::bind {

namespace {

py::dict result_dict(const gate::GateResult& r) {
  py::dict d;
  d["gate"] = r.gate;
  d["op"] = r.op;
  d["case"] = r.name;
  d["rows"] = r.rows;
  d["passed"] = r.passed;
  d["max_error"] = r.max_error;
  d["tolerance"] = r.tolerance;
  d["detail"] = r.detail;
  d["seconds"] = r.seconds;
  return d;
}

gate::GateOptions options_for(const std::string& gate, const py::object& on_result) {
  gate::GateOptions o;
  o.gate = gate;
  if (!on_result.is_none()) {
    o.on_result = [&on_result](const gate::GateResult& r) {
      py::gil_scoped_acquire gil;
      on_result(result_dict(r));
    };
  }
  return o;
}

py::list result_list(const std::vector<gate::GateResult>& results) {
  py::list all;
  for (const gate::GateResult& r : results) all.append(result_dict(r));
  return all;
}

// The device under test, and the oracle: for a GPU the host device at its best, for the host device
// its scalar code on one thread.
struct Pair {
  std::unique_ptr<Device> oracle, device;
};
Pair devices_for(const std::string& name) {
  HostDeviceOptions oracle;
  if (name == "host") {
    oracle.threads = 1;
    oracle.isa = exl3::Isa::kScalar;
    return {make_host_device(oracle), make_host_device({})};
  }
  int ordinal = 0;
  const char* end = name.data() + name.size();
  const bool numbered =
      name.starts_with("cuda:") && std::from_chars(name.data() + 5, end, ordinal).ptr == end;
  if (name != "cuda" && !numbered) {
    throw InputError("device = \"" + name + "\": choose host, cuda or cuda:N");
  }
  return {make_host_device(oracle), make_cuda_device(ordinal, {})};
}

}  // namespace

void bind_gate(py::module_& m) {
  m.def("gate_names", [] {
    py::dict d;
    d["ops"] = gate::op_gates();
    d["engine"] = gate::engine_gates();
    return d;
  });
  m.def("op_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kNumOps; ++i) names.emplace_back(to_string(static_cast<Op>(i)));
    return names;
  });
  m.def(
      "run_op_gates",
      [](const std::string& device, const std::string& gate, const py::object& on_result) {
        gate::GateOptions options = options_for(gate, on_result);
        options.poll = [] {
          refuse_if_ending();
          py::gil_scoped_acquire gil;
          if (PyErr_CheckSignals() != 0) throw py::error_already_set();
        };
        const auto results = [&] {
          const Outside outside;
          const Pair pair = devices_for(device);
          return gate::run_op_gates(*pair.oracle, *pair.device, options);
        }();
        return result_list(results);
      },
      py::arg("device"), py::kw_only(), py::arg("gate") = "", py::arg("on_result") = py::none());
  m.def(
      "run_engine_gates",
      [](PySession& session, const std::string& gate, const py::object& on_result) {
        gate::GateOptions options = options_for(gate, on_result);
        return result_list(session.run(When::kAlone, [&](Session& s, const Poll& poll) {
          options.poll = poll;
          return gate::run_engine_gates(s, options);
        }));
      },
      py::arg("session"), py::kw_only(), py::arg("gate") = "", py::arg("on_result") = py::none());
}

}  // namespace flashnext::bind
