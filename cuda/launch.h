// Kernel launches with programmatic dependent launch: a kernel may start while its predecessor on
// the stream still runs, fetch what nobody writes (weights), and must call pdl_wait() in every
// block before it touches anything else or ends. Since every such kernel waits for its predecessor
// to complete, "my predecessor is complete" means that all work before it is complete too.
// Most call pdl_trigger() first thing. One that calls it after its pdl_wait() says more: whoever
// starts behind it starts when all work before it is complete, and may read that work's results
// before its own wait. gdn_few.cu does so behind the EXL3 GEMV.
#pragma once

#include "cuda/check.h"

#include <cuda_runtime.h>
#include <type_traits>

namespace flashnext::cuda {

#if defined(__CUDACC__)
// All work before this kernel has completed and its writes are visible.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The next kernel's blocks may take free places once every block of this one has called this or
// ended.
__device__ __forceinline__ void pdl_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

// Launches kernel<<<grid, block, smem, stream>>>(args...) in clusters, so that it may overlap its
// predecessor's end. Only for kernels that call pdl_wait(); others use <<<>>>, which waits by
// itself.
template <class... Params, class... Args>
void launch_pdl_cluster(cudaStream_t stream, void (*kernel)(Params...), dim3 grid, dim3 block,
                        std::size_t smem, dim3 cluster, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster.x;
  attributes[1].val.clusterDim.y = cluster.y;
  attributes[1].val.clusterDim.z = cluster.z;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 2 : 1;
  FN_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

template <class... Params, class... Args>
void launch_pdl(cudaStream_t stream, void (*kernel)(Params...), dim3 grid, dim3 block,
                std::size_t smem, const Args&... args) {
  launch_pdl_cluster(stream, kernel, grid, block, smem, dim3(1), args...);
}

// More than 48 KB of dynamic shared memory needs this once a kernel and device.
template <class... Params>
void allow_smem(void (*kernel)(Params...), int bytes) {
  FN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace flashnext::cuda
