// The answers of a build without CUDA; left out of the core when cuda/ is built.
#include "cpp/device/bounds.h"
#include "cpp/device/cuda_device.h"

namespace flashnext {

int cuda_device_count() noexcept { return 0; }

std::vector<CudaDeviceInfo> cuda_devices() { return {}; }

bool cuda_built() noexcept { return false; }

std::size_t cuda_workspace_bytes(Op, const void*) {
  throw InputError("this flashnext was built without CUDA");
}

namespace {

[[noreturn]] void refuse(int ordinal) {
  throw InputError("CUDA device " + std::to_string(ordinal) +
                   " was asked for, but this flashnext was built without CUDA (configure with "
                   "-DFN_CUDA=ON and nvcc on the PATH)");
}

}  // namespace

std::unique_ptr<Device> make_cuda_device(int ordinal, const CudaDeviceOptions&) { refuse(ordinal); }

CudaBounds measure_cuda_bounds(int ordinal) { refuse(ordinal); }

CudaMachine cuda_machine(int ordinal) { refuse(ordinal); }

}  // namespace flashnext
