// Trellis decode against the worked examples of the format and against bit loops.
#include "exl3_case.h"

#include <array>
#include <gtest/gtest.h>

namespace flashnext {
namespace {

using namespace exl3_test;

std::vector<std::byte> example_tile(std::int32_t words) {
  std::vector<std::uint32_t> w(static_cast<std::size_t>(words) / 2);
  w[0] = 0x01234567;
  w[1] = 0x89ABCDEF;
  w.back() = 0x0000BEEF;
  std::vector<std::byte> tile(w.size() * 4);
  std::memcpy(tile.data(), w.data(), tile.size());
  return tile;
}

TEST(Exl3Decode, WorkedExampleStates) {
  struct Case {
    std::int32_t words;
    std::array<std::uint16_t, 9> first;
    std::uint16_t at15, at255;
  };
  const Case cases[] = {
      {64,
       {0xEEF0, 0xEF01, 0xF012, 0x0123, 0x1234, 0x2345, 0x3456, 0x4567, 0x5678},
       0xCDEF,
       0xBEEF},
      {48,
       {0xF778, 0xBBC0, 0xDE02, 0xF012, 0x8091, 0x048D, 0x2468, 0x2345, 0x1A2B},
       0x89AB,
       0xBEEF},
      {80,
       {0xDDE0, 0xBC04, 0x8091, 0x1234, 0x468A, 0xD159, 0x2B3C, 0x6789, 0xF135},
       0x0000,
       0xBEEF},
      {40,
       {0xFBBC, 0xDDE0, 0x7780, 0xBC04, 0xF012, 0x8091, 0x0246, 0x1234, 0x48D1},
       0x6789,
       0xBEEF},
  };
  for (const Case& c : cases) {
    const std::vector<std::byte> tile = example_tile(c.words);
    std::uint16_t states[256];
    exl3::tile_states(tile.data(), c.words, states);
    for (std::size_t t = 0; t < c.first.size(); ++t) EXPECT_EQ(states[t], c.first[t]) << t;
    EXPECT_EQ(states[15], c.at15);
    EXPECT_EQ(states[255], c.at255);
  }
}

TEST(Exl3Decode, WorkedExampleWeights) {
  const std::vector<std::byte> tile = example_tile(64);
  std::int16_t sums[256];
  exl3::tile_sums(tile.data(), 64, sums);
  const auto weight = [&](int row, int col) {
    return f16_to_f32(
        f32_to_f16(static_cast<float>(887 * sums[16 * row + col] - 452608) * 0x1p-17f));
  };
  EXPECT_NEAR(weight(0, 0), 0.904785f, 1e-6);
  EXPECT_NEAR(weight(1, 0), -0.306396f, 1e-6);
  EXPECT_NEAR(weight(8, 0), -0.042419f, 1e-6);
  EXPECT_NEAR(weight(9, 0), -0.299561f, 1e-6);
  EXPECT_NEAR(weight(0, 8), -0.577148f, 1e-6);
  EXPECT_NEAR(weight(1, 8), -0.847656f, 1e-6);
  EXPECT_NEAR(weight(8, 8), -1.125f, 1e-6);
  EXPECT_NEAR(weight(9, 8), -1.395508f, 1e-6);
  EXPECT_NEAR(weight(2, 0), 0.059082f, 1e-6);
}

TEST(Exl3Decode, CodebookTable) {
  struct Case {
    std::uint16_t state, bits;
    int sum;
  };
  for (const Case& c :
       {Case{0x0000, 0xC2E8, 0}, Case{0x0001, 0x3921, 605}, Case{0x0123, 0xB4CB, 466},
        Case{0x1234, 0xB89E, 425}, Case{0x8000, 0xBAF2, 382}, Case{0xFFFF, 0xB936, 414}}) {
    EXPECT_EQ(exl3::codebook(c.state), c.bits) << c.state;
    EXPECT_EQ(exl3::byte_sum(c.state), c.sum) << c.state;
  }
  int most = 0;
  double mean = 0.0;
  double square = 0.0;
  for (int s = 0; s < 65536; ++s) {
    const auto state = static_cast<std::uint16_t>(s);
    ASSERT_EQ(exl3::byte_sum(state), sum_of_bytes(state)) << s;
    const double value = f16_to_f32(exl3::codebook(state));
    // One rounding of the exact value: half a unit of the last place at most.
    const double exact = (887.0 * sum_of_bytes(state) - 452608.0) / 131072.0;
    ASSERT_LE(std::fabs(value - exact), std::fabs(exact) * 0x1p-11 + 0x1p-25) << s;
    most = std::max(most, exl3::byte_sum(state));
    mean += value / 65536;
    square += value * value / 65536;
  }
  EXPECT_EQ(most, 1005);
  EXPECT_NEAR(mean, -0.0019, 1e-4);
  EXPECT_NEAR(std::sqrt(square), 1.00031, 1e-5);
}

TEST(Exl3Decode, EveryRateAgainstBitLoops) {
  for (const std::int32_t words : kAllWords) {
    const Linear l = random_linear(128, 128, words, 7u + static_cast<unsigned>(words), 1);
    const std::vector<std::int16_t> expected = byte_sums(l.w);
    for (std::int32_t a = 0; a < 8; ++a) {
      for (std::int32_t b = 0; b < 8; ++b) {
        const std::byte* tile = l.w.trellis + (a * 8 + b) * words * 2;
        std::uint16_t states[256];
        exl3::tile_states(tile, words, states);
        for (int t = 0; t < 256; ++t) ASSERT_EQ(states[t], state_at(tile, words, t)) << words;
        std::int16_t sums[256];
        exl3::tile_sums(tile, words, sums);
        for (int i = 0; i < 256; ++i) {
          ASSERT_EQ(sums[i],
                    expected[static_cast<std::size_t>((16 * a + i / 16) * 128 + 16 * b + i % 16)])
              << words << " " << i;
        }
      }
    }
  }
}

TEST(Exl3Decode, Rates) {
  for (std::int32_t words = -16; words <= 256; ++words) {
    const bool listed =
        std::find(std::begin(kAllWords), std::end(kAllWords), words) != std::end(kAllWords);
    EXPECT_EQ(exl3::valid_words(words), listed) << words;
  }
}

TEST(Exl3Ring, WorkedExample) {
  std::vector<std::uint16_t> words(51);
  words[0] = 0x2C00;
  words[1] = 0x1234;
  words[2] = 0x5678;
  words[50] = 0xF00D;
  std::vector<std::byte> row(1 + words.size() * 2);  // at an odd address
  std::memcpy(row.data() + 1, words.data(), words.size() * 2);
  float out[160];
  exl3::ring_row(row.data() + 1, 5, 160, nullptr, out);
  const float expected[] = {0.01300049f,  0.11791992f,  -0.05551147f, 0.05697632f,
                            -0.05508423f, -0.01914978f, -0.02676392f};
  for (std::size_t i = 0; i < std::size(expected); ++i) EXPECT_NEAR(out[i], expected[i], 5e-9) << i;
  const std::vector<std::uint16_t> bias(160, f32_to_f16(0.25f));
  exl3::ring_row(row.data() + 1, 5, 160, bias.data(), out);
  const float shifted[] = {0.2630f, 0.3679f, 0.1945f, 0.3069f};
  for (std::size_t i = 0; i < std::size(shifted); ++i) EXPECT_NEAR(out[i], shifted[i], 1.3e-4) << i;
}

// Bit m of state(i) is bit m % K of symbol (i - m / K), symbols least significant bit first.
TEST(Exl3Ring, EveryWidthAgainstBitLoops) {
  std::mt19937 random(3);
  for (std::int32_t bits = 1; bits <= 8; ++bits) {
    for (const std::int32_t width : {160, 256}) {
      std::vector<std::byte> row(2 + static_cast<std::size_t>(width * bits) / 8);
      for (std::byte& b : row) b = static_cast<std::byte>(random());
      put_half(row, 0, -0.75f);
      std::vector<std::uint16_t> bias(static_cast<std::size_t>(width));
      for (std::uint16_t& b : bias) b = static_cast<std::uint16_t>(0x2000u + random() % 0x1800u);
      std::vector<float> out(bias.size());
      exl3::ring_row(row.data(), bits, width, bias.data(), out.data());
      for (int i = 0; i < width; ++i) {
        unsigned state = 0;
        for (int m = 0; m < 16; ++m) {
          const int symbol = (i - m / bits + width) % width;
          const int bit = symbol * bits + m % bits;
          state |=
              (std::to_integer<unsigned>(row[static_cast<std::size_t>(2 + bit / 8)]) >> (bit % 8) &
               1u)
              << m;
        }
        const float value = f16_to_f32(exl3::codebook(static_cast<std::uint16_t>(state))) * -0.75f;
        const float expected =
            f16_to_f32(f32_to_f16(value + f16_to_f32(bias[static_cast<std::size_t>(i)])));
        ASSERT_EQ(out[static_cast<std::size_t>(i)], expected) << bits << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace flashnext
