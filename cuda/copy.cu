// Copies by a kernel: for a few KB from mapped host memory, sooner done than a copy engine, which
// has to be handed the stream and to hand it back.
#include "cuda/copy.h"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 256;

// A thread 16 bytes. Host memory changes between launches: nothing of it may come from a cache.
// NOTE: no pdl_trigger(): kernels may follow that read a step's values before they wait, because
// all that came before them had waited; none of them may start before the values are there.
__global__ void __launch_bounds__(kThreads) copy_kernel(uint4* to, const uint4* from, int pieces) {
  pdl_wait();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < pieces) to[i] = __ldcv(from + i);
  __threadfence();
}

}  // namespace

void copy_by_kernel(cudaStream_t stream, void* to, const void* from, std::size_t bytes) {
  const int pieces = static_cast<int>(bytes / sizeof(uint4));
  launch_pdl(stream, copy_kernel, dim3(static_cast<unsigned>(ceil_div(pieces, kThreads))),
             dim3(kThreads), 0, static_cast<uint4*>(to), static_cast<const uint4*>(from), pieces);
}

}  // namespace flashnext::cuda
