#include "cpp/base/math.h"

#include <cmath>
#include <gtest/gtest.h>

namespace m = flashnext::math;

namespace {
// Distance in units of the last place of the exact value.
double ulps(float got, double want) {
  const double spacing = std::ldexp(1.0, std::max(std::ilogb(want), -126) - 23);
  return std::abs(static_cast<double>(got) - want) / spacing;
}
}  // namespace

TEST(Math, ExpIsWithinTwoUlpOverItsRange) {
  double worst = 0;
  for (double x = -87.0; x <= 88.0; x += 0.000731) {
    const float f = static_cast<float>(x);
    worst = std::max(worst, ulps(m::exp(f), std::exp(static_cast<double>(f))));
  }
  EXPECT_LE(worst, 2.0);
}

TEST(Math, ExpClampsAndKeepsNan) {
  EXPECT_EQ(m::exp(-1000.0f), m::exp(-87.0f));
  EXPECT_EQ(m::exp(1000.0f), m::exp(88.0f));
  EXPECT_TRUE(std::isnan(m::exp(std::nanf(""))));
  EXPECT_EQ(m::exp(0.0f), 1.0f);
}

TEST(Math, SigmoidNeverOverflowsAndIsAccurate) {
  for (double x = -80.0; x <= 80.0; x += 0.00713) {
    const float f = static_cast<float>(x);
    ASSERT_LE(ulps(m::sigmoid(f), 1.0 / (1.0 + std::exp(-static_cast<double>(f)))), 4.0) << f;
  }
  EXPECT_EQ(m::sigmoid(1e30f), 1.0f);
  EXPECT_GT(m::sigmoid(-1e30f), 0.0f);
}

TEST(Math, SoftplusIsAccurateAndLinearAboveTwenty) {
  for (double x = -40.0; x <= 20.0; x += 0.00313) {
    const float f = static_cast<float>(x);
    ASSERT_LE(ulps(m::softplus(f), std::log1p(std::exp(static_cast<double>(f)))), 4.0) << f;
  }
  EXPECT_EQ(m::softplus(20.5f), 20.5f);
}
