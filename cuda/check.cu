#include "cuda/check.h"

#include <atomic>
#include <cstdio>
#include <string>

namespace flashnext::cuda {

namespace {
// The last error that was thrown: when it sticks, every later call returns it again.
std::atomic<cudaError_t> thrown{cudaSuccess};
}  // namespace

void throw_error(cudaError_t error, const char* call, const char* file, int line) {
  thrown = error;
  cudaGetLastError();  // errors that do not stick are reported once
  throw DeviceError(std::string(call) + " failed: " + cudaGetErrorName(error) + " (" +
                    cudaGetErrorString(error) + ") at " + file + ":" + std::to_string(line));
}

void log_error(cudaError_t error, const char* call) noexcept {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading || error == thrown) return;
  std::fprintf(stderr, "flashnext: %s failed: %s\n", call, cudaGetErrorName(error));
}

}  // namespace flashnext::cuda
