// Steps 1 to 4 of the integer linear for 128 inputs of a row, four a lane of a warp.
#pragma once

#include "cpp/base/math.h"
#include "cuda/exl3_trellis.cuh"

namespace flashnext::cuda {

// Four inputs of a lane as they lie in memory: x, or gate and up, and their scales.
struct RawInput {
  float4 x;
  float4 up;
  uint2 suh;
};

// Inputs [at, at + 4) of a row.
__device__ __forceinline__ RawInput load_input(const float* x, const float* up, const __half* suh,
                                               std::int64_t row, int in, int at) {
  RawInput raw;
  raw.x = *reinterpret_cast<const float4*>(x + row * in + at);
  raw.up = make_float4(0, 0, 0, 0);
  if (up != nullptr) raw.up = *reinterpret_cast<const float4*>(up + row * in + at);
  raw.suh = *reinterpret_cast<const uint2*>(suh + at);
  return raw;
}

// Steps 1 and 2 for a warp's 128 inputs. is_activation: the input is silu(x) * up.
__device__ __forceinline__ void rotate(const RawInput& raw, bool is_activation, int lane,
                                       float (&u)[4]) {
  u[0] = raw.x.x;
  u[1] = raw.x.y;
  u[2] = raw.x.z;
  u[3] = raw.x.w;
  if (is_activation) {
    u[0] = __fmul_rn(math::silu(u[0]), raw.up.x);
    u[1] = __fmul_rn(math::silu(u[1]), raw.up.y);
    u[2] = __fmul_rn(math::silu(u[2]), raw.up.z);
    u[3] = __fmul_rn(math::silu(u[3]), raw.up.w);
  }
  float scale[4];
  widen_halves(raw.suh, scale);
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

// Rounding to an integer is an addition of 1.5 * 2^23, after which the low bits of the number are V
// in two's complement. |u| <= m keeps |V| <= L; digits of a row that is not finite mean nothing.
__device__ __forceinline__ Digits digits_of(const float (&u)[4], RowLevels row, int levels) {
  constexpr float kMagic = 12582912.0f;
  constexpr std::uint32_t kMagicBits = 0x4B400000u;
  std::uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = __float_as_uint(__fadd_rn(__fmul_rn(u[i], row.r), kMagic));
  }
  Digits d;
  d.sum = static_cast<int>((v[0] + v[1]) + (v[2] + v[3]) - 4 * kMagicBits);
  d.low = __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
  d.high = d.low;
  if (levels > 127) {
    d.high = __byte_perm(__byte_perm(v[0] + 128, v[1] + 128, 0x0051),
                         __byte_perm(v[2] + 128, v[3] + 128, 0x0051), 0x5410);
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
