// The product of the GEMV and of units: a warp decodes units of 64 inputs by 64 outputs of a strip,
// four k-tiles by four n-tiles, straight into the A operand of the integer mma.
//
// Lane 4 r + q takes ring positions 32 r .. 32 r + 31 of k-tile q: all 16 inputs of outputs r and
// r + 8. At K bits a weight they are K whole words, and the one before them on the ring: no lane
// shifts them into place, and every window lies at a constant distance from a word's edge. Eight
// words of padding behind a k-tile's row spread the reads of a warp over all banks (K = 3, 5; at K
// = 4 four words are one read). The mma's k index is (k-tile, splatted byte), so a lane's digits
// are those of k-tile q: 16 bytes.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/exl3_cluster.cuh"
#include "cuda/exl3_stream.cuh"
#include "cuda/exl3_trellis.cuh"

namespace flashnext::cuda {

// What a lane reads of the four n-tiles of a unit; kWords u16 a tile, a multiple of 16.
template <int kWords>
struct UnitLane {
  static constexpr int kBits = kWords / 16;
  static constexpr int kTile = kWords / 2;  // u32 words

  int first;   // of the lane's words
  int before;  // the one before them on the ring

  __device__ explicit UnitLane(int lane) {
    const int r = lane >> 2;
    const int row = (lane & 3) * row_bytes(kWords) / 4;
    first = row + kBits * r;
    before = row + (r == 0 ? kTile : kBits * r) - 1;
  }

  __device__ __forceinline__ void load(const std::uint32_t* unit, int n,
                                       std::uint32_t (&w)[kBits + 1]) const {
    w[0] = unit[before + n * kTile];
    if constexpr (kBits == 4) {
      const uint4 all = *reinterpret_cast<const uint4*>(unit + first + n * kTile);
      w[1] = all.x;
      w[2] = all.y;
      w[3] = all.z;
      w[4] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kBits; ++i) w[i + 1] = unit[first + n * kTile + i];
    }
  }

  // The 16 bits that end with those of position kPosition of the lane.
  template <int kPosition>
  __device__ __forceinline__ static std::uint32_t state(const std::uint32_t (&w)[kBits + 1]) {
    constexpr int kEnd = kBits * (kPosition + 1);
    constexpr int kAt = (kEnd - 1) / 32 + 1;  // the word with the last bit
    constexpr int kShift = 32 * kAt - kEnd;
    if constexpr (kShift == 8) return __byte_perm(w[kAt], 0, 0x4421);
    if constexpr (kShift <= 16) return window<kShift>(w[kAt]);
    return funnel_right(w[kAt], w[kAt - 1], kShift) & 0xFFFFu;
  }

  // The products state * kMul1 of positions 8 kStep .. 8 kStep + 7.
  template <int kStep>
  __device__ __forceinline__ static void products(const std::uint32_t (&w)[kBits + 1],
                                                  std::uint32_t (&x)[8]) {
    x[0] = state<8 * kStep>(w) * kMul1;
    x[1] = state<8 * kStep + 1>(w) * kMul1;
    x[2] = state<8 * kStep + 2>(w) * kMul1;
    x[3] = state<8 * kStep + 3>(w) * kMul1;
    x[4] = state<8 * kStep + 4>(w) * kMul1;
    x[5] = state<8 * kStep + 5>(w) * kMul1;
    x[6] = state<8 * kStep + 6>(w) * kMul1;
    x[7] = state<8 * kStep + 7>(w) * kMul1;
  }
};

// The digits of four inputs of a column, each four times.
__device__ __forceinline__ void splat(std::uint32_t digits, std::uint32_t (&b)[4]) {
  b[0] = __byte_perm(digits, 0, 0x0000);
  b[1] = __byte_perm(digits, 0, 0x1111);
  b[2] = __byte_perm(digits, 0, 0x2222);
  b[3] = __byte_perm(digits, 0, 0x3333);
}

// Eight weights of a lane: two outputs, four inputs.
__device__ __forceinline__ void accumulate(int (&acc)[4], const std::uint32_t (&x)[8],
                                           const std::uint32_t (&b)[4]) {
  mma_u8s8(acc, x[0], x[4], x[1], x[5], b[0], b[1]);
  mma_u8s8(acc, x[2], x[6], x[3], x[7], b[2], b[3]);
}

// Inputs 4 kStep .. 4 kStep + 3 of every k-tile.
template <int kStep, int kWords, int kGroups>
__device__ __forceinline__ void multiply_digits(const std::uint32_t (&w)[4][kWords / 16 + 1],
                                                const uint4 (&digits)[kGroups],
                                                int (&acc)[kGroups][4][4]) {
  std::uint32_t b[kGroups][4];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const uint4& d = digits[g];
    splat(kStep == 0 ? d.x : kStep == 1 ? d.y : kStep == 2 ? d.z : d.w, b[g]);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    std::uint32_t x[8];
    UnitLane<kWords>::template products<kStep>(w[n], x);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) accumulate(acc[g][n], x, b[g]);
  }
}

template <int kWords, int kGroups>
__device__ __forceinline__ void multiply_unit(const std::uint32_t* unit, const UnitLane<kWords>& at,
                                              const uint4 (&digits)[kGroups],
                                              int (&acc)[kGroups][4][4]) {
  std::uint32_t w[4][kWords / 16 + 1];
#pragma unroll
  for (int n = 0; n < 4; ++n) at.load(unit, n, w[n]);
  multiply_digits<0, kWords, kGroups>(w, digits, acc);
  multiply_digits<1, kWords, kGroups>(w, digits, acc);
  multiply_digits<2, kWords, kGroups>(w, digits, acc);
  multiply_digits<3, kWords, kGroups>(w, digits, acc);
}

// The same at any rate.
template <int kGroups>
__device__ __forceinline__ void multiply_any(const std::uint32_t* unit, int words, int lane,
                                             const uint4 (&digits)[kGroups],
                                             int (&acc)[kGroups][4][4]) {
  const std::uint32_t* row = unit + (lane & 3) * row_bytes(words) / 4;
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    const TileLane<0> tile_lane(4 * (lane >> 2) + step, words);
    std::uint32_t b[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint4& d = digits[g];
      splat(step == 0 ? d.x : step == 1 ? d.y : step == 2 ? d.z : d.w, b[g]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      std::uint32_t x[8];
      tile_lane.products(row + n * (words / 2), x);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) accumulate(acc[g][n], x, b[g]);
    }
  }
}

// Adds a warp's part of every column to sums (columns, 128).
template <int kGroups>
__device__ __forceinline__ void add_columns(const int (&acc)[kGroups][4][4], int columns, int warp,
                                            int lane, int* sums) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 8 * g + 2 * (lane & 3) + i;
      if (c >= columns) continue;
      int* to = sums + c * 128 + 64 * (warp & 1) + (lane >> 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        add_here(to + 16 * n, acc[g][n][i]);
        add_here(to + 16 * n + 8, acc[g][n][i + 2]);
      }
    }
  }
}

// Multiplies and adds to sums. digits: (columns, pitch) of the block's inputs; ring: the warp's;
// kWords = 0: any rate.
template <int kWords, int kWarps>
__device__ __forceinline__ void multiply(Stream<kWarps>& stream, int words,
                                         const std::uint32_t* ring, const std::int8_t* digits,
                                         int pitch, int columns, int warp, int lane, int* sums) {
  constexpr int kStages = ring_stages(kWords == 0 ? 128 : kWords);
  if (kWords != 0) words = kWords;
  const UnitLane<kWords == 0 ? 16 : kWords> unit_lane(lane);
  int acc[1][4][4] = {};
  const std::int8_t* column = digits + (lane >> 2) * pitch + 16 * (lane & 3) + 64 * (warp >> 1);
  const bool is_used = lane >> 2 < columns;
  int slot = 0;
#pragma unroll 1
  for (int at = warp >> 1; at < stream.units; at += kWarps / 2) {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    stream.template fetch<kWords>(slot == 0 ? kStages - 1 : slot - 1, words, lane);
    const std::uint32_t* unit = ring + slot * (slot_bytes(words) / 4);
    uint4 d[1] = {make_uint4(0, 0, 0, 0)};
    if (is_used) d[0] = *reinterpret_cast<const uint4*>(column);
    if constexpr (kWords == 0) {
      multiply_any<1>(unit, words, lane, d, acc);
    } else {
      multiply_unit<kWords, 1>(unit, unit_lane, d, acc);
    }
    column += 32 * kWarps;
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  if (warp >> 1 >= stream.units) return;
  add_columns<1>(acc, columns, warp, lane, sums);
}

}  // namespace flashnext::cuda
