// The gate's cases (cpp/gate) as tests: what compares there is expected here.
#pragma once

#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"
#include "cpp/gate/cases.h"

#include <gtest/gtest.h>
#include <string>

namespace flashnext::test {

using namespace flashnext::gate;

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
