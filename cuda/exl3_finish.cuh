// The end of a GEMV block's strip: the sums of its cluster come together, and rows are finished.
#pragma once

#include "cuda/exl3_cluster.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_locate.cuh"
#include "cuda/exl3_rotate.cuh"
#include "cuda/exl3_trellis.cuh"

namespace flashnext::cuda {

// Where the results of a strip go: kept out of the product's registers.
struct End {
  const __half* svh;
  const float* bias;
  float* y;
  std::int32_t out;
};

__device__ __forceinline__ End end_of(const Strip& strip) {
  return {strip.svh, strip.bias, strip.y, strip.out};
}

// What the warps of a block share; cluster_max, row_sum, the barriers and the sums of columns are
// pushed to by the blocks of the cluster.
struct Shared {
  std::uint64_t max_barrier;
  std::uint64_t sum_barrier;
  std::uint32_t row_max[kGroupColumns];  // of this block's inputs
  std::uint32_t cluster_max[kGroupColumns];
  std::int32_t row_sum[kGroupColumns];
  RowLevels levels[kGroupColumns];
  std::int32_t member[kGroupColumns];  // positions of the block, which are rows of y
  std::int32_t source[kGroupColumns];  // and their rows of x
  std::int32_t count;
  End end[2];  // of the strips that are even and odd in the block's order
};

// Row i is finished by the block of rank i % splits; the others push their parts there. row_sums:
// of V, which come together likewise; null: whoever finishes knows them. Whether this block
// finishes any.
__device__ __forceinline__ bool gather_sums(const Jobs& jobs, int* sums, int columns, int count,
                                            int split, int splits, int warp, int lane, int warps,
                                            std::int32_t* row_sums, std::uint64_t* barrier) {
#pragma unroll 1
  for (int c = warp; c < columns; c += warps) {
    const int i = c / jobs.digits;
    const int leader = i % splits;
    if (leader == split) continue;
#pragma unroll
    for (int o = lane; o < 128; o += 32) {
      push_sum(&sums[c * 128 + o], sums[c * 128 + o], barrier, leader);
    }
    if (row_sums != nullptr && lane == 0 && c == i * jobs.digits) {
      push_sum(&row_sums[i], row_sums[i], barrier, leader);
    }
  }
  if (split >= count) return false;
  const int led = (count - split + splits - 1) / splits;
  if (threadIdx.x == 0) {
    const int of_row = 512 * jobs.digits + (row_sums != nullptr ? 4 : 0);
    expect_bytes(barrier, led * (splits - 1) * of_row);
  }
  await(barrier);
  return true;
}

// Steps 6 and 7 of a position, whose sums (digits, 128) are zero again for a strip to come. row: of
// y.
__device__ __forceinline__ void finish_position(int* sums, int digits, RowScale scale, int row,
                                                int lane, const End& end) {
  int4* a = reinterpret_cast<int4*>(sums) + lane;
  const int4 zero = make_int4(0, 0, 0, 0);
  const int4 high = a[0];
  int4 low = zero;
  a[0] = zero;
  if (digits == 2) {
    low = a[32];
    a[32] = zero;
  }
  const long long weight = digits == 2 ? 256 : 1;
  const long long centre = 510LL * scale.sum;
  float v[4] = {affine(weight * high.x + low.x - centre, scale),
                affine(weight * high.y + low.y - centre, scale),
                affine(weight * high.z + low.z - centre, scale),
                affine(weight * high.w + low.w - centre, scale)};
  finish_row(v, scale.q, lane, end.svh, end.bias, end.y + static_cast<std::int64_t>(row) * end.out);
}

}  // namespace flashnext::cuda
