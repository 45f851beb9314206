// FN_CUDA(call): throws DeviceError with the text of the call that failed. CudaDevice turns the
// first one into a poisoned device.
#pragma once

#include "cpp/base/errors.h"

#include <cuda_runtime_api.h>

namespace flashnext::cuda {

[[noreturn]] void throw_error(cudaError_t error, const char* call, const char* file, int line);

inline void require(cudaError_t error, const char* call, const char* file, int line) {
  if (error != cudaSuccess) throw_error(error, call, file, line);
}

// For destructors: reports to stderr what no exception has told, and accepts a driver that is
// shutting down.
void log_error(cudaError_t error, const char* call) noexcept;

}  // namespace flashnext::cuda

#define FN_CUDA(call) ::flashnext::cuda::require((call), #call, __FILE__, __LINE__)
