// Shared by the Gated DeltaNet kernels.
#pragma once

#include "cpp/base/errors.h"
#include "cpp/device/ops.h"

namespace flashnext::cuda::gdn {

inline constexpr int kHead = 128;  // dims of a key or value head

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

}  // namespace flashnext::cuda::gdn
