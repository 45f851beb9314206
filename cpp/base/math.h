// Elementary functions of the exact path (spec/numerics.md 3): the same bits on host and device,
// from add, mul, div, sqrt and written fma alone. Compile the including file with -ffp-contract=off
// (host) or -fmad=false (device).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FN_HD __host__ __device__ __forceinline__
#else
#include <cmath>
#define FN_HD inline
#endif

namespace flashnext::math {

FN_HD float from_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
#endif
}

FN_HD std::uint32_t to_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
#endif
}

FN_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

FN_HD float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

FN_HD float sqrt(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

// Nearest integer, ties to even, for |x| < 2^22: the fp32 adder rounds.
FN_HD float round_even(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
#if defined(__CUDA_ARCH__)
  return __fsub_rn(__fadd_rn(x, magic), magic);
#else
  return (x + magic) - magic;
#endif
}

// e^x, <= 2 ulp over [-87, 88]; the argument is clamped to that range. NaN stays NaN.
FN_HD float exp(float x) {
  if (x != x) return x;
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = round_even(x * 1.44269504f);
  float f =
      fma(n, -0.693145752f, x);  // ln2 in two parts: the first has 15 bits, so n * hi is exact
  f = fma(n, -1.42860677e-6f, f);
  float p = 1.98412698e-4f;  // 1/7!
  p = fma(p, f, 1.38888889e-3f);
  p = fma(p, f, 8.33333333e-3f);
  p = fma(p, f, 4.16666667e-2f);
  p = fma(p, f, 1.66666667e-1f);
  p = fma(p, f, 0.5f);
  p = fma(p, f, 1.0f);
  p = fma(p, f, 1.0f);
  // p is in [0.70, 1.42]; n in [-126, 127]: adding n to the exponent field stays normal.
  return from_bits(to_bits(p) + (static_cast<std::uint32_t>(static_cast<std::int32_t>(n)) << 23));
}

// ln(1 + x) for x >= 0: the correction term undoes the rounding of 1 + x.
FN_HD float log1p(float x) {
  const float u = 1.0f + x;
  std::uint32_t bits = to_bits(u);
  std::int32_t e = static_cast<std::int32_t>(bits >> 23) - 127;
  float m = from_bits((bits & 0x7FFFFFu) | 0x3F800000u);
  if (m > 1.41421356f) {
    m = m * 0.5f;
    e = e + 1;
  }
  // ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= 0.1716
  const float s = div(m - 1.0f, m + 1.0f);
  const float z = s * s;
  float p = 0.222222222f;  // 2/9
  p = fma(p, z, 0.285714286f);
  p = fma(p, z, 0.4f);
  p = fma(p, z, 0.666666667f);
  p = fma(p, z, 2.0f);
  const float ln_m = s * p;
  const float ef = static_cast<float>(e);
  const float lost = div(x - (u - 1.0f), u);
  return fma(ef, 0.693145752f, fma(ef, 1.42860677e-6f, ln_m + lost));
}

FN_HD float sigmoid(float x) {
  const float e = exp(x < 0.0f ? x : -x);  // in (0, 1]: never overflows
  return x < 0.0f ? div(e, 1.0f + e) : div(1.0f, 1.0f + e);
}

FN_HD float silu(float x) { return x * sigmoid(x); }

FN_HD float softplus(float x) { return x > 20.0f ? x : log1p(exp(x)); }

FN_HD float rsqrt(float x) { return div(1.0f, sqrt(x)); }

}  // namespace flashnext::math
