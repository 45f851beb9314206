// Steps 1 to 4 of the integer linear for 128 inputs of a row, four a lane of a warp.
#pragma once

#include "cpp/base/math.h"
#include "cuda/exl3_trellis.cuh"

namespace flashnext::cuda {

// Inputs [at, at + 4) of a row: x, or silu(x) * up.
__device__ __forceinline__ void load_input(const float* x, const float* up, std::int64_t row,
                                           int in, int at, float (&v)[4]) {
  const float4 value = *reinterpret_cast<const float4*>(x + row * in + at);
  v[0] = value.x;
  v[1] = value.y;
  v[2] = value.z;
  v[3] = value.w;
  if (up != nullptr) {
    const float4 other = *reinterpret_cast<const float4*>(up + row * in + at);
    v[0] = __fmul_rn(math::silu(v[0]), other.x);
    v[1] = __fmul_rn(math::silu(v[1]), other.y);
    v[2] = __fmul_rn(math::silu(v[2]), other.z);
    v[3] = __fmul_rn(math::silu(v[3]), other.w);
  }
}

// suh points at the first of the 128.
__device__ __forceinline__ void rotate_block(const __half* suh, int lane, float (&u)[4]) {
  float scale[4];
  load_halves(suh + 4 * lane, scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) u[i] = __fmul_rn(u[i], scale[i]);
  butterflies(u, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) u[i] = __fmul_rn(u[i], kRootEighth);
}

// As bits, NaN lies above infinity above numbers.
__device__ __forceinline__ std::uint32_t max_bits(const float (&u)[4]) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(u[i]) & 0x7FFFFFFFu);
  return bits;
}

// q, and r = L / m; r = 0 for a row without numbers, whose q is 0 or NaN.
struct RowLevels {
  float q;
  float r;
};

__device__ __forceinline__ RowLevels row_levels(std::uint32_t max_bits, int levels) {
  const float m = __uint_as_float(max_bits);
  const float l = static_cast<float>(levels);
  const float r = __fdiv_rn(l, m);
  if (max_bits >= 0x7F800000u) return {__uint_as_float(0x7FC00000u), 0.0f};
  if (m == 0.0f || __float_as_uint(r) >= 0x7F800000u) return {0.0f, 0.0f};
  return {__fdiv_rn(m, l), r};
}

// Digits of four inputs as bytes: V = 256 high + low, or V = high for one digit.
struct Digits {
  std::uint32_t high;
  std::uint32_t low;
  int sum;  // of V
};

__device__ __forceinline__ Digits digits_of(const float (&u)[4], RowLevels row, int levels) {
  Digits d{0, 0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int v = row.r != 0.0f ? __float2int_rn(__fmul_rn(u[i], row.r)) : 0;
    v = min(max(v, -levels), levels);
    d.sum += v;
    const int high = levels > 127 ? (v + 128) >> 8 : v;
    d.high |= (static_cast<std::uint32_t>(high) & 0xFFu) << (8 * i);
    d.low |= (static_cast<std::uint32_t>(v) & 0xFFu) << (8 * i);
  }
  return d;
}

// Digits of 128 inputs in the byte order of the planes: lanes l and l ^ 2 swap halves so that each
// stores one word.
__device__ __forceinline__ void store_digits(std::int8_t* block, std::uint32_t bytes, int lane) {
  const bool upper = (lane & 2) != 0;
  const std::uint32_t give = upper ? bytes & 0xFFFFu : bytes >> 16;
  const std::uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, give, 2);
  const std::uint32_t word =
      upper ? (other & 0xFFFFu) | (bytes & 0xFFFF0000u) : (bytes & 0xFFFFu) | (other << 16);
  const int t = 2 * (lane & 1) + (upper ? 1 : 0);
  *reinterpret_cast<std::uint32_t*>(block + (lane >> 2) * 16 + 4 * t) = word;
}

}  // namespace flashnext::cuda
