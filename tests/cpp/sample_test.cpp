// The sampler against a plain full sort in double precision, its generator against the published
// vectors, and the op that uses it.
#include "cpp/sample/sample.h"

#include "tests/cpp/host_op_case.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>

namespace flashnext {
namespace {

using sample::kBadLogits;
using sample::Params;
using test::Rng;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::int32_t draw(const std::vector<float>& logits, const Params& params) {
  const auto limit = static_cast<std::int32_t>(logits.size());
  std::vector<std::uint64_t> scratch(sample::scratch_bytes(limit) / 8);
  return sample::draw(logits.data(), limit, params, scratch.data());
}

Params plain(std::int32_t position, float temperature = 1.0f) {
  return {1234, temperature, 1.0f, 0.0f, 0, position};
}

// What the filters leave, in order, with its probabilities in double, from a full sort.
using Kept = std::vector<std::pair<std::int32_t, double>>;

Kept kept(const std::vector<float>& logits, const Params& p) {
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (p.top_k > 0 && p.top_k < static_cast<int>(order.size())) order.resize(p.top_k);
  std::vector<double> e;
  double z = 0;
  for (const int i : order) {
    e.push_back(std::exp((double{logits[i]} - logits[order[0]]) / p.temperature));
    z += e.back();
  }
  std::size_t n = e.size();
  if (p.top_p < 1) {
    double sum = e[0];
    for (n = 1; n < e.size() && sum < double{p.top_p} * z; ++n) sum += e[n];
  }
  if (p.min_p > 0) {
    std::size_t m = 1;
    while (m < n && e[m] >= p.min_p) ++m;
    n = m;
  }
  const double left = std::accumulate(e.begin(), e.begin() + static_cast<std::ptrdiff_t>(n), 0.0);
  Kept result;
  for (std::size_t i = 0; i < n; ++i) result.emplace_back(order[i], e[i] / left);
  return result;
}

// The token by definition: the first in order whose running probability exceeds r / 2^64.
std::int32_t by_definition(const Kept& order, const Params& p) {
  const double r = std::ldexp(static_cast<double>(sample::random_bits(p.seed, p.position)), -64);
  double sum = 0;
  for (const auto& [id, probability] : order) {
    sum += probability;
    if (sum > r) return id;
  }
  return order.back().first;
}

TEST(Philox, GivesThePublishedVectors) {
  const auto check = [](std::array<std::uint32_t, 6> in, std::array<std::uint32_t, 4> want) {
    const auto got = sample::philox(in[0], in[1], in[2], in[3], in[4], in[5]);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want[i]);
  };
  check({0, 0, 0, 0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  check({~0u, ~0u, ~0u, ~0u, ~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  check({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0},
        {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(Philox, KeyIsTheSeedAndCounterThePosition) {
  const auto words = sample::philox(7, 0, 0, 0, 0x89ABCDEFu, 0x01234567u);
  EXPECT_EQ(sample::random_bits(0x0123456789ABCDEFu, 7),
            (std::uint64_t{words.word[1]} << 32) | words.word[0]);
}

TEST(DrawBelow, IsTheHighHalfOfTheProduct) {
  Rng rng(1);
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t r = sample::random_bits(1, i), z = sample::random_bits(2, i) >> (i % 60);
    const auto want = static_cast<std::uint64_t>((static_cast<unsigned __int128>(r) * z) >> 64);
    ASSERT_EQ(sample::draw_below(r, z), want);
  }
}

TEST(Sample, TemperatureZeroIsArgmaxWithTiesToTheLowestId) {
  EXPECT_EQ(draw({1, 5, 5, 2}, plain(0, 0)), 1);
  EXPECT_EQ(draw({-kInf, -3, -3}, plain(0, 0)), 1);
  EXPECT_EQ(draw({4}, plain(9, 0)), 0);
}

TEST(Sample, BadLogitsAreAValue) {
  for (const float t : {0.0f, 1.0f}) {
    EXPECT_EQ(draw({1, NAN, 2}, plain(0, t)), kBadLogits);
    EXPECT_EQ(draw({NAN, 1, 2}, plain(0, t)), kBadLogits);
    EXPECT_EQ(draw({1, kInf, 2}, plain(0, t)), kBadLogits);
    EXPECT_EQ(draw({-kInf, -kInf}, plain(0, t)), kBadLogits);
  }
}

struct Filter {
  float temperature, top_p, min_p;
  std::int32_t top_k;
};

class SampleFilters : public testing::TestWithParam<Filter> {};

TEST_P(SampleFilters, DrawsTheTokenOfTheDefinition) {
  const Filter f = GetParam();
  Rng rng(12);
  for (const int vocab : {5, 300, 4000}) {
    auto logits = rng.floats(static_cast<std::size_t>(vocab), 2.5f);
    for (int i = 0; i < vocab; i += 3) logits[i] = std::round(logits[i]);  // ties
    if (vocab > 5) logits[7] = -kInf;
    const Kept order = kept(logits, {77, f.temperature, f.top_p, f.min_p, f.top_k, 0});
    int different = 0;
    for (std::int32_t position = 0; position < 200; ++position) {
      const Params p{77, f.temperature, f.top_p, f.min_p, f.top_k, position};
      // fp32 weights against fp64: a draw may fall between the two borders of a token, rarely.
      const std::int32_t token = draw(logits, p);
      different += token != by_definition(order, p);
      ASSERT_TRUE(std::any_of(order.begin(), order.end(), [&](const auto& c) {
        return c.first == token;
      })) << "a filtered token was drawn";
    }
    EXPECT_LE(different, 1) << "vocab " << vocab;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SampleFilters,
                         testing::Values(Filter{1, 1, 0, 0}, Filter{0.3f, 1, 0, 0},
                                         Filter{3, 1, 0, 0}, Filter{1, 1, 0, 1},
                                         Filter{1, 1, 0, 40}, Filter{1, 0.9f, 0, 0},
                                         Filter{1, 0.2f, 0, 0}, Filter{1, 1e-9f, 0, 0},
                                         Filter{1, 1, 0.05f, 0}, Filter{1, 1, 1, 0},
                                         Filter{0.7f, 0.95f, 0.02f, 50}, Filter{2, 0.999f, 0, 0}));

TEST(Sample, FrequenciesFollowTheProbabilities) {
  const std::vector<float> logits = {0, 2, 1, -1, 0.5f};
  const Params base{5, 0.8f, 0.97f, 0, 0, 0};
  const auto want = kept(logits, base);
  std::map<std::int32_t, int> counts;
  constexpr int kDraws = 40000;
  for (int i = 0; i < kDraws; ++i) {
    Params p = base;
    p.position = i;
    ++counts[draw(logits, p)];
  }
  for (const auto& [id, probability] : want) {
    const double sigma = std::sqrt(probability * (1 - probability) / kDraws);
    EXPECT_NEAR(counts[id] / double{kDraws}, probability, 5 * sigma + 1e-9) << "id " << id;
  }
  EXPECT_EQ(counts.size(), want.size());
}

TEST(Sample, ExtremeTemperaturesAreSafe) {
  const std::vector<float> logits = {1, 3, 2, 3};
  std::map<std::int32_t, int> counts;
  for (int i = 0; i < 2000; ++i) {
    // Ties at the top stay ties however small the temperature.
    const auto token = draw(logits, plain(i, 1e-30f));
    ASSERT_TRUE(token == 1 || token == 3);
    ++counts[draw(logits, plain(i, 1e30f))];
  }
  EXPECT_EQ(counts.size(), 4u);
}

TEST(SampleOp, RowsAreIndependentAndPaddingIsNeverDrawn) {
  Rng rng(3);
  constexpr std::int32_t kVocab = 700, kLimit = 650, kOutputs = 9;
  auto logits = rng.floats(kOutputs * kVocab, 2.0f);
  for (int r = 0; r < kOutputs; ++r) {
    for (int i = kLimit; i < kVocab; ++i) logits[r * kVocab + i] = 50;
  }
  logits[2 * kVocab + 5] = NAN;
  logits[3 * kVocab + kLimit] = NAN;  // padding does not count
  test::TestStep step;
  step.outputs.resize(kOutputs);
  for (int r = 0; r < kOutputs; ++r) {
    step.sampling.push_back({99, r == 0 ? 0.0f : 0.9f, 0.9f, 0.01f, r % 2 * 30, 1000 + r, 0});
  }
  std::vector<std::int32_t> want;
  for (int r = 0; r < kOutputs; ++r) {
    const SampleParams& p = step.sampling[r];
    const std::vector<float> row(&logits[r * kVocab], &logits[r * kVocab] + kLimit);
    want.push_back(draw(row, {p.seed, p.temperature, p.top_p, p.min_p, p.top_k, p.position}));
    EXPECT_LT(want[r], kLimit);
  }
  EXPECT_EQ(want[2], kBadLogits);
  test::for_each_context([&](host::Context& context) {
    std::vector<std::int32_t> tokens(kOutputs, -7);
    SampleArgs args{step.view(), logits.data(), tokens.data(), kVocab, kLimit, {}};
    std::vector<std::uint64_t> scratch(host::workspace_bytes(args, context.pool.threads()) / 8);
    args.workspace = {scratch.data(), scratch.size() * 8};
    host::sample(args, context);
    EXPECT_EQ(tokens, want);
  });
}

}  // namespace
}  // namespace flashnext
