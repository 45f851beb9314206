// Norms, RoPE and cache writes before attention. One warp a vector (a head of the query, a key, a
// value, an index head, a pooled key); lane l holds elements l, l + 32, ..., so that a rotated pair
// (i, i + 32) lies in one lane. The warp of a segment's first raw key alone reads and writes the
// window, so that a slot may be read and written.
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

using Key = float[kIndexDim / 32];  // of a lane
constexpr int kWindow = kBlock - 1;

__device__ __forceinline__ const float* raw_key(const AttnPrepareArgs& a, int r) {
  return a.index +
         (static_cast<std::int64_t>(r) * (a.dims.index_heads + 1) + a.dims.index_heads) * kIndexDim;
}

__device__ __forceinline__ void add_key(Key& sum, const float* from, int lane) {
#pragma unroll
  for (int j = 0; j < kIndexDim / 32; ++j) sum[j] = sum[j] + from[lane + 32 * j];
}

// The pooled key of the block that ends at `last`, of the sum of its raw keys in order.
__device__ __forceinline__ void store_pooled(const AttnPrepareArgs& a, int lane_id, int last,
                                             Key& sum, int lane) {
  const int first = last + 1 - kBlock;
#pragma unroll
  for (int j = 0; j < kIndexDim / 32; ++j) sum[j] = sum[j] * (1.0f / kBlock);
  norm<kIndexDim>(sum, a.ik_norm, a.dims.eps, lane);
  rotate<kIndexDim>(sum, a.rope, first, lane);
  const std::int64_t block =
      static_cast<std::int64_t>(page_of(a.step, lane_id, first)) * (kPageTokens / kBlock) +
      first % kPageTokens / kBlock;
  store<kIndexDim>(a.planes.index_pooled + block * kIndexDim, sum, lane);
}

// The raw keys before a segment: zeros at its sequence's start.
__device__ __forceinline__ void load_window(const AttnPrepareArgs& a, const Segment& s,
                                            Key (&old)[kWindow], int lane) {
  const float* from = a.window + s.state_in * a.slot_stride + lane;
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
#pragma unroll
    for (int j = 0; j < kIndexDim / 32; ++j) {
      old[i][j] = s.pos0 > 0 ? __ldcg(from + i * kIndexDim + 32 * j) : 0.0f;
    }
  }
}

// The segment's first block, when keys of the window are in it, and the window after its last row.
__device__ __forceinline__ void begin_segment(const AttnPrepareArgs& a, const Segment& s,
                                              const Key (&old)[kWindow], int lane) {
  const int head = s.pos0 % kBlock;    // keys of the block that the window holds
  const int last = kBlock - 1 - head;  // row that completes it
  if (head > 0 && last < s.rows) {
    Key sum = {};
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
#pragma unroll
      for (int j = 0; j < kIndexDim / 32; ++j) {
        if (i >= kWindow - head) sum[j] = sum[j] + old[i][j];
      }
    }
    for (int i = 0; i <= last; ++i) add_key(sum, raw_key(a, s.row0 + i), lane);
    store_pooled(a, s.lane, s.pos0 + last, sum, lane);
  }
  float* to = a.window + s.state_out * a.slot_stride;
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    const int row = i + s.rows - kWindow;  // of the segment; below 0: from the window
    Key key;
    if (row >= 0) {
      load<kIndexDim>(key, raw_key(a, s.row0 + row), lane);
    } else {
#pragma unroll
      for (int from = i + 1; from < kWindow; ++from) {
        if (from == i + s.rows) {
#pragma unroll
          for (int j = 0; j < kIndexDim / 32; ++j) key[j] = old[from][j];
        }
      }
    }
    store<kIndexDim>(to + i * kIndexDim, key, lane);
  }
}

__global__ void __launch_bounds__(kWarps * 32) prepare_kernel(const AttnPrepareArgs a) {
  const int heads = a.dims.heads;
  const int kv_heads = a.dims.kv_heads;
  const int items = heads + 2 * kv_heads + a.dims.index_heads + 1;
  int item = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const int r = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int rows = a.step.head->rows;
  const Row row = a.step.rows[r];
  // The window is of an earlier step: it comes along with the row.
  Segment segment{};
  Key old[kWindow];
  if (item == items - 1 && r < rows) {
    segment = a.step.segments[row.segment];
    if (r == segment.row0) load_window(a, segment, old, lane);
  }
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
  Key x = {};
  if (item < a.dims.index_heads) {
    const std::int64_t at = static_cast<std::int64_t>(r) * (a.dims.index_heads + 1) + item;
    load<kIndexDim>(x, a.index + at * kIndexDim, lane);
    norm<kIndexDim>(x, a.iq_norm, a.dims.eps, lane);
    rotate<kIndexDim>(x, a.rope, row.pos, lane);
    store<kIndexDim>(a.iq + (static_cast<std::int64_t>(r) * a.dims.index_heads + item) * kIndexDim,
                     x, lane);
    return;
  }
  if (r == segment.row0) begin_segment(a, segment, old, lane);
  if ((row.pos + 1) % kBlock != 0 || r - segment.row0 < kWindow) return;
#pragma unroll
  for (int i = kWindow; i >= 0; --i) add_key(x, raw_key(a, r - i), lane);
  store_pooled(a, row.lane, row.pos, x, lane);
}

}  // namespace

void attn_prepare(cudaStream_t stream, const AttnPrepareArgs& args) {
  attn::check_dims(args.dims);
  const int items = args.dims.heads + 2 * args.dims.kv_heads + args.dims.index_heads + 1;
  const dim3 grid(static_cast<unsigned>(args.step.max_rows),
                  static_cast<unsigned>((items + kWarps - 1) / kWarps));
  launch_dependent(stream, grid, kWarps * 32, 0, prepare_kernel, args);
}

}  // namespace flashnext::cuda
