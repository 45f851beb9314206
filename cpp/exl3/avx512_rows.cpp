// Steps 1 to 4, 6 and 7 of the integer linear with AVX-512: the operations of the scalar form on
// whole vectors, each with the same operands and rounding. A block of 128 is eight registers.
#if defined(__x86_64__)

#include "cpp/exl3/avx512_rows.h"

#include "cpp/exl3/kernels.h"

#include <immintrin.h>

// GCC 12 takes the deliberately undefined operand inside some intrinsics for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace flashnext::exl3::internal {

namespace {

#define FN_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define FN_AVX512_INLINE FN_AVX512 __attribute__((always_inline)) inline

constexpr int kParts = kBlock / 16;
constexpr std::int32_t kKeep =
    8192;  // rotated inputs kept on the stack; the rest is computed twice

struct Block {
  __m512 part[kParts];
};

// One butterfly stage inside a register: `swapped` holds the partner of every element.
FN_AVX512_INLINE __m512 stage(__m512 u, __m512 swapped, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(u, swapped), upper, swapped, u);
}

FN_AVX512_INLINE void rotate(Block& b) {
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) {
    __m512 u = b.part[i];
    u = stage(u, _mm512_permute_ps(u, 0xB1), 0xAAAA);
    u = stage(u, _mm512_permute_ps(u, 0x4E), 0xCCCC);
    u = stage(u, _mm512_shuffle_f32x4(u, u, 0xB1), 0xF0F0);
    b.part[i] = stage(u, _mm512_shuffle_f32x4(u, u, 0x4E), 0xFF00);
  }
#pragma GCC unroll 3
  for (int stride = 1; stride < kParts; stride *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
      if ((i & stride) != 0) continue;
      const __m512 lower = b.part[i];
      const __m512 upper = b.part[i + stride];
      b.part[i] = _mm512_add_ps(lower, upper);
      b.part[i + stride] = _mm512_sub_ps(lower, upper);
    }
  }
  const __m512 scale = _mm512_set1_ps(kRotate);
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) b.part[i] = _mm512_mul_ps(b.part[i], scale);
}

FN_AVX512_INLINE __m512 load_halves(const std::byte* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(p)));
}

FN_AVX512_INLINE Block rotated_input(const Exl3Weight& w, const float* x, std::int32_t first) {
  Block b;
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) {
    const std::int32_t at = first + 16 * i;
    b.part[i] = _mm512_mul_ps(_mm512_loadu_ps(x + at), load_halves(w.suh + 2 * at));
  }
  rotate(b);
  return b;
}

}  // namespace

FN_AVX512 void avx512_prepare_row(const Exl3Weight& w, const float* x, std::int32_t levels,
                                  std::int32_t row, const Prepared& p) noexcept {
  alignas(64) float kept[kKeep];
  __m512i max_bits = _mm512_setzero_si512();
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    const Block b = rotated_input(w, x, first);
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
      const __m512i bits =
          _mm512_and_si512(_mm512_castps_si512(b.part[i]), _mm512_set1_epi32(0x7FFFFFFF));
      max_bits = _mm512_max_epu32(max_bits, bits);
      if (first < kKeep) _mm512_store_ps(kept + first + 16 * i, b.part[i]);
    }
  }
  float q;
  float r;
  const RowKind kind = row_scales(_mm512_reduce_max_epu32(max_bits), levels, &q, &r);
  if (kind != RowKind::kNumber) {
    empty_row(kind, row, p);
    return;
  }

  const std::int64_t at = static_cast<std::int64_t>(row) * p.in;
  const __m512 scale = _mm512_set1_ps(r);
  const __m512i most = _mm512_set1_epi32(levels);
  const __m512i least = _mm512_set1_epi32(-levels);
  __m512i sum = _mm512_setzero_si512();
  __m512i sum_high = _mm512_setzero_si512();
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    Block b;
    if (first < kKeep) {
#pragma GCC unroll 8
      for (int i = 0; i < kParts; ++i) b.part[i] = _mm512_load_ps(kept + first + 16 * i);
    } else {
      b = rotated_input(w, x, first);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(b.part[i], scale));
      v = _mm512_max_epi32(_mm512_min_epi32(v, most), least);
      const __m512i high =
          _mm512_cvtps_epi32(_mm512_div_ps(_mm512_cvtepi32_ps(v), _mm512_set1_ps(254.0f)));
      const __m512i low = _mm512_sub_epi32(v, _mm512_mullo_epi32(high, _mm512_set1_epi32(254)));
      const std::int64_t to = at + first + 16 * i;
      _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(p.v + to), _mm512_cvtepi32_epi16(v));
      _mm_storeu_si128(reinterpret_cast<__m128i_u*>(p.high + to), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128(reinterpret_cast<__m128i_u*>(p.low + to), _mm512_cvtepi32_epi8(low));
      sum = _mm512_add_epi32(sum, v);
      sum_high = _mm512_add_epi32(sum_high, high);
    }
  }
  // NOTE: a lane's sum fits 32 bits up to a million inputs; the row's sum needs the wider add.
  const auto total = [](const std::int32_t* lanes) {
    std::int64_t s = 0;
    for (int i = 0; i < 16; ++i) s += lanes[i];
    return s;
  };
  alignas(64) std::int32_t lanes[16];
  _mm512_store_si512(lanes, sum);
  p.sum[row] = total(lanes);
  _mm512_store_si512(lanes, sum_high);
  p.sum_high[row] = total(lanes);
  p.sum_low[row] = p.sum[row] - 254 * p.sum_high[row];
  p.q[row] = q;
}

FN_AVX512 void avx512_finish(const Exl3Weight& w, std::int32_t block, float q, std::int64_t total,
                             const std::int64_t* sums, float* y) noexcept {
  const __m512 offset = _mm512_set1_ps(kOffset * (q * static_cast<float>(total)));
  const __m512 scale = _mm512_set1_ps(q);
  Block b;
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) {
    const __m256 low = _mm512_cvtepi64_ps(_mm512_loadu_si512(sums + 16 * i));
    const __m256 high = _mm512_cvtepi64_ps(_mm512_loadu_si512(sums + 16 * i + 8));
    const __m512 a = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    b.part[i] = _mm512_fmadd_ps(_mm512_set1_ps(kInverse), _mm512_mul_ps(scale, a), offset);
  }
  rotate(b);
#pragma GCC unroll 8
  for (int i = 0; i < kParts; ++i) {
    const std::int32_t at = block * kBlock + 16 * i;
    __m512 out = _mm512_mul_ps(b.part[i], load_halves(w.svh + 2 * at));
    if (w.bias != nullptr) out = _mm512_add_ps(out, _mm512_loadu_ps(w.bias + at));
    _mm512_storeu_ps(y + 16 * i, out);
  }
}

}  // namespace flashnext::exl3::internal

#endif
