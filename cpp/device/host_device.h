// The host device: a complete device on the CPU, and the oracle of every other one.
//
// Honest about asynchrony: nothing runs before somebody waits; then, of all streams, work whose
// event edges are met runs in a seeded random order. Fresh and released memory is poisoned (NaN
// patterns). A missing wait therefore shows as a wrong or NaN result here, where no GPU is. Capture
// records the ops and their edges; replay runs them in a new order. Faults: allocations may be
// limited by bytes or made to fail at the n-th call.
#pragma once

#include "cpp/device/device.h"
#include "cpp/exl3/exl3.h"

#include <cstdint>
#include <limits>
#include <memory>

namespace flashnext {

struct HostDeviceOptions {
  int threads = 0;         // 0: one a core
  std::uint64_t seed = 0;  // order of ready work; any value gives the same bits
  exl3::Isa isa = exl3::best_isa();
  std::size_t memory_limit = std::numeric_limits<std::size_t>::max();  // bytes over all spaces
  std::int64_t fail_allocation =
      -1;  // index of an allocate() call that throws OutOfMemory; -1: none
  std::size_t pin_limit = std::numeric_limits<std::size_t>::max();  // bytes that pin() grants
  bool poison = true;
};

// Throws InputError when the processor lacks options.isa.
std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options);

}  // namespace flashnext
