// A step for tests of the host ops: rows and segments are appended, view() points at them.
#pragma once

#include "cpp/base/thread_pool.h"
#include "cpp/device/host_ops.h"

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace flashnext::test {

using exl3::kIsas;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct TestStep {
  StepHead head{};
  std::vector<Row> rows;
  std::vector<Segment> segments;
  std::vector<std::int32_t> pages;  // (lanes, max_pages)
  std::int32_t max_pages = 0;

  TestStep& add(std::int32_t lane, std::int32_t pos0, std::int32_t count, std::int32_t state_in = 0,
                std::int32_t state_out = 0) {
    const auto segment = static_cast<std::int32_t>(segments.size());
    segments.push_back(
        {static_cast<std::int32_t>(rows.size()), count, pos0, lane, state_in, state_out});
    for (std::int32_t i = 0; i < count; ++i) rows.push_back({0, 0, 0, pos0 + i, lane, segment});
    head.rows = static_cast<std::int32_t>(rows.size());
    head.segments = static_cast<std::int32_t>(segments.size());
    return *this;
  }

  StepView view() const {
    StepView v{};
    v.head = &head;
    v.rows = rows.data();
    v.segments = segments.data();
    v.pages = pages.data();
    v.max_pages = max_pages;
    v.max_rows = head.rows;
    v.max_segments = head.segments;
    return v;
  }
};

inline std::vector<float> uniform(std::size_t n, float low, float high, std::uint32_t seed) {
  std::mt19937 engine(seed);
  std::vector<float> x(n);
  for (float& v : x) {
    v = low + (high - low) * (static_cast<float>(engine() >> 8) * 0x1p-24f);
  }
  return x;
}

}  // namespace flashnext::test
