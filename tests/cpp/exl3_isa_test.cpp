// AVX2 and AVX-512 against scalar, with ==: every rate, few and many rows, short and long inputs,
// extreme values, odd addresses.
#include "cpp/exl3/kernels.h"
#include "exl3_case.h"

#include <gtest/gtest.h>
#include <limits>

namespace flashnext {
namespace {

using namespace exl3_test;
using exl3::Isa;

class Exl3Isa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!exl3::supported(GetParam())) {
      GTEST_SKIP() << "this processor lacks " << exl3::to_string(GetParam());
    }
  }

  // All row counts against the scalar rows: also that a row does not depend on its company.
  static void compare(const Linear& l, const std::vector<float>& x, std::int32_t rows,
                      std::initializer_list<std::int32_t> counts, std::int32_t levels) {
    const std::vector<float> expected = ours(l.w, x.data(), rows, levels, Isa::kScalar);
    for (const std::int32_t count : counts) {
      ASSERT_LE(count, rows);
      const std::int32_t first = rows - count;
      const std::vector<float> y = ours(l.w, x.data() + static_cast<std::ptrdiff_t>(first) * l.w.in,
                                        count, levels, GetParam());
      ASSERT_TRUE(same_bits(expected.data() + static_cast<std::ptrdiff_t>(first) * l.w.out,
                            y.data(), y.size()))
          << "words " << l.w.words << " in " << l.w.in << " rows " << count << " levels " << levels;
    }
  }
};

TEST_P(Exl3Isa, EveryRateAndRowCount) {
  for (const std::int32_t words : kAllWords) {
    for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
      const unsigned seed = static_cast<unsigned>(words + levels);
      const Linear l = random_linear(384, 256, words, seed, static_cast<std::size_t>(words / 8) % 3,
                                     words % 32 == 0);
      compare(l, random_rows(13, l.w.in, seed), 13, {1, 2, 3, 4, 5, 6, 7, 8, 9, 13}, levels);
    }
  }
}

TEST_P(Exl3Isa, ManyRows) {
  for (const std::int32_t words : {24, 48, 80, 128}) {
    const Linear l = random_linear(640, 128, words, 5);
    compare(l, random_rows(200, l.w.in, 6), 200, {64, 127, 128, 129, 200}, exl3::kLevels);
  }
}

TEST_P(Exl3Isa, ShortAndLongInputs) {
  for (const std::int32_t in : {128, 256, 1024, 2560, 6144, 8320}) {
    for (const std::int32_t words : {48, 80}) {
      const Linear l = random_linear(in, 128, words, static_cast<unsigned>(in));
      compare(l, random_rows(9, in, 1), 9, {1, 3, 9}, exl3::kLevels);
    }
  }
}

TEST_P(Exl3Isa, WideOutputs) {
  const Linear l = random_linear(128, 2560, 48, 77);
  compare(l, random_rows(7, l.w.in, 2), 7, {1, 7}, exl3::kLevels);
}

// The largest sums: every activation at the top level (an impulse per block becomes flat), weights
// all at B = 0 (-510) or from the pattern with the largest byte sums.
TEST_P(Exl3Isa, LargestSums) {
  for (const std::int32_t words : kAllWords) {
    Linear l = random_linear(6144, 128, words, 3, 0);
    for (std::int32_t k = 0; k < l.w.in; ++k) {
      put_half(l.suh, static_cast<std::size_t>(2 * k), 1.0f);
    }
    std::vector<float> x(static_cast<std::size_t>(l.w.in) * 8, 0.0f);
    for (std::size_t k = 0; k < x.size(); k += 128) x[k] = 3.0f;
    std::vector<std::uint16_t> best(l.trellis.size() / 2, 0);
    std::int64_t most = 0;
    std::mt19937 random(8);
    for (int pattern = 0; pattern < 400; ++pattern) {
      const std::vector<std::uint16_t> tile(static_cast<std::size_t>(words),
                                            static_cast<std::uint16_t>(random()));
      std::int16_t sums[256];
      exl3::tile_sums(reinterpret_cast<const std::byte*>(tile.data()), words, sums);
      std::int64_t total = 0;
      for (const std::int16_t b : sums) total += b;
      if (total > most) {
        most = total;
        std::fill(best.begin(), best.end(), tile[0]);
      }
    }
    std::memcpy(l.trellis.data(), best.data(), l.trellis.size());
    compare(l, x, 8, {1, 2, 8}, exl3::kLevels);
    std::fill(l.trellis.begin(), l.trellis.end(), std::byte{0});
    compare(l, x, 8, {1, 2, 8}, exl3::kLevels);
  }
}

TEST_P(Exl3Isa, ExtremeRows) {
  const Linear l = random_linear(512, 256, 48, 12, 1, true);
  const std::size_t in = 512;
  std::vector<float> x = random_rows(9, l.w.in, 13);
  std::fill(x.begin(), x.begin() + 512, 0.0f);
  x[in + 7] = 1e30f;                                             // one huge value
  for (std::size_t k = 0; k < in; ++k) x[2 * in + k] *= 1e-30f;  // small, still a number
  for (std::size_t k = 0; k < in; ++k) x[3 * in + k] *= 1e-41f;  // denormal
  for (std::size_t k = 0; k < in; ++k) x[4 * in + k] = 1.0f;     // one spike a block
  x[5 * in + 1] = std::numeric_limits<float>::quiet_NaN();
  x[6 * in + 500] = -std::numeric_limits<float>::infinity();
  for (std::size_t k = 0; k < in; ++k) x[7 * in + k] *= 1e37f;
  for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
    compare(l, x, 9, {1, 2, 3, 4, 5, 6, 7, 8, 9}, levels);
    for (std::int32_t r = 0; r < 9; ++r) {  // and each alone
      const std::vector<float> row(x.begin() + r * 512, x.begin() + (r + 1) * 512);
      compare(l, row, 1, {1}, levels);
    }
  }
}

TEST_P(Exl3Isa, PreparedRowsAreEqual) {
  for (const std::int32_t in : {128, 2560, 8448}) {
    const Linear l = random_linear(in, 128, 16, 14);
    std::vector<float> x = random_rows(3, in, 15);
    for (std::int32_t k = 0; k < in; ++k)
      x[static_cast<std::size_t>(k)] = k % 128 == 0 ? 2.0f : 0.0f;
    for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit, 381}) {
      AlignedBytes memory(exl3::prepared_bytes(3, in)), memory2(exl3::prepared_bytes(3, in));
      const exl3::Prepared a = exl3::place_prepared(memory.data(), 3, in);
      const exl3::Prepared b = exl3::place_prepared(memory2.data(), 3, in);
      exl3::prepare(l.w, x.data(), in, levels, Isa::kScalar, 0, 3, a);
      exl3::prepare(l.w, x.data(), in, levels, GetParam(), 0, 3, b);
      const std::size_t n = static_cast<std::size_t>(in) * 3;
      EXPECT_EQ(std::memcmp(a.v, b.v, n * 2), 0);
      EXPECT_EQ(std::memcmp(a.high, b.high, n), 0);
      EXPECT_EQ(std::memcmp(a.low, b.low, n), 0);
      for (int r = 0; r < 3; ++r) {
        EXPECT_EQ(a.q[r], b.q[r]);
        EXPECT_EQ(a.sum[r], b.sum[r]);
        EXPECT_EQ(a.sum_high[r], b.sum_high[r]);
        EXPECT_EQ(a.sum_low[r], b.sum_low[r]);
      }
    }
  }
}

#if defined(__x86_64__)
// Who made the processor decides between two tables: both are tested everywhere. The largest sums
// of one row, of either sign, are among the inputs.
TEST(Exl3Avx512, BothTablesAgree) {
  if (!exl3::supported(Isa::kAvx512)) GTEST_SKIP() << "this processor lacks avx512";
  for (const std::int32_t words : kAllWords) {
    const Linear l = random_linear(1280, 256, words, static_cast<unsigned>(words), 3);
    AlignedBytes memory(exl3::prepared_bytes(3, l.w.in));
    const exl3::Prepared p = exl3::place_prepared(memory.data(), 3, l.w.in);
    exl3::prepare(l.w, random_rows(3, l.w.in, 16).data(), l.w.in, exl3::kLevels, Isa::kScalar, 0, 3,
                  p);
    for (const int sign : {1, -1}) {
      const std::int32_t row = sign > 0 ? 1 : 2;
      std::fill_n(p.v + row * l.w.in, l.w.in, static_cast<std::int16_t>(sign * exl3::kLevels));
      p.sum[row] = std::int64_t{sign} * exl3::kLevels * l.w.in;
    }
    for (const exl3::internal::Kernels* table :
         {&exl3::internal::kAvx512Kernels, &exl3::internal::kAvx512MultishiftKernels}) {
      for (const std::int32_t rows : {1, 2}) {
        for (std::int32_t row = 0; row + rows <= 3; ++row) {
          for (std::int32_t block = 0; block < 2; ++block) {
            std::vector<std::int64_t> expected(static_cast<std::size_t>(rows) * 128);
            std::vector<std::int64_t> sums(expected.size(), -1);
            exl3::internal::kScalarKernels.sums(l.w, p, row, rows, block, exl3::upcoming(l.w, 0, 0),
                                                expected.data());
            table->sums(l.w, p, row, rows, block, exl3::upcoming(l.w, 0, 0), sums.data());
            ASSERT_EQ(sums, expected) << "words " << words << " row " << row << " rows " << rows;
          }
        }
      }
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(All, Exl3Isa, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& p) { return std::string(exl3::to_string(p.param)); });

}  // namespace
}  // namespace flashnext
