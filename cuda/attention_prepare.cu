// Norms, RoPE and cache writes before attention. One warp a vector (a head of the query, a key, a
// value, an index head, a pooled key); lane l holds elements l, l + 32, ..., so that a rotated pair
// (i, i + 32) lies in one lane.
#include "cpp/base/math.h"
#include "cuda/attention.cuh"
#include "cuda/dependent.cuh"
#include "cuda/kernels.h"

#include <cuda_fp16.h>

namespace flashnext::cuda {
namespace {

using attn::kBlock;
using attn::kHeadDim;
using attn::kIndexDim;
using attn::kRotary;

constexpr int kWarps = 4;

// x = x / rms(x) * w.
template <int kDim>
__device__ __forceinline__ void norm(float (&x)[kDim / 32], const float* w, float eps, int lane) {
  float s = 0.0f;
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) s = fmaf(x[j], x[j], s);
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) s += __shfl_xor_sync(0xFFFFFFFFu, s, bit);
  const float r = math::rsqrt(fmaf(s, 1.0f / kDim, eps));
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) x[j] = x[j] * r * w[lane + 32 * j];
}

// Rotates (x[0], x[1]) = elements (lane, lane + 32) by the angle of `pos`.
template <int kDim>
__device__ __forceinline__ void rotate(float (&x)[kDim / 32], const float* rope, int pos,
                                       int lane) {
  const float* at = rope + static_cast<std::int64_t>(pos) * kRotary + lane;
  const float c = at[0];
  const float s = at[kRotary / 2];
  const float a = x[0];
  const float b = x[1];
  x[0] = fmaf(a, c, -(b * s));
  x[1] = fmaf(b, c, a * s);
}

template <int kDim>
__device__ __forceinline__ void load(float (&x)[kDim / 32], const float* from, int lane) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) x[j] = from[lane + 32 * j];
}

template <int kDim>
__device__ __forceinline__ void store(float* to, const float (&x)[kDim / 32], int lane) {
#pragma unroll
  for (int j = 0; j < kDim / 32; ++j) to[lane + 32 * j] = x[j];
}

__device__ __forceinline__ void store_half(std::uint16_t* to, const float (&x)[kHeadDim / 32],
                                           int lane) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 32; ++j)
    to[lane + 32 * j] = __half_as_ushort(__float2half_rn(x[j]));
}

__device__ __forceinline__ int page_of(const StepView& step, int lane_id, int pos) {
  return step.pages[static_cast<std::int64_t>(lane_id) * step.max_pages + pos / kPageTokens];
}

// The pooled key of the block that `row` completes. Its raw keys of this step are read from the
// input, not from the plane that other warps are just writing.
__device__ __forceinline__ void pool(const AttnPrepareArgs& a, const Row& row, int r, int lane) {
  if ((row.pos + 1) % kBlock != 0) return;
  const int first = row.pos + 1 - kBlock;
  const int page = page_of(a.step, row.lane, first);
  const int row0 = a.step.segments[row.segment].row0;
  const int width = (a.dims.index_heads + 1) * kIndexDim;
  float x[kIndexDim / 32] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const int source = r - (kBlock - 1) + i;
    const float* from =
        source >= row0
            ? a.index + static_cast<std::int64_t>(source) * width + a.dims.index_heads * kIndexDim
            : a.planes.index_raw +
                  (static_cast<std::int64_t>(page) * kPageTokens + (first + i) % kPageTokens) *
                      kIndexDim;
#pragma unroll
    for (int j = 0; j < kIndexDim / 32; ++j) x[j] = x[j] + from[lane + 32 * j];
  }
#pragma unroll
  for (int j = 0; j < kIndexDim / 32; ++j) x[j] = x[j] * (1.0f / kBlock);
  norm<kIndexDim>(x, a.ik_norm, a.dims.eps, lane);
  rotate<kIndexDim>(x, a.rope, first, lane);
  store<kIndexDim>(
      a.planes.index_pooled + (static_cast<std::int64_t>(page) * (kPageTokens / kBlock) +
                               first % kPageTokens / kBlock) *
                                  kIndexDim,
      x, lane);
}

__global__ void __launch_bounds__(kWarps * 32) prepare_kernel(const AttnPrepareArgs a) {
  const int heads = a.dims.heads;
  const int kv_heads = a.dims.kv_heads;
  const int items = heads + 2 * kv_heads + a.dims.index_heads + 2;
  int item = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const int r = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int rows = a.step.head->rows;
  const Row row = a.step.rows[r];
  wait_for_previous();
  let_next_start();
  if (r >= rows || item >= items) return;

  if (item < heads) {
    const std::int64_t at = static_cast<std::int64_t>(r) * heads + item;
    float x[kHeadDim / 32];
    load<kHeadDim>(x, a.qg + 2 * at * kHeadDim, lane);
    norm<kHeadDim>(x, a.q_norm, a.dims.eps, lane);
    rotate<kHeadDim>(x, a.rope, row.pos, lane);
    store<kHeadDim>(a.q + at * kHeadDim, x, lane);
    return;
  }
  item -= heads;
  if (item < 2 * kv_heads) {
    const bool is_key = item < kv_heads;
    const int h = is_key ? item : item - kv_heads;
    float x[kHeadDim / 32];
    load<kHeadDim>(
        x, (is_key ? a.k : a.v) + (static_cast<std::int64_t>(r) * kv_heads + h) * kHeadDim, lane);
    if (is_key) {
      norm<kHeadDim>(x, a.k_norm, a.dims.eps, lane);
      rotate<kHeadDim>(x, a.rope, row.pos, lane);
    }
    const std::int64_t token =
        (static_cast<std::int64_t>(page_of(a.step, row.lane, row.pos)) * kv_heads + h) *
            kPageTokens +
        row.pos % kPageTokens;
    store_half((is_key ? a.planes.k : a.planes.v) + token * kHeadDim, x, lane);
    return;
  }
  item -= 2 * kv_heads;
  const int width = (a.dims.index_heads + 1) * kIndexDim;
  const float* index = a.index + static_cast<std::int64_t>(r) * width;
  if (item > a.dims.index_heads) return pool(a, row, r, lane);
  float x[kIndexDim / 32];
  load<kIndexDim>(x, index + item * kIndexDim, lane);
  if (item < a.dims.index_heads) {
    norm<kIndexDim>(x, a.iq_norm, a.dims.eps, lane);
    rotate<kIndexDim>(x, a.rope, row.pos, lane);
    store<kIndexDim>(a.iq + (static_cast<std::int64_t>(r) * a.dims.index_heads + item) * kIndexDim,
                     x, lane);
  } else {
    store<kIndexDim>(
        a.planes.index_raw +
            (static_cast<std::int64_t>(page_of(a.step, row.lane, row.pos)) * kPageTokens +
             row.pos % kPageTokens) *
                kIndexDim,
        x, lane);
  }
}

}  // namespace

void attn_prepare(cudaStream_t stream, const AttnPrepareArgs& args) {
  attn::check_dims(args.dims);
  const int items = args.dims.heads + 2 * args.dims.kv_heads + args.dims.index_heads + 2;
  const dim3 grid(static_cast<unsigned>(args.step.max_rows),
                  static_cast<unsigned>((items + kWarps - 1) / kWarps));
  launch_dependent(stream, grid, kWarps * 32, 0, prepare_kernel, args);
}

}  // namespace flashnext::cuda
