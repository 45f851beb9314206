// Shared by the files of the extension module.
#pragma once

#include "cpp/checkpoint/model_shape.h"

#include <cstdint>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <utility>
#include <vector>

namespace flashnext::bind {

namespace py = pybind11;

void bind_session(py::module_& m);
void bind_submission(py::module_& m);
void bind_inspect(py::module_& m);
void bind_oracles(py::module_& m);
void bind_bench(py::module_& m);
void bind_gate(py::module_& m);
void bind_plan(py::module_& m);
void bind_policy(py::module_& m);
void bind_traces(py::module_& m);

py::dict shape_dict(const ModelShape& shape);

// (rows, columns) float32 over the vector's own memory; its size must be a multiple of `columns`.
inline py::array_t<float> matrix(std::vector<float>&& values, std::int64_t columns) {
  const auto rows = static_cast<std::int64_t>(values.size()) / columns;
  auto* kept = new std::vector<float>(std::move(values));
  const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<float>*>(p); });
  return py::array_t<float>({rows, columns}, kept->data(), owner);
}

}  // namespace flashnext::bind
