// Sums of parts of the inputs and of several blocks at once: the same bits as the whole.
#include "cpp/exl3/kernels.h"
#include "tests/cpp/exl3_case.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace flashnext {
namespace {

using exl3::Isa;
using exl3_test::same_bits;

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (exl3::supported(isa)) all.push_back(isa);
  }
  return all;
}

TEST(Exl3Parts, PartsOfTheInputsAddUp) {
  for (const std::int32_t words : {24, 48, 80}) {
    const exl3_test::Linear l = exl3_test::random_linear(640, 256, words, 8);
    const std::vector<float> x = exl3_test::random_rows(9, 640, 9);
    for (const Isa isa : isas()) {
      for (const std::int32_t rows : {1, 3, 9}) {
        const std::vector<float> whole = exl3_test::ours(l.w, x.data(), rows, 127, isa);
        exl3_test::AlignedBytes memory(exl3::prepared_bytes(rows, 640));
        const exl3::Prepared p = exl3::place_prepared(memory.data(), rows, 640);
        exl3::prepare(l.w, x.data(), 640, 127, isa, 0, rows, p);
        std::vector<float> y(whole.size());
        for (std::int32_t block = 0; block < 2; ++block) {
          std::vector<std::int64_t> sums(static_cast<std::size_t>(rows) * 128);
          std::vector<std::int64_t> part(sums.size());
          const std::int32_t edges[] = {0, 128, 512, 640};
          for (int i = 0; i < 3; ++i) {
            exl3::part_sums(l.w, p, isa, block, edges[i], edges[i + 1], part.data());
            for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += part[k];
          }
          exl3::finish_sums(l.w, p, isa, block, sums.data(), y.data(), 256);
        }
        EXPECT_TRUE(same_bits(whole.data(), y.data(), y.size()))
            << exl3::to_string(isa) << " words " << words << " rows " << rows;
      }
    }
  }
}

TEST(Exl3Parts, WidePartsAddUp) {
  for (const std::int32_t words : {32, 40, 48, 56, 80}) {
    const exl3_test::Linear l = exl3_test::random_linear(640, 768, words, 10);
    const std::vector<float> x = exl3_test::random_rows(1, 640, 11);
    for (const Isa isa : isas()) {
      const std::vector<float> whole = exl3_test::ours(l.w, x.data(), 1, exl3::kLevels, isa);
      exl3_test::AlignedBytes memory(exl3::prepared_bytes(1, 640));
      const exl3::Prepared p = exl3::place_prepared(memory.data(), 1, 640);
      exl3::prepare(l.w, x.data(), 640, exl3::kLevels, isa, 0, 1, p);
      std::vector<float> y(whole.size());
      const std::int32_t columns[] = {0, 5, 6};
      for (int g = 0; g < 2; ++g) {
        const std::int32_t block = columns[g];
        const std::int32_t blocks = columns[g + 1] - block;
        std::vector<std::int64_t> sums(static_cast<std::size_t>(blocks) * 128);
        std::vector<std::int64_t> part(sums.size(), -1);
        const std::int32_t edges[] = {0, 64, 128, 320, 640};
        for (int i = 0; i < 4; ++i) {
          const exl3::Ahead next = i % 2 == 0 ? exl3::Ahead{} : exl3::ahead_of(l.w, 2, 3, 0, 64);
          exl3::wide_part_sums(l.w, p, isa, block, blocks, edges[i], edges[i + 1], next,
                               part.data());
          for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += part[k];
        }
        for (std::int32_t b = 0; b < blocks; ++b) {
          exl3::finish_sums(l.w, p, isa, block + b, sums.data() + 128 * b, y.data(), 768);
        }
      }
      EXPECT_TRUE(same_bits(whole.data(), y.data(), y.size()))
          << exl3::to_string(isa) << " words " << words;
    }
  }
}

// The tiles named are those of the blocks and inputs, each once, in the order of their addresses.
TEST(Exl3Parts, AheadNamesEveryTile) {
  const exl3_test::Linear l = exl3_test::random_linear(256, 512, 48, 12);
  for (const std::int32_t count : {4, 8}) {
    exl3::Ahead ahead = exl3::ahead_of(l.w, 1, 2, 64, 192);
    for (std::int32_t k = 4; k < 12; ++k) {
      for (std::int32_t n = 8; n < 24; n += count) {
        EXPECT_EQ(ahead.take(count, 96, nullptr), l.w.trellis + (k * 32 + n) * 96);
      }
    }
    EXPECT_EQ(ahead.take(count, 96, nullptr), nullptr);
  }
  exl3::Ahead nothing;
  EXPECT_EQ(nothing.take(8, 96, l.w.trellis), l.w.trellis);
}

#if defined(__x86_64__)
// Both forms of AVX-512, whatever made this processor, with the largest activations.
TEST(Exl3Parts, WideFormsOfAvx512) {
  if (!exl3::supported(Isa::kAvx512)) GTEST_SKIP() << "this processor lacks avx512";
  constexpr std::int32_t in = 1088;  // of a part: 64 more than whole blocks
  for (const std::int32_t words : {32, 40, 48, 56}) {
    const exl3_test::Linear l = exl3_test::random_linear(1152, 640, words, 13);
    Exl3Weight w = l.w;
    w.in = in;
    for (const bool is_largest : {false, true}) {
      std::vector<std::int16_t> v(in);
      std::mt19937 random(14);
      std::int64_t total = 0;
      for (std::int16_t& e : v) {
        e = static_cast<std::int16_t>(
            is_largest
                ? exl3::kLevels
                : static_cast<std::int32_t>(random() % (2 * exl3::kLevels + 1)) - exl3::kLevels);
        total += e;
      }
      exl3::Prepared p{};
      p.v = v.data();
      p.sum = &total;
      p.rows = 1;
      p.in = in;
      std::vector<std::int64_t> expected(640);
      for (std::int32_t block = 0; block < 5; ++block) {
        exl3::internal::kScalarKernels.sums(w, p, 0, 1, block, expected.data() + 128 * block);
      }
      for (const exl3::internal::Kernels* table :
           {&exl3::internal::kAvx512Kernels, &exl3::internal::kAvx512MultishiftKernels}) {
        std::vector<std::int64_t> sums(640, -1);
        ASSERT_TRUE(table->wide_sums(w, p, 0, 5, {}, sums.data()));
        EXPECT_EQ(sums, expected) << "words " << words;
        sums.assign(256, -1);
        ASSERT_TRUE(table->wide_sums(w, p, 3, 2, exl3::ahead_of(w, 0, 5, 0, 128), sums.data()));
        EXPECT_TRUE(std::equal(sums.begin(), sums.end(), expected.begin() + 3 * 128))
            << "words " << words;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace flashnext
