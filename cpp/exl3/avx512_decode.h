// Internal to the AVX-512 kernels: one tile of any rate -> vectors of byte sums B in registers.
#pragma once

#include "cpp/exl3/avx512_plan.h"

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

#define FN_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")))
#define FN_AVX512_INLINE FN_AVX512 __attribute__((always_inline)) inline

namespace flashnext::exl3::internal {

inline constexpr int kMultiplier = static_cast<int>(0x83DCD12Du);
// Lane classes whose windows are cut by multishift (the others: permute and shift). Chosen so that
// the two kinds of execution units are equally busy.
template <int HB>
constexpr int multishift_classes() {
  return HB == 10 || HB == 12 ? 2 : 0;
}

template <int HB>
struct Tile {
  __m512i r[Plan<HB>::kRegisters];
};

template <int HB>
FN_AVX512_INLINE Tile<HB> load_tile(const std::byte* p) {
  using P = Plan<HB>;
  Tile<HB> t;
  if constexpr (P::kTileBytes < 64) {
    t.r[0] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (P::kTileBytes / 4)) - 1), p);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < P::kRegisters - 1; ++i) t.r[i] = _mm512_loadu_si512(p + 64 * i);
    t.r[P::kRegisters - 1] = _mm512_loadu_si512(p + P::kLast);
  }
  return t;
}

template <int Bytes>
FN_AVX512_INLINE void prefetch_tile(const std::byte* p) {
#pragma GCC unroll 4
  for (int line = 0; line < Bytes; line += 64) __builtin_prefetch(p + line);
}

// The bytes that a Permute names.
template <int HB, class Source>
FN_AVX512_INLINE __m512i permute(const Tile<HB>& t) {
  constexpr int n = Plan<HB>::kRegisters;
  const __m512i low = _mm512_load_si512(Source::kValue.low.data());
  if constexpr (n == 1) {
    return _mm512_permutexvar_epi8(low, t.r[0]);
  } else {
    __m512i z = _mm512_permutex2var_epi8(t.r[0], low, t.r[1]);
    if constexpr (n > 2) {
      const __m512i high = _mm512_load_si512(Source::kValue.high.data());
      constexpr __mmask64 mask = Source::kValue.from_high;
      if constexpr (n == 3) {
        z = _mm512_mask_permutexvar_epi8(z, mask, high, t.r[2]);
      } else {
        z = _mm512_mask_blend_epi8(mask, z, _mm512_permutex2var_epi8(t.r[2], high, t.r[3]));
      }
    }
    return z;
  }
}

// Windows j and j + 4 of lane class C as 16 dwords.
template <int HB, int C, int J>
FN_AVX512_INLINE __m512i windows(__m512i z) {
  if constexpr (C < multishift_classes<HB>()) {
    const void* control = Multishifts<HB, multishift_class<HB>(C, J), J>::kValue.data();
    return _mm512_maskz_multishift_epi64_epi8(0x3333333333333333u, _mm512_load_si512(control), z);
  } else {
    const void* counts = Shifts<HB, shift_class<HB>(C, J), J>::kValue.data();
    return _mm512_and_si512(_mm512_srlv_epi32(z, _mm512_load_si512(counts)),
                            _mm512_set1_epi32(0xFFFF));
  }
}

template <int HB, int C, int J>
FN_AVX512_INLINE __m512i gather(const Tile<HB>& t) {
  if constexpr (C < multishift_classes<HB>()) {
    return permute<HB, QwordPermute<HB, C>>(t);
  } else {
    return permute<HB, DwordPermute<HB, C, Plan<HB>::first_of(C, J)>>(t);
  }
}

// Keeps the compiler from sinking work past this point: eight windows in step keep the dot products
// fed, where one pair after the other would wait for its own latencies.
FN_AVX512_INLINE void hold(__m512i& a, __m512i& b, __m512i& c, __m512i& d) {
  asm("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d));
}
FN_AVX512_INLINE void hold(__m512i& a, __m512i& b, __m512i& c, __m512i& d, __m512i& e, __m512i& f,
                           __m512i& g, __m512i& h) {
  asm("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h));
}

// The dword that vpdpwssd wants: B of row r (low words) and r + 1 (high words) of 16 columns, for
// the row pairs r = 2C, 8 + 2C, 2C + 2, 8 + 2C + 2 of two lane classes.
template <int HB, int C>
FN_AVX512_INLINE void class_sums(const Tile<HB>& t, __m512i (&b)[4]) {
  const __m512i multiplier = _mm512_set1_epi32(kMultiplier);
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i zero = _mm512_setzero_si512();
  __m512i odd0 = windows<HB, C, 1>(gather<HB, C, 1>(t));
  __m512i odd1 = windows<HB, C, 3>(gather<HB, C, 3>(t));
  __m512i even0 = windows<HB, C, 0>(gather<HB, C, 0>(t));
  __m512i even1 = windows<HB, C, 2>(gather<HB, C, 2>(t));
  __m512i odd2 = windows<HB, C + 1, 1>(gather<HB, C + 1, 1>(t));
  __m512i odd3 = windows<HB, C + 1, 3>(gather<HB, C + 1, 3>(t));
  __m512i even2 = windows<HB, C + 1, 0>(gather<HB, C + 1, 0>(t));
  __m512i even3 = windows<HB, C + 1, 2>(gather<HB, C + 1, 2>(t));
  hold(odd0, odd1, odd2, odd3, even0, even1, even2, even3);
  odd0 = _mm512_mullo_epi32(odd0, multiplier);
  odd1 = _mm512_mullo_epi32(odd1, multiplier);
  even0 = _mm512_mullo_epi32(even0, multiplier);
  even1 = _mm512_mullo_epi32(even1, multiplier);
  odd2 = _mm512_mullo_epi32(odd2, multiplier);
  odd3 = _mm512_mullo_epi32(odd3, multiplier);
  even2 = _mm512_mullo_epi32(even2, multiplier);
  even3 = _mm512_mullo_epi32(even3, multiplier);
  hold(odd0, odd1, odd2, odd3, even0, even1, even2, even3);
  b[0] = _mm512_slli_epi32(_mm512_dpbusd_epi32(zero, odd0, ones), 16);
  b[1] = _mm512_slli_epi32(_mm512_dpbusd_epi32(zero, odd1, ones), 16);
  b[2] = _mm512_slli_epi32(_mm512_dpbusd_epi32(zero, odd2, ones), 16);
  b[3] = _mm512_slli_epi32(_mm512_dpbusd_epi32(zero, odd3, ones), 16);
  hold(b[0], b[1], b[2], b[3]);
  b[0] = _mm512_dpbusd_epi32(b[0], even0, ones);
  b[1] = _mm512_dpbusd_epi32(b[1], even1, ones);
  b[2] = _mm512_dpbusd_epi32(b[2], even2, ones);
  b[3] = _mm512_dpbusd_epi32(b[3], even3, ones);
}

}  // namespace flashnext::exl3::internal
