// The device's clock in nanoseconds, the same for all multiprocessors; it steps by up to a
// microsecond.
#pragma once

#include <cstdint>

namespace flashnext::cuda {

#if defined(__CUDACC__)

__device__ __forceinline__ std::int64_t device_clock() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

__device__ __forceinline__ void sleep_until(std::int64_t ns) {
  for (std::int64_t left = ns - device_clock(); left > 0; left = ns - device_clock()) {
    __nanosleep(left < 20000 ? static_cast<unsigned>(left) : 20000u);
  }
}

#endif

}  // namespace flashnext::cuda
