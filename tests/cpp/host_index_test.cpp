// Cache writes and block selection on the host: formulas of spec/model.md 4 in double precision,
// and exact selection with ties.
#include "cpp/base/half.h"
#include "host_attention_step.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <numeric>

namespace flashnext {
namespace {

using namespace test;

// norm_(1+w), then RoPE at pos, in double precision.
std::vector<double> normed(const std::vector<double>& x, const Floats& w, int pos) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double r = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-6);
  std::vector<double> y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = x[i] * r * wide(w[i]);
  for (int i = 0; i < kRotary / 2; ++i) {
    const double angle = pos * std::pow(1e7, -2.0 * i / kRotary);
    const double a = y[size(i)], b = y[size(i + kRotary / 2)];
    y[size(i)] = a * std::cos(angle) - b * std::sin(angle);
    y[size(i + kRotary / 2)] = b * std::cos(angle) + a * std::sin(angle);
  }
  return y;
}

std::vector<double> widened(const Floats& from, std::int64_t first, int n) {
  std::vector<double> x;
  for (int i = 0; i < n; ++i) x.push_back(wide(from[size(first + i)]));
  return x;
}

TEST(AttnPrepare, WritesQueriesAndCacheByTheFormulas) {
  constexpr int kTokens = 140;
  const Weights w;
  const std::vector<Tokens> lanes = {Tokens(0, 1), Tokens(kTokens, 60)};
  const Tokens& in = lanes[1];
  Cache cache;
  TestStep step;
  step.add(1, 0, kTokens);
  const Rows out = run(step, lanes, cache);
  for (int pos = 0; pos < kTokens; ++pos) {
    const std::int64_t page = kTable[size(kMaxPages + pos / kPageTokens)];
    const std::int64_t slot = pos % kPageTokens;
    for (int h = 0; h < kHeads; ++h) {
      const auto q = normed(widened(in.qg, (pos * kHeads + h) * 2 * kDim, kDim), w.q, pos);
      for (int d = 0; d < kDim; ++d) {
        ASSERT_NEAR(out.q[size((pos * kHeads + h) * kDim + d)], q[size(d)], 2e-6);
      }
    }
    for (int h = 0; h < kKvHeads; ++h) {
      const auto k = normed(widened(in.k, (pos * kKvHeads + h) * kDim, kDim), w.k, pos);
      for (int d = 0; d < kDim; ++d) {
        const std::size_t at = size(((page * kKvHeads + h) * kPageTokens + slot) * kDim + d);
        ASSERT_NEAR(f16_to_f32(cache.k[at]), k[size(d)], 0x1p-11 * std::abs(k[size(d)]) + 3e-6);
        const double v = wide(in.v[size((pos * kKvHeads + h) * kDim + d)]);
        ASSERT_NEAR(f16_to_f32(cache.v[at]), v, 0x1p-11 * std::abs(v) + 0x1p-25);
      }
    }
    const std::int64_t index = pos * (kIndexHeads + 1);
    for (int h = 0; h < kIndexHeads; ++h) {
      const auto q = normed(widened(in.index, (index + h) * kIndexDim, kIndexDim), w.iq, pos);
      for (int d = 0; d < kIndexDim; ++d) {
        ASSERT_NEAR(out.iq[size((pos * kIndexHeads + h) * kIndexDim + d)], q[size(d)], 2e-6);
      }
    }
    if (pos % kBlock != kBlock - 1) continue;
    std::vector<double> mean(kIndexDim, 0.0);
    for (int i = 0; i < kBlock; ++i) {
      const std::int64_t key = (pos - i) * (kIndexHeads + 1) + kIndexHeads;
      for (int d = 0; d < kIndexDim; ++d)
        mean[size(d)] += wide(in.index[size(key * kIndexDim + d)]) / 4;
    }
    const auto pooled = normed(mean, w.ik, pos - 3);
    for (int d = 0; d < kIndexDim; ++d) {
      const std::int64_t block = page * (kPageTokens / kBlock) + slot / kBlock;
      ASSERT_NEAR(cache.pooled[size(block * kIndexDim + d)], pooled[size(d)], 4e-6);
    }
  }
  EXPECT_TRUE(std::isnan(cache.pooled[size(kTable[kMaxPages + 3]) * 16 * kIndexDim]));
  // The window holds the last three raw keys and nothing beside them.
  for (int i = 0; i < kBlock - 1; ++i) {
    const int key = (kTokens - (kBlock - 1) + i) * (kIndexHeads + 1) + kIndexHeads;
    EXPECT_EQ(row_of(cache.windows, i, kIndexDim), row_of(in.index, key, kIndexDim)) << i;
  }
  EXPECT_TRUE(std::isnan(cache.windows[size((kBlock - 1) * kIndexDim)]));
}

TEST(AttnPrepare, ValuesBeyondFp16BecomeInfinity) {
  std::vector<Tokens> lanes = {Tokens(1, 70)};
  lanes[0].v[3] = 65519.0f;
  lanes[0].v[4] = 65520.0f;
  Cache cache;
  TestStep step;
  step.add(0, 0, 1);
  const Rows out = run(step, lanes, cache);
  const std::size_t first = size(kTable[0]) * kKvHeads * kPageTokens * kDim;
  EXPECT_EQ(cache.v[first + 3], 0x7BFF);
  EXPECT_EQ(cache.v[first + 4], 0x7C00);
  EXPECT_TRUE(std::isinf(out.y[4]));
}

// ---- selection
// -----------------------------------------------------------------------------------------------

struct Selection {
  Ids blocks, count;
};

Selection select(const Floats& iq, const std::vector<int>& positions, Cache& cache, exl3::Isa isa,
                 int threads) {
  TestStep step;
  for (const int pos : positions) step.add(1, pos, 1);
  step.pages = kTable;
  step.max_pages = kMaxPages;
  Selection out{Ids(positions.size() * kMaxBlocks, -7), Ids(positions.size(), -7)};
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  IndexSelectArgs args{};
  args.step = step.view();
  args.dims = kDims;
  args.iq = iq.data();
  args.planes = cache.planes();
  args.blocks = out.blocks.data();
  args.count = out.count.data();
  args.max_context = kContext;
  std::vector<std::byte> scratch(host::workspace_bytes(args, threads));
  args.workspace = {scratch.data(), scratch.size()};
  host::index_select(args, context);
  return out;
}

// Small whole numbers: every dot is exact, so that the expected order is exact and full of ties.
TEST(IndexSelect, OrdersByScoreThenBlockWithTies) {
  for (const int spread : {0, 1, 2, 9}) {  // 0: every score is zero
    Cache cache;
    const auto whole = [&](std::size_t n, std::uint32_t seed) {
      Floats x = uniform(n, static_cast<float>(-spread), static_cast<float>(spread), seed);
      for (float& v : x) v = std::round(v);
      return x;
    };
    std::vector<int> positions = {0, 3, 30, 31, 34};  // up to 8 complete blocks: dense
    for (int pos = 35; pos < 384; pos += 13) positions.push_back(pos);
    positions.push_back(383);
    const Floats iq = whole(positions.size() * kIndexHeads * kIndexDim, 80);
    Floats keys = whole(96 * kIndexDim, 81);
    if (spread == 1) {  // most blocks have no match at all
      for (int j = 0; j < 96; ++j) {
        if (j % 7 != 3) std::fill_n(keys.begin() + j * kIndexDim, kIndexDim, 0.0f);
      }
    }
    for (int j = 0; j < 96; ++j) {
      const int page = kTable[size(kMaxPages + j / 16)];
      std::copy_n(keys.begin() + j * kIndexDim, kIndexDim,
                  cache.pooled.begin() + (page * 16 + j % 16) * kIndexDim);
    }
    const Selection got = select(iq, positions, cache, exl3::Isa::kScalar, 1);
    for (std::size_t r = 0; r < positions.size(); ++r) {
      const int blocks = (positions[r] + 1) / kBlock;
      if (blocks <= kMaxBlocks) {
        EXPECT_EQ(got.count[r], -1);
        continue;
      }
      EXPECT_EQ(got.count[r], kMaxBlocks);
      std::vector<std::pair<long, int>> order;
      for (int j = 0; j < blocks; ++j) {
        long score = 0;
        for (int h = 0; h < kIndexHeads; ++h) {
          long dot = 0;
          for (int d = 0; d < kIndexDim; ++d) {
            dot += std::lround(iq[(r * kIndexHeads + size(h)) * kIndexDim + size(d)]) *
                   std::lround(keys[size(j * kIndexDim + d)]);
          }
          score += std::max(dot, 0L);
        }
        order.emplace_back(-score, j);
      }
      std::sort(order.begin(), order.end());
      Ids want;
      for (int i = 0; i < kMaxBlocks; ++i) want.push_back(order[size(i)].second);
      std::sort(want.begin(), want.end());
      EXPECT_EQ(row_of(got.blocks, static_cast<int>(r), kMaxBlocks), want)
          << "spread " << spread << " position " << positions[r];
    }
    for (const exl3::Isa isa : kIsas) {
      for (const int threads : {1, 2, 3}) {
        const Selection again = select(iq, positions, cache, isa, threads);
        EXPECT_EQ(again.blocks, got.blocks);
        EXPECT_EQ(again.count, got.count);
      }
    }
  }
}

}  // namespace
}  // namespace flashnext
