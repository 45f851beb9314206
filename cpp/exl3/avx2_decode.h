// Internal to the AVX2 kernels: one tile of any rate -> byte sums B as pairs of words. The words of
// a tile are first put in stream order, so that windows can be loaded at any byte.
#pragma once

#include "cpp/exl3/windows.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#define FN_AVX2 __attribute__((target("avx2")))
#define FN_AVX2_INLINE FN_AVX2 __attribute__((always_inline)) inline

namespace flashnext::exl3::internal {

inline constexpr int kMul1 = static_cast<int>(0x83DCD12Du);

// Stream bytes of a tile, two bytes of its end before them, room to load past them.
inline constexpr int kBefore = 32;
using Stream = std::byte[kBefore + 256 + 32];

// Constants that cut windows j of half h.
template <int HB>
struct Cut {
  using W = Windows<HB>;
  // Four lanes span 3 K + 4 bytes from the first: one load of 16 bytes, or two of two lanes each.
  static constexpr bool kOneLoad = HB <= 8;

  // Windows first..j of half h lie in 32 bits from the byte where `first` starts, in all classes.
  static constexpr bool shares(int h, int first, int j) {
    for (int c = 0; c < 4; ++c) {
      if (W::end(c, h, j) > 8 * W::dword_start(c, h, first) + 32) return false;
    }
    return true;
  }
  // The first window of the group that window j belongs to.
  static constexpr int first_of(int h, int j) {
    int first = 0;
    for (int k = 1; k <= j; ++k) {
      if (!shares(h, first, k)) first = k;
    }
    return first;
  }
  static constexpr int start(int c, int h, int j) { return W::dword_start(c, h, first_of(h, j)); }
  static constexpr std::array<std::int8_t, 32> shuffle(int h, int j, int from) {
    std::array<std::int8_t, 32> s{};
    for (int b = 0; b < 32; ++b) {
      const int c = b / 4 % 4;
      const bool here = kOneLoad || c / 2 == from / 2;
      const int byte = start(c, h, j) - start(from, h, j) + 3 - b % 4;
      s[static_cast<std::size_t>(b)] = static_cast<std::int8_t>(here ? byte : -1);
    }
    return s;
  }
  static constexpr std::array<std::uint32_t, 8> shifts(int h, int j) {
    std::array<std::uint32_t, 8> s{};
    for (int d = 0; d < 8; ++d) {
      s[static_cast<std::size_t>(d)] =
          static_cast<std::uint32_t>(8 * start(d % 4, h, j) + 32 - W::end(d % 4, h, j));
    }
    return s;
  }
};

template <int HB, int H, int J>
struct CutTables {
  alignas(32) static constexpr std::array<std::int8_t, 32> kShuffle = Cut<HB>::shuffle(H, J, 0);
  alignas(32) static constexpr std::array<std::int8_t, 32> kShuffle2 = Cut<HB>::shuffle(H, J, 2);
  alignas(32) static constexpr std::array<std::uint32_t, 8> kShifts = Cut<HB>::shifts(H, J);
};

template <class T>
FN_AVX2_INLINE __m256i load_table(const T& table) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(table.data()));
}

// Reverses the bytes of each 32-bit word, and repeats the end of the ring before its start.
template <int HB>
FN_AVX2_INLINE void to_stream(const std::byte* tile, std::byte* stream) {
  constexpr int bytes = Windows<HB>::kTileBytes;
  const __m256i swap = _mm256_setr_epi8(3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12, 3, 2,
                                        1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12);
#pragma GCC unroll 8
  for (int i = 0; i + 32 <= bytes; i += 32) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(tile + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(stream + kBefore + i),
                        _mm256_shuffle_epi8(words, swap));
  }
  if constexpr (bytes % 32 != 0) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(tile + bytes - 16));
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(stream + kBefore + bytes - 16),
                     _mm_shuffle_epi8(words, _mm256_castsi256_si128(swap)));
  }
  std::uint32_t last;
  std::memcpy(&last, tile + bytes - 4, sizeof last);
  last = __builtin_bswap32(last);
  std::memcpy(stream + kBefore - 4, &last, sizeof last);
}

FN_AVX2_INLINE __m256i load_columns(const std::byte* lower, const std::byte* upper) {
  return _mm256_inserti128_si256(
      _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(lower))),
      _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(upper)), 1);
}

// 32 bits around windows J of half H: columns 2m (at `stream`) and 2m + 1.
template <int HB, int H, int J>
FN_AVX2_INLINE __m256i gather(const std::byte* stream) {
  using T = CutTables<HB, H, Cut<HB>::first_of(H, J)>;
  const std::byte* at = stream + Cut<HB>::start(0, H, J);
  const __m256i z = _mm256_shuffle_epi8(load_columns(at, at + 2 * HB), load_table(T::kShuffle));
  if constexpr (Cut<HB>::kOneLoad) {
    return z;
  } else {
    const std::byte* next = stream + Cut<HB>::start(2, H, J);
    return _mm256_or_si256(
        z, _mm256_shuffle_epi8(load_columns(next, next + 2 * HB), load_table(T::kShuffle2)));
  }
}

// Keeps the compiler from sinking work past this point: four windows in step hide latencies that
// one after the other would show.
FN_AVX2_INLINE void hold(__m256i (&v)[4]) {
  asm("" : "+x"(v[0]), "+x"(v[1]), "+x"(v[2]), "+x"(v[3]));
}

template <int HB, int H, int J>
FN_AVX2_INLINE __m256i window(const std::byte* stream) {
  return _mm256_and_si256(
      _mm256_srlv_epi32(gather<HB, H, J>(stream), load_table(CutTables<HB, H, J>::kShifts)),
      _mm256_set1_epi32(0xFFFF));
}

// B of windows 0..3 of half H, each as two words that add up to it.
template <int HB, int H>
FN_AVX2_INLINE void halves(const std::byte* stream, __m256i (&b)[4]) {
  const __m256i multiplier = _mm256_set1_epi32(kMul1);
  const __m256i ones = _mm256_set1_epi8(1);
  b[0] = window<HB, H, 0>(stream);
  b[1] = window<HB, H, 1>(stream);
  b[2] = window<HB, H, 2>(stream);
  b[3] = window<HB, H, 3>(stream);
  hold(b);
  b[0] = _mm256_mullo_epi32(b[0], multiplier);
  b[1] = _mm256_mullo_epi32(b[1], multiplier);
  b[2] = _mm256_mullo_epi32(b[2], multiplier);
  b[3] = _mm256_mullo_epi32(b[3], multiplier);
  hold(b);
  b[0] = _mm256_maddubs_epi16(b[0], ones);
  b[1] = _mm256_maddubs_epi16(b[1], ones);
  b[2] = _mm256_maddubs_epi16(b[2], ones);
  b[3] = _mm256_maddubs_epi16(b[3], ones);
  hold(b);
}

}  // namespace flashnext::exl3::internal
