// The answers of a build without CUDA; left out of the core when cuda/ is built.
#include "cpp/device/cuda_device.h"

namespace flashnext {

int cuda_device_count() noexcept { return 0; }

std::vector<CudaDeviceInfo> cuda_devices() { return {}; }

bool cuda_built() noexcept { return false; }

std::unique_ptr<Device> make_cuda_device(int ordinal, const CudaDeviceOptions&) {
  throw InputError("CUDA device " + std::to_string(ordinal) +
                   " was asked for, but this flashnext was built without CUDA (configure with "
                   "-DFN_CUDA=ON and nvcc on the PATH)");
}

}  // namespace flashnext
