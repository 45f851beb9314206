// Shared by the files of the extension module.
#pragma once

#include "cpp/checkpoint/model_shape.h"

#include <cstdint>
#include <cstring>
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <vector>

namespace flashnext::bind {

namespace py = pybind11;

void bind_session(py::module_& m);
void bind_inspect(py::module_& m);
void bind_oracles(py::module_& m);
void bind_bench(py::module_& m);
void bind_gate(py::module_& m);
void bind_plan(py::module_& m);
void bind_policy(py::module_& m);
void bind_traces(py::module_& m);

py::dict shape_dict(const ModelShape& shape);

// (rows, columns) float32; the vector's size must be a multiple of `columns`.
inline py::array_t<float> matrix(const std::vector<float>& values, std::int64_t columns) {
  const auto rows = static_cast<std::int64_t>(values.size()) / columns;
  py::array_t<float> out({rows, columns});
  std::memcpy(out.mutable_data(), values.data(), values.size() * sizeof(float));
  return out;
}

}  // namespace flashnext::bind
