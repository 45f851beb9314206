#include "python/bind/options.h"

#include "cpp/base/errors.h"
#include "python/bind/policy.h"

#include <optional>

namespace flashnext::bind {

namespace {

template <class T>
void take(T& to, const std::string& name, py::handle value) {
  // True is no number here, and 1.5 no whole one.
  const bool wrong = !std::is_same_v<T, bool> && py::isinstance<py::bool_>(value);
  try {
    if (wrong) throw py::cast_error();
    to = value.cast<T>();
  } catch (const py::cast_error&) {
    throw InputError(name + " is " + std::string(py::repr(value)) +
                     ", which is of the wrong type or out of range");
  }
}

}  // namespace

SessionOptions session_options(const py::kwargs& given) {
  SessionOptions o;
  std::optional<py::object> policy;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "policy") {
      policy = py::reinterpret_borrow<py::object>(value);
      continue;
    }
    if (name == "vocabulary") {
      for (const py::handle& token : value) o.vocabulary.push_back(token.cast<py::bytes>());
      continue;
    }
    if (name == "prefix_snapshots") {
      take(o.snapshots, name, value);
      continue;
    }
#define FN_OPTION(field)        \
  if (name == #field) {         \
    take(o.field, name, value); \
    continue;                   \
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
    FN_OPTION(token_wait)
    FN_OPTION(memory_limit)
    FN_OPTION(token_limit)
    FN_OPTION(taps)
    FN_OPTION(mtp)
    FN_OPTION(kv_bytes)
    FN_OPTION(capabilities)
    FN_OPTION(experts)
    FN_OPTION(cache_lines)
    FN_OPTION(host_limit)
    FN_OPTION(cpu_misses)
    FN_OPTION(cpu_threads)
    FN_OPTION(cpu_deadline_seconds)
    FN_OPTION(profile)
    FN_OPTION(keep_profile)
    FN_OPTION(trace)
    FN_OPTION(plan_every)
    FN_OPTION(ring_lines)
    FN_OPTION(lockstep)
    FN_OPTION(link_limit)
    FN_OPTION(forced_routing)
#undef FN_OPTION
    throw py::type_error("no option is named \"" + name + "\"");
  }
  if (policy) o.policy = policy_from(*policy, o.seed);
  return o;
}

}  // namespace flashnext::bind
