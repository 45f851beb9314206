// What the kernels of the op `mix` share (stream_mix.cu, mix_decode.cu, mix_up.cu).
#pragma once

#include "cpp/base/math.h"
#include "cuda/half_product.cuh"
#include "cuda/reduce.h"

namespace flashnext::cuda {

inline constexpr int kMaxStreams = 8;
// A row's squares are summed in pieces of this many, which is also the k of one slice of 8 chunks.
// A thread has four values of a piece.
inline constexpr int kPiece = 8 * kChunkK;
inline constexpr int kNormThreads = kPiece / 4;
inline constexpr int kNormWarps = kNormThreads / 32;
inline constexpr int kMaxPieces = 16;

struct MixParams {
  RowCount rows;
  std::int32_t row0;   // first row of the group
  std::int32_t group;  // rows of the group at most
  const std::int32_t* pick;
  float* streams;            // (input rows, S, D)
  const float* pending_inj;  // (rows, S) or null
  const float* pending_y;    // (rows, D) or null
  const float* norm;         // (S * D)
  const std::uint16_t* up;   // fp16 (S * D, rank)
  StackedWeights down;       // (rank, S * D), and inject (S, S * D)
  float* x;                  // (rows, D)
  float* inj;                // (rows, S) or null
  Planes stack;              // (group, S * D): normed streams
  float* partial;            // (slices, group, width)
  Planes hidden;             // (group, rank)
  float eps;
  std::int32_t num_streams;
  std::int32_t dim;
  std::int32_t rank;
  std::int32_t width;  // rank, and num_streams more with injection
  std::int32_t slices;
  float inv_dim;
  float inv_streams;
  std::int32_t update;  // 1: the up kernel adds the pending residual to the streams
  bool deep;            // set by launch_tiles
};

// True when the decode form of these dimensions runs in two kernels: the slices of one m-tile are a
// cluster, and a slice lies within one stream.
inline bool fused_decode(int num_streams, int dim) {
  const KSplit split = split_k(num_streams * dim);
  return dim % kPiece == 0 && dim / kPiece * kNormWarps <= 32 && split.slices >= 2 &&
         split.slices <= 8 && split.slice_chunks * kChunkK == kPiece;
}

// mix_decode.cu. Norm, down and hidden of a group of at most kFragmentRows, where fused_decode().
void mix_stack_decode(cudaStream_t stream, const MixParams& p);
// mix_up.cu. Up, gates and x of a group of at most kDecodeRows.
void mix_up_decode(cudaStream_t stream, const MixParams& p);

#if defined(__CUDACC__)

__device__ __forceinline__ int group_rows(const MixParams& p) {
  return min(rows_now(p.rows) - p.row0, p.group);
}

// What a block of the up kernel has of the group: one fragment's rows, by the third dimension of
// the grid.
__device__ __forceinline__ MixParams fragment_of(const MixParams& all) {
  MixParams p = all;
  const int first = kFragmentRows * static_cast<int>(blockIdx.z);
  const std::size_t stack = static_cast<std::size_t>(first) * static_cast<std::size_t>(p.dim) *
                            static_cast<std::size_t>(p.num_streams);
  const int hidden = first * p.rank;
  p.row0 += first;
  p.group = min(p.group - first, kFragmentRows);
  p.stack = {p.stack.hi + stack, p.stack.lo + stack};
  p.hidden = {p.hidden.hi + hidden, p.hidden.lo + hidden};
  return p;
}

__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 1 / sqrt(total / dim + eps), within an ulp or two.
__device__ __forceinline__ float inverse_rms(const MixParams& p, float total) {
  const float x = total * p.inv_dim + p.eps;
  const float r = rsqrtf(x);
  return r * (1.5f - 0.5f * x * r * r);
}

// From the total of a row of `down` or `inject`, still times 16. The number of streams is a power
// of two, so that its inverse is exact.
__device__ __forceinline__ float hidden_value(const MixParams& p, float total) {
  return math::silu(total * (kSplitUnscale * p.inv_streams));
}
__device__ __forceinline__ float inject_value(const MixParams& p, float total) {
  return 2.0f * math::sigmoid(total * (kSplitUnscale * p.inv_streams));
}

// math::sigmoid, the same bits, without a branch, so that several advance together. The quotient of
// a number in [2^-127, 1] and one in (1, 2] is rounded rightly by one Newton step of the inverse
// and one of the quotient, as long as the remainder is no subnormal: hence the scale.
__device__ __forceinline__ float flat_sigmoid(float x) {
  constexpr float kUp = 0x1p60f;
  constexpr float kDown = 0x1p-60f;
  const float clamped = fmaxf(-fabsf(x), -87.0f);
  __builtin_assume(clamped == clamped);  // for x = NaN, fmaxf gives the other one
  const float e = math::exp(clamped);
  const float d = 1.0f + e;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  r = math::fma(math::fma(-d, r, 1.0f), r, r);
  const float n = x < 0.0f ? e * kUp : kUp;
  float q = n * r;
  q = math::fma(math::fma(-d, q, n), r, q);
  return x != x ? x : q * kDown;
}

__device__ __forceinline__ float4 add_scaled(const float4& v, float a, const float4& y) {
  return {v.x + a * y.x, v.y + a * y.y, v.z + a * y.z, v.w + a * y.w};
}

__device__ __forceinline__ float sum_squares(const float4& v) {
  return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
}

// Four normed values as planes, at `to` of both.
__device__ __forceinline__ void store_normed(const float4& v, float r, const float4& w,
                                             std::uint16_t* hi_to, std::uint16_t* lo_to) {
  std::uint16_t hi[4];
  std::uint16_t lo[4];
  split(v.x * r * w.x, hi[0], lo[0]);
  split(v.y * r * w.y, hi[1], lo[1]);
  split(v.z * r * w.z, hi[2], lo[2]);
  split(v.w * r * w.w, hi[3], lo[3]);
  *reinterpret_cast<uint2*>(hi_to) = {pack(hi[0], hi[1]), pack(hi[2], hi[3])};
  *reinterpret_cast<uint2*>(lo_to) = {pack(lo[0], lo[1]), pack(lo[2], lo[3])};
}

#endif

}  // namespace flashnext::cuda
