// The gate's cases (cpp/gate) as tests: what compares there is expected here.
#pragma once

#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"
#include "cpp/gate/cases.h"

#include <cstring>
#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace flashnext::test {

using namespace flashnext::gate;

// Device memory filled from a host copy.
class Upload {
 public:
  Upload(Device& device, StreamId stream, const void* data, std::size_t bytes)
      : staging_(device, Space::kPinned, bytes, "staging"),
        block_(device, Space::kDevice, bytes, "case") {
    std::memcpy(staging_.data(), data, bytes);
    device.copy_async(stream, block_.data(), staging_.data(), bytes);
  }
  void* data() const { return block_.data(); }
  std::vector<std::byte> read(Device& device, StreamId stream) const {
    device.copy_async(stream, staging_.data(), block_.data(), block_.bytes());
    device.synchronize(stream);
    const auto* bytes = staging_.as<std::byte>();
    return {bytes, bytes + block_.bytes()};
  }

 private:
  Block staging_;
  Block block_;
};

inline void expect_close(const Case& c, const Results& got, const Results& want) {
  const Comparison comparison = compare(c, got, want);
  EXPECT_TRUE(comparison.passed) << c.name << ": " << comparison.detail;
}

// The same bits; `first`: the row of `whole` at which `part` begins.
inline void expect_same(const Case& c, const Results& part, const Results& whole,
                        std::int32_t first, const std::string& what) {
  EXPECT_EQ(differs(c, part, whole, first), "") << c.name << ", " << what;
}

}  // namespace flashnext::test
