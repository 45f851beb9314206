// The CUDA device behind the seam, without a CUDA header. A build without CUDA answers here too: no
// devices, and an InputError that says so.
#pragma once

#include "cpp/device/device.h"

#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace flashnext {

struct CudaDeviceOptions {
  // Bytes of Space::kDevice that allocate() may hand out in all, e.g. to stand for a smaller card.
  std::size_t memory_budget = std::numeric_limits<std::size_t>::max();
};

struct CudaDeviceInfo {
  int ordinal;
  std::string name;
  int major;  // compute capability
  int minor;
  int multiprocessors;
  std::size_t memory_bytes;
  bool integrated;  // shares the host's memory
  bool compiled;    // this build holds machine code for it
};

// 0 when there is no driver, no device or no CUDA in this build.
int cuda_device_count() noexcept;
std::vector<CudaDeviceInfo> cuda_devices();
// True when this build has the CUDA device.
bool cuda_built() noexcept;

// Device scratch that `op` needs for these args on any CUDA device, without one: see
// Device::workspace_bytes. Throws InputError where this build has no CUDA.
std::size_t cuda_workspace_bytes(Op op, const void* args);

// Throws InputError when there is no such device, DeviceError when it cannot be opened. Which
// capabilities may run a model is the session's business, not checked here.
std::unique_ptr<Device> make_cuda_device(int ordinal, const CudaDeviceOptions& options);

}  // namespace flashnext
