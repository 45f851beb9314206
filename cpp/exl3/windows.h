// Internal: where the 16-bit windows of a tile lie in its bit stream (spec/exl3.md 2), for kernels
// that cut many at once from 32-bit pieces.
//
// Ring lanes 4i + c, i = 0..7, hold columns i and i + 8. `c` is the lane class, `h` the half
// (column i + 8h), `j` = 0..3 the window: row 2c + (j & 1) + 8 (j >> 1). Positions below are those
// of column 0; column i lies 2 HB bytes further for each i, a whole number for every rate.
#pragma once

namespace flashnext::exl3::internal {

// HB = 2 K: bits of two weights.
template <int HB>
struct Windows {
  static constexpr int kTileBytes = 16 * HB;

  static constexpr int floor8(int bits) { return (bits + 1024) / 8 - 128; }
  // Stream position just past window j of half h of lane class c, for column 0.
  static constexpr int end(int c, int h, int j) { return ((8 * c + 4 * h + j + 1) * HB) / 2; }

  // The byte where window j starts: 32 bits from here hold it whole.
  static constexpr int dword_start(int c, int h, int j) { return floor8(end(c, h, j) - 16); }
};

}  // namespace flashnext::exl3::internal
