// The demo checkpoint on the first CUDA device. The gate has tests of its own: every architecture
// that is here is taken as proven.
#pragma once

#include "cpp/device/cuda_device.h"
#include "tests/cpp/demo.h"

#include <string>

namespace flashnext::test {

inline SessionOptions cuda_options() {
  SessionOptions o = demo_options();
  o.device = "cuda:0";
  for (const CudaDeviceInfo& d : cuda_devices()) {
    o.capabilities.push_back("sm_" + std::to_string(d.major) + std::to_string(d.minor));
  }
  return o;
}

}  // namespace flashnext::test
