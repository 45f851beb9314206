// flashnext._core: errors, build facts, and the parts bound in the other files.
#include "build_id.h"
#include "cpp/base/errors.h"
#include "cpp/base/thread_pool.h"
#include "cpp/device/cuda_device.h"
#include "cpp/exl3/exl3.h"
#include "python/bind/bind.h"

#include <filesystem>
#include <new>
#include <stdexcept>

namespace flashnext::bind {

namespace {

// The Python exception types; created once, referenced for the life of the process.
PyObject *g_error, *g_input, *g_checkpoint, *g_memory, *g_device, *g_logic;

PyObject* exception_type(py::module_& m, const char* name, PyObject* bases, const char* doc) {
  const std::string qualified = std::string("flashnext.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, bases, nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.add_object(name, py::handle(type));
  return type;
}

void bind_errors(py::module_& m) {
  const auto pair = [](PyObject* a, PyObject* b) {
    return py::make_tuple(py::handle(a), py::handle(b));
  };
  g_error = exception_type(m, "Error", PyExc_Exception, "Base of every flashnext error.");
  g_input =
      exception_type(m, "InputError", pair(g_error, PyExc_ValueError).ptr(),
                     "A request, option or file is wrong; the message says which and what to do.");
  g_checkpoint = exception_type(m, "CheckpointError", g_input, "A checkpoint folder is wrong.");
  g_memory = exception_type(m, "OutOfMemory", pair(g_error, PyExc_MemoryError).ptr(),
                            "A memory space is exhausted. Attributes: space, bytes.");
  g_device = exception_type(m, "DeviceError", pair(g_error, PyExc_RuntimeError).ptr(),
                            "A device failed; the session cannot go on.");
  g_logic = exception_type(m, "LogicError", pair(g_error, PyExc_RuntimeError).ptr(),
                           "A bug in flashnext: please report it.");
  // Exceptions of the standard library enter the ladder too; those of Python pass.
  py::register_exception_translator([](std::exception_ptr p) {
    const auto no_memory = [](const std::string& why) {
      py::object error = py::handle(g_memory)("the host's memory is exhausted (" + why +
                                              "): ask for less at a time, or free memory");
      error.attr("space") = "host";
      error.attr("bytes") = 0;
      PyErr_SetObject(g_memory, error.ptr());
    };
    try {
      if (p) std::rethrow_exception(p);
    } catch (const OutOfMemory& e) {
      py::object error = py::handle(g_memory)(e.what());
      error.attr("space") = e.space();
      error.attr("bytes") = e.bytes();
      PyErr_SetObject(g_memory, error.ptr());
    } catch (const CheckpointError& e) {
      PyErr_SetString(g_checkpoint, e.what());
    } catch (const InputError& e) {
      PyErr_SetString(g_input, e.what());
    } catch (const DeviceError& e) {
      PyErr_SetString(g_device, e.what());
    } catch (const LogicError& e) {
      PyErr_SetString(g_logic, e.what());
    } catch (const Error& e) {
      PyErr_SetString(g_error, e.what());
    } catch (const py::builtin_exception&) {
      throw;
    } catch (const py::error_already_set&) {
      throw;
    } catch (const std::filesystem::filesystem_error& e) {
      PyErr_SetString(g_input, e.what());
    } catch (const std::bad_alloc& e) {
      no_memory(e.what());
    } catch (const std::length_error& e) {
      no_memory(e.what());
    } catch (const std::exception& e) {
      const std::string text = std::string("unexpected: ") + e.what() + "; please report it";
      PyErr_SetString(g_logic, text.c_str());
    }
  });
}

py::dict build_info() {
  py::dict d;
  d["version"] = FN_VERSION;
  d["build_id"] = FN_BUILD_ID;
  d["compiler"] = __VERSION__;
  d["build_type"] = FN_BUILD_TYPE;
  d["flags"] = FN_FLAGS;
  d["cuda"] = cuda_built();
  d["cuda_archs"] = FN_CUDA_ARCHS;
  d["isa"] = std::string(exl3::to_string(exl3::best_isa()));
  d["cores"] = available_cores();
  return d;
}

py::list devices() {
  py::list all;
  py::dict host;
  host["name"] = "host";
  host["description"] = "host, " + std::to_string(available_cores()) + " cores, " +
                        std::string(exl3::to_string(exl3::best_isa()));
  all.append(host);
  for (const CudaDeviceInfo& info : cuda_devices()) {
    py::dict d;
    d["name"] = "cuda:" + std::to_string(info.ordinal);
    d["description"] = info.name;
    d["capability"] = py::make_tuple(info.major, info.minor);
    d["memory_bytes"] = info.memory_bytes;
    d["integrated"] = info.integrated;
    d["compiled"] = info.compiled;
    all.append(d);
  }
  return all;
}

}  // namespace

py::dict shape_dict(const ModelShape& s) {
  py::dict d;
  py::list kinds;
  for (const LayerKind kind : s.layer_kinds) {
    kinds.append(kind == LayerKind::kDeltaNet ? "linear_attention" : "full_attention");
  }
  d["layer_kinds"] = kinds;
#define FN_FIELD(name) d[#name] = s.name
  FN_FIELD(hidden);
  FN_FIELD(layers);
  FN_FIELD(vocab);
  FN_FIELD(eps);
  FN_FIELD(max_positions);
  FN_FIELD(heads);
  FN_FIELD(kv_heads);
  FN_FIELD(head_dim);
  FN_FIELD(rotary);
  FN_FIELD(rope_theta);
  FN_FIELD(gdn_k_heads);
  FN_FIELD(gdn_v_heads);
  FN_FIELD(experts);
  FN_FIELD(top_k);
  FN_FIELD(expert_inner);
  FN_FIELD(shared_inner);
  FN_FIELD(streams);
  FN_FIELD(rank);
  FN_FIELD(ple_layer);
  FN_FIELD(ngram_size);
  FN_FIELD(heads_per_ngram);
  FN_FIELD(separator);
  FN_FIELD(index_heads);
  FN_FIELD(index_dim);
  FN_FIELD(index_budget);
  FN_FIELD(index_block);
  FN_FIELD(mtp_layers);
  FN_FIELD(mtp_per_stream);
#undef FN_FIELD
  return d;
}

}  // namespace flashnext::bind

PYBIND11_MODULE(_core, m) {
  using namespace flashnext::bind;
  m.doc() = "The flashnext engine. Use the flashnext package, which documents every call.";
  bind_errors(m);
  m.def("build_info", &build_info);
  m.def("devices", &devices);
  bind_session(m);
  bind_submission(m);
  bind_inspect(m);
  bind_oracles(m);
  bind_bench(m);
  bind_gate(m);
  bind_plan(m);
  bind_policy(m);
  bind_traces(m);
}
