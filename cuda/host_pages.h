// Host memory that the device reads in place: pages of the process, registered with the driver.
// Registering pages that are there already is about ten times faster than having the driver
// allocate them, and several threads may touch them.
#pragma once

#include "cuda/handles.h"

#include <cstddef>

namespace flashnext::cuda {

// Makes whole pages that were written before readable to kernels, at the same address. Refusals of
// the system, expected answers, come back as cudaErrorMemoryAllocation.
cudaError_t register_pages(void* data, std::size_t bytes) noexcept;

struct PageRange {
  void* data = nullptr;
  std::size_t bytes = 0;
  bool operator==(const PageRange&) const = default;
};
struct ClosePages {
  static constexpr const char* kName = "cudaHostUnregister";
  static cudaError_t close(PageRange pages) noexcept;
};
using RegisteredPages = Handle<PageRange, ClosePages>;

// New zeroed pages, registered.
cudaError_t allocate_pages(std::size_t bytes, RegisteredPages* pages);

}  // namespace flashnext::cuda
