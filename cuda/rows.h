// The number of rows that an op processes now, read on the device.
#pragma once

#include "cpp/device/ops.h"

#include <cuda_runtime.h>

namespace flashnext::cuda {

#if defined(__CUDACC__)
__device__ __forceinline__ int rows_now(const RowCount& count) {
  return count.scale * *count.count;
}
#endif

}  // namespace flashnext::cuda
