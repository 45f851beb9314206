// The scalar integer linear: bit for bit against its steps written down again, and within the
// arithmetic's error of the exact product of the decoded weights.
#include "exl3_case.h"

#include <bit>
#include <gtest/gtest.h>
#include <limits>

namespace flashnext {
namespace {

using namespace exl3_test;
using exl3::Isa;

TEST(Exl3Linear, ScalarEqualsTheSteps) {
  for (const std::int32_t words : kAllWords) {
    for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
      const Linear l = random_linear(256, 128, words, 11u + static_cast<unsigned>(words), 1, true);
      const std::vector<std::int16_t> b = byte_sums(l.w);
      const std::vector<float> x = random_rows(5, l.w.in, 4);
      const std::vector<float> y = ours(l.w, x.data(), 5, levels, Isa::kScalar);
      for (std::size_t r = 0; r < 5; ++r) {
        const std::vector<float> expected = linear_row(l.w, b, x.data() + r * 256, levels);
        ASSERT_TRUE(same_bits(expected.data(), y.data() + r * 128, 128))
            << words << " " << levels << " row " << r;
      }
    }
  }
}

// sum_k x[k] W[k][n] in double, W = diag(suh) H Q H diag(svh), Q from `value` of the byte sums.
template <class Value>
std::vector<double> exact_row(const Exl3Weight& w, const std::vector<std::int16_t>& b,
                              const float* x, Value value) {
  const auto rotate = [](std::vector<double>& u) {
    const std::vector<double> from = u;
    for (std::size_t i = 0; i < u.size(); ++i) {
      double sum = 0.0;
      for (std::size_t j = 0; j < 128; ++j) {
        const bool minus = std::popcount((i % 128) & j) % 2 != 0;
        sum += minus ? -from[i / 128 * 128 + j] : from[i / 128 * 128 + j];
      }
      u[i] = sum / std::sqrt(128.0);
    }
  };
  std::vector<double> u(static_cast<std::size_t>(w.in));
  for (std::size_t k = 0; k < u.size(); ++k)
    u[k] = double{x[k]} * f16_to_f32(load_u16(w.suh + 2 * k));
  rotate(u);
  std::vector<double> y(static_cast<std::size_t>(w.out));
  for (std::size_t k = 0; k < u.size(); ++k) {
    for (std::size_t n = 0; n < y.size(); ++n) y[n] += u[k] * value(b[k * y.size() + n]);
  }
  rotate(y);
  for (std::size_t n = 0; n < y.size(); ++n) y[n] *= f16_to_f32(load_u16(w.svh + 2 * n));
  return y;
}

double relative_error(const std::vector<double>& exact, const float* y) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    error += (exact[n] - y[n]) * (exact[n] - y[n]);
    size += exact[n] * exact[n];
  }
  return std::sqrt(error / size);
}

TEST(Exl3Linear, ErrorAgainstTheExactProduct) {
  const auto affine = [](int b) { return 887.0 / 131072.0 * b - 3.453125; };
  const auto rounded = [](int b) {
    return double{f16_to_f32(f32_to_f16(static_cast<float>(887 * b - 452608) * 0x1p-17f))};
  };
  for (const std::int32_t words : {24, 48, 80}) {
    const Linear l = random_linear(2560, 256, words, 21u + static_cast<unsigned>(words));
    const std::vector<std::int16_t> b = byte_sums(l.w);
    const std::vector<float> x = random_rows(1, l.w.in, 9);
    const std::vector<float> y = ours(l.w, x.data(), 1, exl3::kLevels, Isa::kScalar);
    const std::vector<float> coarse = ours(l.w, x.data(), 1, exl3::kLevelsOneDigit, Isa::kScalar);
    // Of the affine weight only the activations' rounding is left; the rounded weight differs by
    // 2.1e-4; one digit rounds activations to 1/127 of the largest.
    EXPECT_LT(relative_error(exact_row(l.w, b, x.data(), affine), y.data()), 5e-5) << words;
    EXPECT_LT(relative_error(exact_row(l.w, b, x.data(), rounded), y.data()), 3e-4) << words;
    EXPECT_LT(relative_error(exact_row(l.w, b, x.data(), affine), coarse.data()), 1.2e-2) << words;
    EXPECT_GT(relative_error(exact_row(l.w, b, x.data(), affine), coarse.data()), 1e-3) << words;
  }
}

TEST(Exl3Linear, PreparedRowsHoldTheDigits) {
  const Linear l = random_linear(384, 128, 48, 2);
  const std::vector<float> x = random_rows(4, l.w.in, 5);
  for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
    AlignedBytes memory(exl3::prepared_bytes(4, l.w.in));
    const exl3::Prepared p = exl3::place_prepared(memory.data(), 4, l.w.in);
    exl3::prepare(l.w, x.data(), l.w.in, levels, Isa::kScalar, 0, 4, p);
    for (int r = 0; r < 4; ++r) {
      std::int64_t sum = 0, high = 0, low = 0;
      int most = 0;
      for (int k = 0; k < l.w.in; ++k) {
        const int v = p.v[r * l.w.in + k];
        const int v1 = p.high[r * l.w.in + k];
        const int v2 = p.low[r * l.w.in + k];
        ASSERT_EQ(v, 254 * v1 + v2);
        ASSERT_EQ(v1, std::lrint(v / 254.0));
        ASSERT_LE(std::abs(v2), 127);
        most = std::max(most, std::abs(v));
        sum += v;
        high += v1;
        low += v2;
      }
      EXPECT_EQ(most, levels);
      EXPECT_EQ(p.sum[r], sum);
      EXPECT_EQ(p.sum_high[r], high);
      EXPECT_EQ(p.sum_low[r], low);
    }
  }
}

TEST(Exl3Linear, RowsWithoutNumbers) {
  for (const bool bias : {false, true}) {
    const Linear l = random_linear(256, 128, 48, 31, 1, bias);
    std::vector<float> x(256 * 6, 0.0f);
    x[256 + 3] = std::numeric_limits<float>::quiet_NaN();
    x[512 + 130] = std::numeric_limits<float>::infinity();
    for (int k = 0; k < 256; ++k) {  // finite, but the rotation overflows
      const float scale = f16_to_f32(load_u16(l.w.suh + 2 * k));
      x[static_cast<std::size_t>(768 + k)] =
          std::copysign(std::numeric_limits<float>::max(), scale);
    }
    x[1024 + 9] = 1e-38f;  // levels / m is out of range: counts as zero
    x[1280 + 9] = -0.0f;
    for (Isa isa : isas()) {
      const std::vector<float> y = ours(l.w, x.data(), 6, exl3::kLevels, isa);
      for (int n = 0; n < 128; ++n) {
        const float empty = bias ? l.bias[static_cast<std::size_t>(n)] : 0.0f;
        for (const int r : {0, 4, 5}) {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(y[static_cast<std::size_t>(128 * r + n)]),
                    std::bit_cast<std::uint32_t>(empty));
        }
        for (const int r : {1, 2, 3}) {
          EXPECT_TRUE(std::isnan(y[static_cast<std::size_t>(128 * r + n)])) << r;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashnext
