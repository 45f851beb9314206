// Steps 1 to 4, 6 and 7 of the integer linear with AVX2, FMA and F16C: the operations of the scalar
// form on whole vectors, each with the same operands and rounding.
#if defined(__x86_64__)

#include "cpp/exl3/avx2_rows.h"

#include "cpp/exl3/kernels.h"

#include <immintrin.h>

namespace flashnext::exl3::internal {

namespace {

#define FN_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FN_AVX2_INLINE FN_AVX2 __attribute__((always_inline)) inline

constexpr int kParts = kBlock / 8;
constexpr std::int32_t kKeep =
    8192;  // rotated inputs kept on the stack; the rest is computed twice

// One butterfly stage inside a register: `swapped` holds the partner of every element.
template <int Upper>
FN_AVX2_INLINE __m256 stage(__m256 u, __m256 swapped) {
  return _mm256_blend_ps(_mm256_add_ps(u, swapped), _mm256_sub_ps(swapped, u), Upper);
}

FN_AVX2_INLINE void rotate(float* u) {
  __m256 part[kParts];
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    __m256 v = _mm256_loadu_ps(u + 8 * i);
    v = stage<0xAA>(v, _mm256_permute_ps(v, 0xB1));
    v = stage<0xCC>(v, _mm256_permute_ps(v, 0x4E));
    part[i] = stage<0xF0>(v, _mm256_permute2f128_ps(v, v, 1));
  }
#pragma GCC unroll 4
  for (int stride = 1; stride < kParts; stride *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) {
      if ((i & stride) != 0) continue;
      const __m256 lower = part[i];
      const __m256 upper = part[i + stride];
      part[i] = _mm256_add_ps(lower, upper);
      part[i + stride] = _mm256_sub_ps(lower, upper);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) {
    _mm256_storeu_ps(u + 8 * i, _mm256_mul_ps(part[i], _mm256_set1_ps(kRotate)));
  }
}

FN_AVX2_INLINE __m256 load_halves(const std::byte* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(p)));
}

// Rotated inputs [first, first + 128).
FN_AVX2_INLINE void rotate_input(const Exl3Weight& w, const float* x, std::int32_t first,
                                 float* u) {
  for (int i = 0; i < kBlock; i += 8) {
    const std::int32_t at = first + i;
    _mm256_storeu_ps(u + i, _mm256_mul_ps(_mm256_loadu_ps(x + at), load_halves(w.suh + 2 * at)));
  }
  rotate(u);
}

// Low halves of 16 dwords in [-32768, 32767], in order.
FN_AVX2_INLINE __m256i pack16(__m256i a, __m256i b) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
}

FN_AVX2_INLINE void store_bytes(std::int8_t* to, __m256i words) {
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(words, words), 0xD8);
  _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to), _mm256_castsi256_si128(bytes));
}

FN_AVX2_INLINE std::int64_t add_lanes(__m256i v) {
  alignas(32) std::int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
  std::int64_t sum = 0;
  for (const std::int32_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

FN_AVX2 void avx2_prepare_row(const Exl3Weight& w, const float* x, std::int32_t levels,
                              std::int32_t row, const Prepared& p) noexcept {
  alignas(32) float kept[kKeep];
  alignas(32) float again[kBlock];
  __m256i max_bits = _mm256_setzero_si256();
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    float* u = first < kKeep ? kept + first : again;
    rotate_input(w, x, first, u);
    for (int i = 0; i < kBlock; i += 8) {
      const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_load_ps(u + i)),
                                            _mm256_set1_epi32(0x7FFFFFFF));
      max_bits = _mm256_max_epu32(max_bits, bits);
    }
  }
  alignas(32) std::uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), max_bits);
  std::uint32_t most_bits = 0;
  for (const std::uint32_t lane : lanes) most_bits = lane > most_bits ? lane : most_bits;
  float q;
  float r;
  const RowKind kind = row_scales(most_bits, levels, &q, &r);
  if (kind != RowKind::kNumber) {
    empty_row(kind, row, p);
    return;
  }

  const std::int64_t at = static_cast<std::int64_t>(row) * p.in;
  __m256i sum = _mm256_setzero_si256();
  __m256i sum_high = _mm256_setzero_si256();
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    float* u = first < kKeep ? kept + first : again;
    if (first >= kKeep) rotate_input(w, x, first, u);
    for (int i = 0; i < kBlock; i += 16) {
      __m256i v[2];
      __m256i high[2];
      __m256i low[2];
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        v[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(u + i + 8 * k), _mm256_set1_ps(r)));
        v[k] = _mm256_max_epi32(_mm256_min_epi32(v[k], _mm256_set1_epi32(levels)),
                                _mm256_set1_epi32(-levels));
        high[k] =
            _mm256_cvtps_epi32(_mm256_div_ps(_mm256_cvtepi32_ps(v[k]), _mm256_set1_ps(254.0f)));
        low[k] = _mm256_sub_epi32(v[k], _mm256_mullo_epi32(high[k], _mm256_set1_epi32(254)));
        sum = _mm256_add_epi32(sum, v[k]);
        sum_high = _mm256_add_epi32(sum_high, high[k]);
      }
      const std::int64_t to = at + first + i;
      _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(p.v + to), pack16(v[0], v[1]));
      store_bytes(p.high + to, pack16(high[0], high[1]));
      store_bytes(p.low + to, pack16(low[0], low[1]));
    }
  }
  p.q[row] = q;
  p.sum[row] = add_lanes(sum);
  p.sum_high[row] = add_lanes(sum_high);
  p.sum_low[row] = p.sum[row] - 254 * p.sum_high[row];
}

FN_AVX2 void avx2_finish(const Exl3Weight& w, std::int32_t block, float q, std::int64_t total,
                         const std::int64_t* sums, float* y) noexcept {
  alignas(32) float a[kBlock];
  for (int i = 0; i < kBlock; ++i) a[i] = static_cast<float>(sums[i]);
  const __m256 offset = _mm256_set1_ps(kOffset * (q * static_cast<float>(total)));
  for (int i = 0; i < kBlock; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(q), _mm256_load_ps(a + i));
    _mm256_store_ps(a + i, _mm256_fmadd_ps(_mm256_set1_ps(kInverse), scaled, offset));
  }
  rotate(a);
  for (int i = 0; i < kBlock; i += 8) {
    const std::int32_t at = block * kBlock + i;
    __m256 out = _mm256_mul_ps(_mm256_load_ps(a + i), load_halves(w.svh + 2 * at));
    if (w.bias != nullptr) out = _mm256_add_ps(out, _mm256_loadu_ps(w.bias + at));
    _mm256_storeu_ps(y + i, out);
  }
}

}  // namespace flashnext::exl3::internal

#endif
