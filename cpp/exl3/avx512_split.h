// Internal to the AVX-512 kernels: accumulators of products, and exact sums of many of them.
#pragma once

#include "cpp/exl3/avx512_decode.h"
#include "cpp/exl3/kernels.h"

#include <cstdint>
#include <immintrin.h>

namespace flashnext::exl3::internal {

constexpr int kTiles = kBlock / kTile;  // tiles along a side of a block

// NOTE: typed as what vpdpwssd adds; as __m512i, GCC keeps a copy of every accumulator in memory.
using Lanes = std::int32_t __attribute__((vector_size(64)));

FN_AVX512_INLINE void add_product(Lanes& acc, __m512i weights, __m512i x) {
  acc = reinterpret_cast<Lanes>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(acc), weights, x));
}

// 65536 high + low, low >= 0: the sums of 16 columns of up to 2^21 inputs.
struct Split {
  __m512i low, high;
};

FN_AVX512_INLINE void fold(Split& sum, Lanes lanes) {
  const __m512i acc = reinterpret_cast<__m512i>(lanes);
  sum.low = _mm512_add_epi32(sum.low, _mm512_and_si512(acc, _mm512_set1_epi32(0xFFFF)));
  sum.high = _mm512_add_epi32(sum.high, _mm512_srai_epi32(acc, 16));
}

// sums (16) = sum - 510 total.
FN_AVX512_INLINE void widen_split(std::int64_t* sums, const Split& sum, std::int64_t total) {
  const __m512i centre = _mm512_set1_epi64(-kCentre * total);
  const __m512i low_even = _mm512_and_si512(sum.low, _mm512_set1_epi64(0xFFFFFFFF));
  const __m512i low_odd = _mm512_srli_epi64(sum.low, 32);
  const __m512i high_even = _mm512_srai_epi64(_mm512_slli_epi64(sum.high, 32), 16);
  const __m512i high_odd = _mm512_slli_epi64(_mm512_srai_epi64(sum.high, 32), 16);
  _mm512_storeu_si512(sums, _mm512_add_epi64(centre, _mm512_add_epi64(low_even, high_even)));
  _mm512_storeu_si512(sums + 8, _mm512_add_epi64(centre, _mm512_add_epi64(low_odd, high_odd)));
}

}  // namespace flashnext::exl3::internal
