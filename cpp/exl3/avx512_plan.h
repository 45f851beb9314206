// Internal: where the AVX-512 kernels find the windows of a tile, worked out at compile time.
//
// A vector of 16 dwords holds one row of a tile: dword 2i + h is column i + 8h, i = 0..7, h = 0, 1,
// so its windows belong to ring lanes 4i + c with one c = lane & 3 (spec/exl3.md 2.2). Sixteen bits
// times the stride of four lanes is a whole number of bytes for every rate, so all columns of a
// half want the same bit offset: one byte permute places 32 bits around each window, and one shift
// by a constant vector finishes it. The row of window j (0..3, and j + 4 for h = 1) of lane class c
// is 2c + (j & 1) + 8 (j >> 1).
//
// The other way, for rates whose lane fits 64 bits: a permute places the whole lane in a qword, and
// vpmultishiftqb cuts windows j and j + 4 in one instruction. It shares its execution units with
// the multiplies, so a kernel mixes both ways.
#pragma once

#include "cpp/exl3/windows.h"

#include <array>
#include <cstdint>

namespace flashnext::exl3::internal {

template <int HB>
struct Plan : Windows<HB> {
  using Windows<HB>::kTileBytes;
  static constexpr int kRegisters = (kTileBytes + 63) / 64;
  // The last register ends with the tile, so that no load leaves it.
  static constexpr int kLast = kTileBytes < 64 ? 0 : kTileBytes - 64;
  static constexpr bool kLaneFitsQword = HB <= 12;

  using Windows<HB>::end;
  using Windows<HB>::dword_start;

  // Windows first..j of both halves lie in 32 bits from the byte where `first` starts.
  static constexpr bool shares(int c, int first, int j) {
    return end(c, 0, j) <= 8 * dword_start(c, 0, first) + 32 &&
           end(c, 1, j) <= 8 * dword_start(c, 1, first) + 32;
  }
  // The first window of the group that window j belongs to.
  static constexpr int first_of(int c, int j) {
    int first = 0;
    for (int k = 1; k <= j; ++k) {
      if (!shares(c, first, k)) first = k;
    }
    return first;
  }

  using Bytes = std::array<std::uint8_t, 64>;
  using Dwords = std::array<std::uint32_t, 16>;

  // A permute of the whole tile: the index within a pair of registers, and which bytes come from
  // the second pair.
  struct Permute {
    alignas(64) Bytes low;   // into registers 0 and 1
    alignas(64) Bytes high;  // into registers 2 and 3
    std::uint64_t from_high;
  };

  static constexpr void place(Permute& p, int at, int stream_byte) {
    const int ring = (stream_byte + 2 * kTileBytes) % kTileBytes;
    const int byte = ring / 4 * 4 + 3 - ring % 4;  // words are stored most significant byte last
    int reg = byte / 64;
    int index = byte % 64;
    if (reg >= kRegisters - 1) {
      reg = kRegisters - 1;
      index = byte - kLast;
    }
    const auto to = static_cast<std::uint8_t>(64 * (reg & 1) + index);
    const auto slot = static_cast<std::size_t>(at);
    if (reg < 2) {
      p.low[slot] = to;
    } else {
      p.high[slot] = to;
      p.from_high |= std::uint64_t{1} << at;
    }
  }

  static constexpr Permute dwords(int c, int first) {
    Permute p{};
    for (int i = 0; i < 8; ++i) {
      for (int h = 0; h < 2; ++h) {
        const int start = dword_start(c, h, first) + 2 * HB * i;
        for (int b = 0; b < 4; ++b) place(p, 8 * i + 4 * h + b, start + 3 - b);
      }
    }
    return p;
  }
  static constexpr Dwords shifts(int c, int first, int j) {
    Dwords s{};
    for (std::size_t d = 0; d < 16; ++d) {
      const int h = static_cast<int>(d & 1);
      s[d] = static_cast<std::uint32_t>(8 * dword_start(c, h, first) + 32 - end(c, h, j));
    }
    return s;
  }

  static constexpr Permute qwords(int c) {
    Permute p{};
    for (int i = 0; i < 8; ++i) {
      const int start = dword_start(c, 0, 0) + 2 * HB * i;
      for (int b = 0; b < 8; ++b) place(p, 8 * i + b, start + 7 - b);
    }
    return p;
  }
  static constexpr Bytes multishifts(int c, int j) {
    Bytes s{};
    for (std::size_t b = 0; b < 64; ++b) {
      const int h = static_cast<int>(b >> 2 & 1);
      const int offset = 8 * dword_start(c, 0, 0) + 64 - end(c, h, j);
      s[b] = static_cast<std::uint8_t>((offset + 8 * static_cast<int>(b & 1)) & 63);
    }
    return s;
  }
};

// The constants of one group of windows, as objects of their own so that equal ones are loaded
// once.
template <int HB, int C, int First>
struct DwordPermute {
  static constexpr typename Plan<HB>::Permute kValue = Plan<HB>::dwords(C, First);
};
template <int HB, int C>
struct QwordPermute {
  static constexpr typename Plan<HB>::Permute kValue = Plan<HB>::qwords(C);
};

// Lane classes have equal shifts whenever a lane's offset is a whole number of bytes: reuse the
// constants of the first class that has them.
template <int HB>
constexpr int shift_class(int c, int j) {
  using P = Plan<HB>;
  for (int k = 0; k < c; ++k) {
    if (P::first_of(k, j) == P::first_of(c, j) &&
        P::shifts(k, P::first_of(k, j), j) == P::shifts(c, P::first_of(c, j), j)) {
      return k;
    }
  }
  return c;
}
template <int HB, int C, int J>
struct Shifts {
  alignas(64) static constexpr
      typename Plan<HB>::Dwords kValue = Plan<HB>::shifts(C, Plan<HB>::first_of(C, J), J);
};
template <int HB>
constexpr int multishift_class(int c, int j) {
  for (int k = 0; k < c; ++k) {
    if (Plan<HB>::multishifts(k, j) == Plan<HB>::multishifts(c, j)) return k;
  }
  return c;
}
template <int HB, int C, int J>
struct Multishifts {
  alignas(64) static constexpr typename Plan<HB>::Bytes kValue = Plan<HB>::multishifts(C, J);
};

}  // namespace flashnext::exl3::internal
