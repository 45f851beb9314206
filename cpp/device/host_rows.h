// Loops over one row of fp32 values, and the fp16 product, in the versions of host_vec.h. Every
// version gives the same bits; no result depends on how many rows a caller has or how it cuts them.
// Threads: pure functions.
#pragma once

#include "cpp/base/errors.h"
#include "cpp/base/half.h"
#include "cpp/device/host_ops.h"

#include <cstdint>
#include <string>

namespace flashnext::host {

// `n` is a multiple of 16 where a sum is taken (16 partials, then a tree), any number elsewhere.
struct RowKernels {
  // s[i] = s[i] + a * y[i]
  void (*add_scaled)(float* s, float a, const float* y, std::int32_t n);
  // s[i] = fma(a, y[i], s[i])
  void (*add_fma)(float* s, float a, const float* y, std::int32_t n);
  // out[i] = a[i] + b[i]
  void (*add)(const float* a, const float* b, float* out, std::int32_t n);
  // out[i] = a * y[i]
  void (*scale)(float a, const float* y, float* out, std::int32_t n);
  // out[i] = x[i] / sqrt(mean x^2 + eps) * w[i], as (x * r) * w; out may be x
  void (*norm)(const float* x, const float* w, float eps, float* out, std::int32_t n);
  float (*sum_squares)(const float* x, std::int32_t n);
  // sum_i k[i] * (s[i] * r * w[i])
  float (*dot_scaled)(const float* k, const float* s, float r, const float* w, std::int32_t n);
  // One row of a depthwise convolution: sum_t taps[i * num_taps + t] * x[t][i], t ascending from 0,
  // mul then add; x[t] = null reads as zeros. s[i] = s[i] + (a * v[i] + silu(that)).
  void (*add_conv)(const float* taps, std::int32_t num_taps, const float* const* x, float a,
                   const float* v, float* s, std::int32_t n);
  // x[i] = silu(x[i] / d)
  void (*silu_of_quotient)(float* x, float d, std::int32_t n);
  // acc[i] = sigmoid(g[i]) * x[i], plus acc[i] before it when `add`
  void (*gate)(const float* g, const float* x, bool add, float* acc, std::int32_t n);
  void (*divide)(float* x, float d, std::int32_t n);
  // e[i] = exp(x[i] - shift)
  void (*exp_shifted)(const float* x, float shift, float* e, std::int32_t n);
  // y[r, o] = sum_k w[o, k] x[r, k]: 16 partials k mod 16, mul then add in ascending k, then the
  // tree. w: fp16 (outputs, in); x: row stride x_stride; y: row stride y_stride.
  void (*product)(const std::uint16_t* w, std::int32_t in, std::int32_t outputs, const float* x,
                  std::int64_t x_stride, std::int32_t rows, float* y, std::int64_t y_stride);
};

const RowKernels& row_kernels(exl3::Isa isa) noexcept;

// y[i] = w[i] x over the pool; every w[i] has the same `in`, x and y[i] are dense row-major.
void products(const DenseWeight* w, float* const* y, std::int32_t n, const float* x,
              std::int32_t rows, Context& context);

// Rows of an op now; throws LogicError beyond the maximum that its buffers were made for.
inline std::int32_t checked_rows(const RowCount& count, const char* op) {
  const std::int32_t rows = rows_of(count);
  if (rows < 0 || rows > count.max) {
    throw LogicError(std::string(op) + ": " + std::to_string(rows) +
                     " rows, the program was built for " + std::to_string(count.max));
  }
  return rows;
}

// Token ids come from the caller's step: a bad one is refused, never clamped.
inline void check_token(std::int32_t token, const char* op, std::int64_t row) {
  if (token < 0) {
    throw InputError(std::string(op) + ": token id " + std::to_string(token) + " in row " +
                     std::to_string(row) + " is negative");
  }
}

// out (n) = row `index` of a bf16 table (.., n) of any alignment.
inline void widen_bf16(const std::byte* table, std::int64_t index, std::int32_t n, float* out) {
  const std::byte* row = table + index * n * 2;
  for (std::int32_t i = 0; i < n; ++i) out[i] = bf16_to_f32(load_u16(row + std::int64_t{i} * 2));
}

// Items of a loop that are worth handing to another thread, for items of `cost` multiply-adds.
inline std::int64_t grain_for(std::int64_t cost) {
  constexpr std::int64_t kWorth = 65536;
  return cost >= kWorth ? 1 : kWorth / (cost > 0 ? cost : 1);
}

}  // namespace flashnext::host
