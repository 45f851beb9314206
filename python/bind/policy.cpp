// A Python object as a cache::Policy: views of the counters go in, lists come out, checked for type
// here and for sense by the planner.
#include "python/bind/policy.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace flashnext::bind {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// "ValueError: text (file.py:12)", the place being where it was raised.
std::string message(const py::error_already_set& error) {
  std::string text = py::str(error.type().attr("__name__"));
  const std::string value = py::str(error.value());
  if (!value.empty()) text += ": " + value;
  py::object trace = error.trace() ? py::object(error.trace()) : py::none();
  if (trace.is_none()) return text;
  while (!trace.attr("tb_next").is_none()) trace = trace.attr("tb_next");
  const std::string file = py::str(trace.attr("tb_frame").attr("f_code").attr("co_filename"));
  return text + " (" + file.substr(file.rfind('/') + 1) + ":" +
         std::string(py::str(trace.attr("tb_lineno"))) + ")";
}

std::int32_t narrow(std::int64_t value, const std::string& what) {
  if (value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    fail(what + " has " + std::to_string(value) + ", which is no number of a layer or expert");
  }
  return static_cast<std::int32_t>(value);
}

// A list, tuple, array or other iterable of whole numbers.
std::vector<std::int32_t> numbers(py::handle values, const std::string& what) {
  std::vector<std::int32_t> out;
  if (py::isinstance<py::array>(values)) {
    const auto array = py::reinterpret_borrow<py::array>(values);
    const char kind = array.dtype().kind();
    if (array.ndim() != 1 || (array.size() > 0 && kind != 'i' && kind != 'u')) {
      fail(what + " must be one row of whole numbers");
    }
    const py::array_t<std::int64_t, py::array::c_style | py::array::forcecast> wide(array);
    for (py::ssize_t i = 0; i < wide.size(); ++i) out.push_back(narrow(wide.at(i), what));
    return out;
  }
  for (const py::handle item : py::iter(values)) {
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    if (!number) {
      PyErr_Clear();
      fail(what + " must hold whole numbers, and has a " + type_name(item));
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    out.push_back(narrow(overflow != 0 ? std::numeric_limits<std::int64_t>::max() : value, what));
  }
  return out;
}

std::vector<std::vector<std::int32_t>> lists(py::handle values, const std::string& what) {
  std::vector<std::vector<std::int32_t>> out;
  if (values.is_none()) fail(what + " is None, expected a list of lists of experts, one a layer");
  for (const py::handle item : py::iter(values)) {
    out.push_back(numbers(item, what + "[" + std::to_string(out.size()) + "]"));
  }
  return out;
}

// A read-only array of our own, which the next plan overwrites: a policy that keeps it sees other
// values later, but never memory that is gone.
template <class T>
class Table {
 public:
  py::array_t<T> show(std::span<const T> values, std::int64_t rows) {
    const std::int64_t columns = static_cast<std::int64_t>(values.size()) / rows;
    if (array_.ndim() != 2 || array_.shape(0) != rows || array_.shape(1) != columns) {
      array_ = py::array_t<T>({rows, columns});
      data_ = array_.mutable_data();
      array_.attr("setflags")(py::arg("write") = false);
    }
    std::copy(values.begin(), values.end(), data_);
    return array_;
  }

 private:
  py::array_t<T> array_;
  T* data_ = nullptr;
};

class PyPolicy : public cache::Policy {
 public:
  explicit PyPolicy(const py::object& policy) : python_(std::make_unique<Python>()) {
    python_->policy = policy;
    const py::module_ types = py::module_::import("flashnext.policy");
    python_->shape_type = types.attr("CacheShape");
    python_->counters_type = types.attr("Counters");
    python_->plan_type = types.attr("PlanOutput");
    const py::object name = py::getattr(policy, "name", py::none());
    name_ = py::isinstance<py::str>(name) ? std::string(py::str(name)) : type_name(policy);
  }

  ~PyPolicy() override {
    if (Py_IsInitialized() == 0) {
      python_.release();  // the objects went with the interpreter
      return;
    }
    const py::gil_scoped_acquire gil;
    python_.reset();
  }

  std::string name() const override { return name_; }

  std::vector<std::vector<std::int32_t>> initial(const cache::CacheShape& shape,
                                                 std::span<const std::uint64_t> profile) override {
    std::vector<std::vector<std::int32_t>> out;
    const bool ran = call([&] {
      py::object uses = py::none();
      if (!profile.empty()) uses = python_->profile.show(profile, shape.layers);
      const py::object lists_of =
          python_->policy.attr("initial")(shape_object(shape), shape.lines, uses);
      out = lists(lists_of, "initial");
    });
    return ran ? out : cache::make_policy("recency")->initial(shape, profile);
  }

  cache::PlanOutput plan(const cache::PolicyInput& in) override {
    cache::PlanOutput out;
    call([&] {
      const std::int64_t layers = in.shape.layers;
      const py::object counters = python_->counters_type(
          py::arg("shape") = shape_object(in.shape), py::arg("budget") = in.shape.lines,
          py::arg("sequence") = in.sequence,
          py::arg("recent") = python_->recent.show(in.recent, layers),
          py::arg("total") = python_->total.show(in.total, layers),
          py::arg("last") = python_->last.show(in.last, layers),
          py::arg("expert_of") = python_->expert_of.show(in.expert_of, layers));
      const py::object plan = python_->policy.attr("plan")(counters);
      if (!py::isinstance(plan, python_->plan_type)) {
        fail("plan returned a " + type_name(plan) + ", expected a flashnext.PlanOutput");
      }
      out = plan_of(plan);
    });
    return out;
  }

 private:
  // All that belongs to the interpreter.
  struct Python {
    py::object policy, shape_type, counters_type, plan_type, shape;
    Table<std::uint64_t> profile, total;
    Table<std::uint32_t> recent;
    Table<std::int32_t> last, expert_of;
  };

  // Runs with the GIL. False when Ctrl-C ended it: the signal is raised again for whoever waits for
  // the run, and it is no fault of the policy's.
  template <class Call>
  bool call(Call&& run) {
    const py::gil_scoped_acquire gil;
    try {
      run();
      return true;
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_KeyboardInterrupt)) throw std::runtime_error(message(error));
      PyErr_SetInterrupt();
      return false;
    }
  }

  const py::object& shape_object(const cache::CacheShape& s) {
    if (!python_->shape) {
      python_->shape =
          python_->shape_type(py::arg("layers") = s.layers, py::arg("experts") = s.experts,
                              py::arg("top_k") = s.top_k, py::arg("line_bytes") = s.line_bytes);
    }
    return python_->shape;
  }

  static cache::PlanOutput plan_of(const py::object& plan) {
    cache::PlanOutput out;
    for (const py::handle item : py::iter(plan.attr("promote"))) {
      const std::string what = "promote[" + std::to_string(out.promote.size()) + "]";
      const std::vector<std::int32_t> pair = numbers(item, what);
      if (pair.size() != 2) fail(what + " must be a pair (layer, expert)");
      out.promote.push_back({pair[0], pair[1]});
    }
    out.evict = lists(plan.attr("evict"), "evict");
    out.install = py::bool_(plan.attr("install"));
    return out;
  }

  std::string name_;
  std::unique_ptr<Python> python_;
};

}  // namespace

std::shared_ptr<cache::Policy> policy_from(const py::object& policy, std::uint64_t seed) {
  if (policy.is_none()) return nullptr;
  if (py::isinstance<py::str>(policy)) {
    return cache::make_policy(std::string(py::str(policy)), seed);
  }
  const bool is_class = PyType_Check(policy.ptr()) != 0;
  if (is_class || !py::hasattr(policy, "initial") || !py::hasattr(policy, "plan")) {
    throw InputError("policy is " + std::string(py::repr(policy)) +
                     (is_class ? ", a class; give an object of it"
                               : ", expected a name or an object of a flashnext.Policy class"));
  }
  return std::make_shared<PyPolicy>(policy);
}

void bind_policy(py::module_& m) { m.def("policy_names", &cache::policy_names); }

}  // namespace flashnext::bind
