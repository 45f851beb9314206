// A host device with small work to order: vectors of floats, added and copied.
#pragma once

#include "cpp/device/host_device.h"

#include <cmath>
#include <gtest/gtest.h>
#include <string>

namespace flashnext::test {

inline std::unique_ptr<Device> make_device(std::uint64_t seed, int threads = 1) {
  HostDeviceOptions options;
  options.threads = threads;
  options.seed = seed;
  options.isa = exl3::Isa::kScalar;
  return make_host_device(options);
}

inline constexpr std::int32_t kItems = 32;
inline constexpr std::size_t kBytes = kItems * sizeof(float);

// One vector on the device; poisoned until something is written.
struct Vec {
  explicit Vec(Device& device, std::string_view what = "vec")
      : block(device, Space::kDevice, kBytes, what) {}
  float* data() const { return block.as<float>(); }
  void fill(float value) const {
    for (int i = 0; i < kItems; ++i) data()[i] = value;
  }
  // The common value; NaN when poisoned or mixed.
  float value() const {
    for (int i = 1; i < kItems; ++i) {
      if (data()[i] != data()[0]) return NAN;
    }
    return data()[0];
  }
  Block block;
};

inline constexpr std::int32_t kOneRow = 1;

// out = a + b, as an op of the table.
inline void enqueue_add(Device& device, StreamId stream, const Vec& a, const Vec& b,
                        const Vec& out) {
  launch(device, stream, MtpJoinArgs{{&kOneRow, 1, 1}, a.data(), b.data(), out.data(), 1, kItems});
}

// Work that fails: a gather of a row outside of its table.
struct BadGather {
  std::int64_t id = 99;
  const std::byte* shard = reinterpret_cast<const std::byte*>(this);
  std::byte packed[8];
  void enqueue(Device& device, StreamId stream) {
    launch(device, stream, NgramGatherArgs{{&kOneRow, 1, 1}, &id, &shard, packed, 10, 10, 1, 8});
  }
};

// Runs `body` and gives the message of the exception of type E that it throws.
template <class E, class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "an exception of another kind: " << e.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace flashnext::test
