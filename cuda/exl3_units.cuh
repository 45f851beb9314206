// The product of a warp with digits that lie in device memory (exl3_transform.cu made them): units
// of 64 inputs by 64 outputs, as in exl3_multiply.cuh, for up to kGroups times 8 columns. Weights
// come through the warp's ring, the digits of a unit straight into registers while the unit before
// is at work.
#pragma once

#include "cuda/exl3_multiply.cuh"

namespace flashnext::cuda {

// Where the digits of a tile's columns lie: column c is digit c % digits of position c / digits.
struct Columns {
  const std::int8_t* of_lane;  // the lane's 16 bytes of its first column, at the warp's first unit
  std::int64_t group_step;     // bytes to its column in the next group
  int count;
};

template <int kGroups>
__device__ __forceinline__ void load_digits(const Columns& columns, int lane,
                                            uint4 (&digits)[kGroups]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if ((lane >> 2) + 8 * g < columns.count) {
      digits[g] = *reinterpret_cast<const uint4*>(columns.of_lane + g * columns.group_step);
    }
  }
}

// Adds a warp's part of every column to sums (columns, 128). ring: the warp's; kWords = 0: any
// rate.
template <int kWords, int kGroups, int kWarps>
__device__ __forceinline__ void multiply(Stream<kWarps>& stream, int words,
                                         const std::uint32_t* ring, Columns columns, int warp,
                                         int lane, int* sums) {
  constexpr int kStages = ring_stages(kWords == 0 ? 128 : kWords);
  if (kWords != 0) words = kWords;
  if (warp >> 1 >= stream.units) return;
  const UnitLane<kWords == 0 ? 16 : kWords> unit_lane(lane);
  int acc[kGroups][4][4] = {};
  uint4 next[kGroups] = {};
  load_digits(columns, lane, next);
  int slot = 0;
#pragma unroll 1
  for (int at = warp >> 1; at < stream.units; at += kWarps / 2) {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    stream.template fetch<kWords>(slot == 0 ? kStages - 1 : slot - 1, words, lane);
    uint4 digits[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) digits[g] = next[g];
    columns.of_lane += 32 * kWarps;
    if (at + kWarps / 2 < stream.units) load_digits(columns, lane, next);
    const std::uint32_t* unit = ring + slot * (slot_bytes(words) / 4);
    if constexpr (kWords == 0) {
      multiply_any<kGroups>(unit, words, lane, digits, acc);
    } else {
      multiply_unit<kWords, kGroups>(unit, unit_lane, digits, acc);
    }
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  add_columns<kGroups>(acc, columns.count, warp, lane, sums);
}

}  // namespace flashnext::cuda
