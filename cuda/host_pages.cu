#include "cpp/base/thread_pool.h"
#include "cuda/host_pages.h"

#include <algorithm>
#include <cstring>
#include <cuda_runtime.h>
#include <sys/mman.h>

namespace flashnext::cuda {

namespace {
constexpr std::int64_t kPart = std::int64_t{32} << 20;  // that a thread touches at a time
}  // namespace

cudaError_t register_pages(void* data, std::size_t bytes) noexcept {
  const cudaError_t error =
      cudaHostRegister(data, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaErrorMemoryAllocation || error == cudaErrorNotSupported ||
      error == cudaErrorOperatingSystem) {
    cudaGetLastError();
    return cudaErrorMemoryAllocation;
  }
  if (error != cudaSuccess) return error;
  // Kernels are given the host's address.
  void* seen = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&seen, data, 0);
  if (mapped == cudaSuccess && seen == data) return cudaSuccess;
  cudaGetLastError();
  cudaHostUnregister(data);
  return cudaErrorMemoryAllocation;
}

cudaError_t ClosePages::close(PageRange pages) noexcept {
  const cudaError_t error = cudaHostUnregister(pages.data);
  munmap(pages.data, pages.bytes);
  return error;
}

cudaError_t allocate_pages(std::size_t bytes, RegisteredPages* pages) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return cudaErrorMemoryAllocation;
  madvise(data, bytes, MADV_HUGEPAGE);  // faster where it is granted, no matter where it is not
  const auto size = static_cast<std::int64_t>(bytes);
  ThreadPool pool(0);
  pool.parallel_for((size + kPart - 1) / kPart, 1, [&](std::int64_t part, std::int64_t end) {
    for (; part < end; ++part) {
      const std::int64_t at = part * kPart;
      std::memset(static_cast<char*>(data) + at, 0,
                  static_cast<std::size_t>(std::min(kPart, size - at)));
    }
  });
  const cudaError_t error = register_pages(data, bytes);
  if (error == cudaSuccess) {
    *pages = RegisteredPages({data, bytes});
  } else {
    munmap(data, bytes);
  }
  return error;
}

}  // namespace flashnext::cuda
