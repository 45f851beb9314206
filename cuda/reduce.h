// Sums over a block in a fixed tree: the bits depend on the block size alone.
#pragma once

#include <cuda_runtime.h>

namespace flashnext::cuda {

#if defined(__CUDACC__)

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
  return v;
}

// Every thread gets the sum; warps are added in order. `parts`: one float a warp, free for reuse
// after the next barrier. All threads of the block take part.
__device__ __forceinline__ float block_sum(float v, float* parts) {
  v = warp_sum(v);
  const int warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < warps; ++w) total += parts[w];
  return total;
}

#endif

}  // namespace flashnext::cuda
