// Parts of prompts are sized from the times of steps: machines that are played here.
#include "cpp/sched/step_times.h"

#include <cmath>
#include <gtest/gtest.h>

namespace flashnext {
namespace {

// Reads a prompt beside a decoding neighbour and returns the longest step after the first few.
template <class Machine>
double longest_step(StepTimes& times, Machine&& seconds_of, double wait, int steps, int settled) {
  double longest = 0;
  for (int i = 0; i < steps; ++i) {
    const std::int32_t rows = times.rows_within(wait, 8192, 64);
    const double seconds = seconds_of(rows);
    times.add(rows, seconds);
    if (i >= settled) longest = std::max(longest, seconds);
  }
  return longest;
}

TEST(StepTimes, NothingIsKnownAtFirst) {
  const StepTimes times;
  EXPECT_EQ(times.expected(100), 0);
  EXPECT_EQ(times.rows_within(0.2, 2048, 64), 64);
  EXPECT_EQ(times.rows_within(0.2, 8, 64), 8);
}

TEST(StepTimes, BetweenWhatWasMeasuredOnALine) {
  StepTimes times;
  times.add(64, 0.010);
  times.add(1024, 0.106);
  EXPECT_NEAR(times.expected(544), 0.058, 1e-12);
  EXPECT_NEAR(times.expected(2048), 0.212, 1e-12);  // in proportion
  EXPECT_LE(times.expected(8), 0.010);
}

TEST(StepTimes, TheWaitIsKeptOnFastAndSlowMachines) {
  for (const double fixed : {0.0005, 0.004, 0.05}) {
    for (const double row : {2e-6, 3e-5, 1e-3}) {
      StepTimes times;
      const auto machine = [&](std::int32_t rows) { return fixed + row * rows; };
      EXPECT_LE(longest_step(times, machine, 0.2, 60, 0), 0.2 * 1.05) << fixed << " " << row;
      // And it is used: the part is nearly as large as it may be.
      const double most = std::min((0.2 - fixed) / row, 8192.0);
      EXPECT_GE(times.rows_within(0.2, 8192, 64), 0.8 * most) << fixed << " " << row;
    }
  }
}

TEST(StepTimes, AMachineThatBecomesSlowerIsFollowed) {
  StepTimes times;
  const auto fast = [](std::int32_t rows) { return 0.002 + 2e-5 * rows; };
  const auto slow = [](std::int32_t rows) { return 0.002 + 1e-4 * rows; };
  longest_step(times, fast, 0.2, 50, 0);
  EXPECT_LE(longest_step(times, slow, 0.2, 40, 8), 0.25);
}

TEST(StepTimes, StepsThatJumpWithTheirBucket) {
  StepTimes times;
  const auto machine = [](std::int32_t rows) {
    return rows <= 512 ? 0.02 : rows <= 2048 ? 0.15 : 0.6;
  };
  EXPECT_LE(longest_step(times, machine, 0.2, 100, 20), 0.6);
  int late = 0;
  for (int i = 0; i < 100; ++i) {
    const std::int32_t rows = times.rows_within(0.2, 8192, 64);
    times.add(rows, machine(rows));
    late += machine(rows) > 0.2 ? 1 : 0;
  }
  EXPECT_EQ(late, 0);
}

}  // namespace
}  // namespace flashnext
