// Shared by the Gated DeltaNet kernels.
#pragma once

#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cpp/device/ops.h"

#include <cuda_runtime.h>

namespace flashnext::cuda::gdn {

inline constexpr int kHead = 128;  // dims of a key or value head
inline constexpr int kTaps = 4;

inline void check_dims(const GdnDims& dims) {
  check(dims.head_dim == kHead, "gdn: the CUDA kernels are built for heads of 128");
  check(dims.k_heads > 0 && dims.v_heads > 0 && dims.v_heads % dims.k_heads == 0,
        "gdn: value heads must be a multiple of key heads");
  check(dims.slot_stride % 4 == 0, "gdn: slots must be 16 bytes aligned");
}

// Sum over the warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int bit = 16; bit > 0; bit >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, bit);
  return x;
}

__device__ __forceinline__ float sum_of_squares(float4 x) {
  float s = __fmul_rn(x.x, x.x);
  s = fmaf(x.y, x.y, s);
  s = fmaf(x.z, x.z, s);
  s = fmaf(x.w, x.w, s);
  return warp_sum(s);
}

__device__ __forceinline__ float4 load4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float tap_sum(const float4& w, float x0, float x1, float x2, float x3) {
  return fmaf(w.w, x3, fmaf(w.z, x2, fmaf(w.y, x1, w.x * x0)));
}

// One row of a head, a warp together: taps of the lane's four channels, oldest input first; SiLU;
// for queries and keys the l2 norm. Heads: queries, keys, values.
__device__ __forceinline__ float4 conv_row(const float4 (&w)[4], const float4 (&x)[kTaps], int head,
                                           const GdnDims& dims) {
  float4 y;
  y.x = math::silu(tap_sum(w[0], x[0].x, x[1].x, x[2].x, x[3].x));
  y.y = math::silu(tap_sum(w[1], x[0].y, x[1].y, x[2].y, x[3].y));
  y.z = math::silu(tap_sum(w[2], x[0].z, x[1].z, x[2].z, x[3].z));
  y.w = math::silu(tap_sum(w[3], x[0].w, x[1].w, x[2].w, x[3].w));
  if (head < 2 * dims.k_heads) {
    float norm = math::rsqrt(sum_of_squares(y) + 1e-6f);
    if (head < dims.k_heads) norm = norm * 0.088388347648318447f;  // 128^-0.5
    y = {y.x * norm, y.y * norm, y.z * norm, y.w * norm};
  }
  return y;
}

__device__ __forceinline__ float decay_of(float a, float rate, float dt_bias) {
  return math::exp(-rate * math::softplus(a + dt_bias));
}

// Whether the op is one kernel (gdn_few.cu), and that kernel.
bool is_few(const GdnConvArgs& args);
void conv_few(cudaStream_t stream, const GdnConvArgs& args);

}  // namespace flashnext::cuda::gdn
