// Internal to the AVX-512 kernels: tiles of 2 to 3.5 bits, four columns of a half at a time, for
// one row.
//
// Dword 4i + 2h + c of a vector belongs to column 4G + i + 8h and lane class C + c, so one register
// of 64 bytes holds all bits of a group G = 0, 1 and one vpermb places them; a tile in two
// registers costs Intel three operations a permute. Windows are cut by vpmultishiftqb, where the
// second dword of a qword starts at bit 32 (Multishift), or by shift and mask: Intel is short of
// units for two operations, AMD runs the former on the units of the multiplies.
#pragma once

#include "cpp/exl3/avx512_decode.h"
#include "cpp/exl3/windows.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace flashnext::exl3::internal {

template <int HB>
struct Quads : Windows<HB> {
  using Windows<HB>::kTileBytes;
  using Windows<HB>::end;
  using Windows<HB>::dword_start;
  static constexpr bool kFits = HB >= 4 && HB <= 7;
  static constexpr bool kOneRegister = kTileBytes == 64;
  // Register 1 ends with the tile; the last word of register 0 is replaced by that of the tile,
  // where the ring of group 0 begins.
  static constexpr int kSecond = kTileBytes - 64;

  static constexpr bool shares(int c0, int first, int j) {
    for (int c = c0; c < c0 + 2; ++c) {
      for (int h = 0; h < 2; ++h) {
        if (end(c, h, j) > 8 * dword_start(c, h, first) + 32) return false;
      }
    }
    return true;
  }
  static constexpr int first_of(int c0, int j) {
    int first = 0;
    for (int k = 1; k <= j; ++k) {
      if (!shares(c0, first, k)) first = k;
    }
    return first;
  }

  using Bytes = std::array<std::uint8_t, 64>;
  using Dwords = std::array<std::uint32_t, 16>;

  static constexpr std::uint8_t index(int group, int stream_byte) {
    const int ring = (stream_byte + kTileBytes) % kTileBytes;
    const int byte = ring / 4 * 4 + 3 - ring % 4;  // words are stored most significant byte last
    if (kOneRegister) return static_cast<std::uint8_t>(byte);
    if (group == 0 && byte < 60) return static_cast<std::uint8_t>(byte);
    // Bytes past a lane's last window belong to no window and may be any.
    return static_cast<std::uint8_t>((byte - kSecond) & 63);
  }
  static constexpr Bytes permute(int group, int c0, int first) {
    Bytes p{};
    for (int b = 0; b < 64; ++b) {
      const int d = b / 4;
      const int start = dword_start(c0 + d % 2, d / 2 % 2, first) + 2 * HB * (4 * group + d / 4);
      p[static_cast<std::size_t>(b)] = index(group, start + 3 - b % 4);
    }
    return p;
  }
  static constexpr int shift(int c0, int j, int d) {
    const int c = c0 + d % 2;
    const int h = d / 2 % 2;
    return 8 * dword_start(c, h, first_of(c0, j)) + 32 - end(c, h, j);
  }
  static constexpr Dwords shifts(int c0, int j) {
    Dwords s{};
    for (int d = 0; d < 16; ++d) {
      s[static_cast<std::size_t>(d)] = static_cast<std::uint32_t>(shift(c0, j, d));
    }
    return s;
  }
  static constexpr Bytes multishifts(int c0, int j) {
    Bytes s{};
    for (int b = 0; b < 64; ++b) {
      const int offset = b / 4 % 2 * 32 + shift(c0, j, b / 4) + 8 * (b % 2);
      s[static_cast<std::size_t>(b)] = static_cast<std::uint8_t>(offset & 63);
    }
    return s;
  }
};

template <int HB, int G, int C, int First>
struct QuadPermute {
  alignas(64) static constexpr typename Quads<HB>::Bytes kValue = Quads<HB>::permute(G, C, First);
};
// Lane classes 2 and 3 have the constants of 0 and 1 when two lanes are whole bytes apart.
template <int HB>
constexpr int quad_class(int c0, int j) {
  using Q = Quads<HB>;
  return Q::first_of(0, j) == Q::first_of(c0, j) && Q::shifts(0, j) == Q::shifts(c0, j) ? 0 : c0;
}
template <int HB, int C, int J>
struct QuadShifts {
  alignas(64) static constexpr typename Quads<HB>::Dwords kValue = Quads<HB>::shifts(C, J);
};
template <int HB, int C, int J>
struct QuadMultishifts {
  alignas(64) static constexpr typename Quads<HB>::Bytes kValue = Quads<HB>::multishifts(C, J);
};

template <int HB>
struct QuadTile {
  __m512i r[2];
};

template <int HB>
FN_AVX512_INLINE QuadTile<HB> load_quads(const std::byte* p) {
  constexpr int bytes = Quads<HB>::kTileBytes;
  QuadTile<HB> t;
  if constexpr (Quads<HB>::kOneRegister) {
    t.r[0] = t.r[1] = _mm512_loadu_si512(p);
  } else {
    t.r[0] =
        _mm512_mask_broadcastd_epi32(_mm512_loadu_si512(p), 0x8000, _mm_loadu_si32(p + bytes - 4));
    t.r[1] = _mm512_loadu_si512(p + Quads<HB>::kSecond);
  }
  return t;
}

// Window J of group G and lane classes C, C + 1 as 16 dwords.
template <int HB, bool Multishift, int G, int C, int J>
FN_AVX512_INLINE __m512i quad_window(const QuadTile<HB>& t) {
  using Q = Quads<HB>;
  const void* places = QuadPermute<HB, G, C, Q::first_of(C, J)>::kValue.data();
  const __m512i z = _mm512_permutexvar_epi8(_mm512_load_si512(places), t.r[G]);
  constexpr int from = quad_class<HB>(C, J);
  if constexpr (Multishift) {
    const void* control = QuadMultishifts<HB, from, J>::kValue.data();
    return _mm512_maskz_multishift_epi64_epi8(0x3333333333333333u, _mm512_load_si512(control), z);
  } else {
    const void* counts = QuadShifts<HB, from, J>::kValue.data();
    return _mm512_and_si512(_mm512_srlv_epi32(z, _mm512_load_si512(counts)),
                            _mm512_set1_epi32(0xFFFF));
  }
}

// B of group G in the form that vpdpwssd wants: rows r (low words) and r + 1 (high words) for
// r = 2C + 2c, 8 + 2C + 2c in b[0], b[1] with C = 0 and in b[2], b[3] with C = 2.
template <int HB, bool Multishift, int G>
FN_AVX512_INLINE void quad_sums(const QuadTile<HB>& t, __m512i (&b)[4]) {
  const __m512i multiplier = _mm512_set1_epi32(kMultiplier);
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i zero = _mm512_setzero_si512();
  constexpr __mmask32 high_words = 0xAAAAAAAA;
  __m512i even0 = quad_window<HB, Multishift, G, 0, 0>(t);
  __m512i odd0 = quad_window<HB, Multishift, G, 0, 1>(t);
  __m512i even1 = quad_window<HB, Multishift, G, 0, 2>(t);
  __m512i odd1 = quad_window<HB, Multishift, G, 0, 3>(t);
  __m512i even2 = quad_window<HB, Multishift, G, 2, 0>(t);
  __m512i odd2 = quad_window<HB, Multishift, G, 2, 1>(t);
  __m512i even3 = quad_window<HB, Multishift, G, 2, 2>(t);
  __m512i odd3 = quad_window<HB, Multishift, G, 2, 3>(t);
  hold(odd0, odd1, odd2, odd3, even0, even1, even2, even3);
  even0 = _mm512_mullo_epi32(even0, multiplier);
  even1 = _mm512_mullo_epi32(even1, multiplier);
  even2 = _mm512_mullo_epi32(even2, multiplier);
  even3 = _mm512_mullo_epi32(even3, multiplier);
  odd0 = _mm512_mullo_epi32(odd0, multiplier);
  odd1 = _mm512_mullo_epi32(odd1, multiplier);
  odd2 = _mm512_mullo_epi32(odd2, multiplier);
  odd3 = _mm512_mullo_epi32(odd3, multiplier);
  hold(odd0, odd1, odd2, odd3, even0, even1, even2, even3);
  even0 = _mm512_dpbusd_epi32(zero, even0, ones);
  even1 = _mm512_dpbusd_epi32(zero, even1, ones);
  even2 = _mm512_dpbusd_epi32(zero, even2, ones);
  even3 = _mm512_dpbusd_epi32(zero, even3, ones);
  hold(even0, even1, even2, even3);
  // Against zero, vdbpsadbw is the sum of a dword's bytes, in both of its words.
  b[0] = _mm512_mask_dbsad_epu8(even0, high_words, odd0, zero, 0);
  b[1] = _mm512_mask_dbsad_epu8(even1, high_words, odd1, zero, 0);
  b[2] = _mm512_mask_dbsad_epu8(even2, high_words, odd2, zero, 0);
  b[3] = _mm512_mask_dbsad_epu8(even3, high_words, odd3, zero, 0);
}

}  // namespace flashnext::exl3::internal
