// Copies by a kernel (copy.cu).
#pragma once

#include <cstddef>
#include <cuda_runtime_api.h>

namespace flashnext::cuda {

// Larger copies are left to the copy engines; small ones by an engine cost 13 us more a token.
inline constexpr std::size_t kSmallCopy = std::size_t{64} << 10;

// Both addresses and the size are multiples of 16; `from` may be mapped host memory.
void copy_by_kernel(cudaStream_t stream, void* to, const void* from, std::size_t bytes);

}  // namespace flashnext::cuda
