// Rows of an op: how many it processes now, read on the device, and what few of them bound.
#pragma once

#include "cpp/device/ops.h"

#include <cuda_runtime.h>

namespace flashnext::cuda {

// (row, slot) pairs of a decode step: with 16 experts a token.
inline constexpr int kMaxPairs = 16 * kDecodeRows;

#if defined(__CUDACC__)
__device__ __forceinline__ int rows_now(const RowCount& count) {
  return count.scale * *count.count;
}
#endif

}  // namespace flashnext::cuda
