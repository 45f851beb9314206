#include "cuda/check.h"

#include <cstdio>
#include <string>

namespace flashnext::cuda {

void throw_error(cudaError_t error, const char* call, const char* file, int line) {
  cudaGetLastError();  // errors that do not stick are reported once
  throw DeviceError(std::string(call) + " failed: " + cudaGetErrorName(error) + " (" +
                    cudaGetErrorString(error) + ") at " + file + ":" + std::to_string(line));
}

void log_error(cudaError_t error, const char* call) noexcept {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  std::fprintf(stderr, "flashnext: %s failed: %s\n", call, cudaGetErrorName(error));
}

}  // namespace flashnext::cuda
