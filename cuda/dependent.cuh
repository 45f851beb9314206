// Programmatic dependent launch (sm_90 and later): a kernel that starts while the one before it in
// the stream still runs, and waits for it only where it needs its results.
//
// NOTE: before wait_for_previous() a kernel may read nothing that the kernel before it writes, and
// write nothing that it reads. Every block calls it, also one with nothing to do: whoever comes
// after relies on the end of this kernel to mean the end of all before it.
#pragma once

#include "cuda/check.h"

#include <cuda_runtime.h>

namespace flashnext::cuda {

// Returns when the kernels before this one are complete and their writes are visible.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// Lets a dependent kernel start when every block has called this or left.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

template <class... Params, class... Args>
void launch_dependent(cudaStream_t stream, dim3 grid, int threads, int shared_bytes,
                      void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  FN_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

}  // namespace flashnext::cuda
