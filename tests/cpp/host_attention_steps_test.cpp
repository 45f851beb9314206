// The promise of spec/numerics.md for attention: one sequence, one answer. A row's outputs and
// cache entries have the same bits however its sequence is cut into steps, whatever other rows the
// step holds, and on any number of threads and any instruction set. 300 tokens with a budget of 8
// blocks pass from dense rows to selected ones.
#include "cpp/base/math.h"
#include "host_attention_step.h"

#include <algorithm>
#include <gtest/gtest.h>

namespace flashnext {
namespace {

using namespace test;

constexpr int kTokens = 300;

const std::vector<Tokens>& lanes() {
  static const std::vector<Tokens> all = {Tokens(kTokens, 90), Tokens(kTokens, 95)};
  return all;
}

bool same_bits(const Floats& a, const Floats& b) {  // NaN poison included
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
           return math::to_bits(x) == math::to_bits(y);
         });
}

void expect_same(const Cache& a, const Cache& b) {
  EXPECT_EQ(a.k, b.k);
  EXPECT_EQ(a.v, b.v);
  EXPECT_TRUE(same_bits(a.pooled, b.pooled));
  const auto windows = [](const Cache& c) {  // of both lanes; the third slot takes drafts
    return Floats(c.windows.begin(), c.windows.begin() + 2 * kSlotStride);
  };
  EXPECT_TRUE(same_bits(windows(a), windows(b)));
}

Rows in_chunks(int chunk, Cache& cache, exl3::Isa isa = exl3::Isa::kAvx512, int threads = 1) {
  Rows all;
  for (int pos = 0; pos < kTokens; pos += chunk) {
    TestStep step;
    step.add(0, pos, std::min(chunk, kTokens - pos));
    all.append(run(step, lanes(), cache, isa, threads));
  }
  return all;
}

// Rows [first, first + n) of `all`.
Rows part(const Rows& all, int first, int n) {
  const auto cut = [&](const auto& from, int width) {
    return std::decay_t<decltype(from)>(from.begin() + first * width,
                                        from.begin() + (first + n) * width);
  };
  return {cut(all.q, kHeads * kDim), cut(all.iq, kIndexHeads * kIndexDim),
          cut(all.y, kHeads * kDim), cut(all.blocks, kMaxBlocks), cut(all.count, 1)};
}

TEST(AttentionSteps, ChunksThreadsAndInstructionSetsKeepTheBits) {
  Cache whole;
  const Rows want = in_chunks(kTokens, whole, exl3::Isa::kScalar);
  EXPECT_TRUE(std::none_of(want.y.begin(), want.y.end(), [](float x) { return x != x; }));
  EXPECT_EQ(want.count[34], -1);
  EXPECT_EQ(want.count[35], kMaxBlocks);
  for (const int chunk : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 65, 150}) {
    Cache cache;
    EXPECT_TRUE(in_chunks(chunk, cache) == want) << chunk;
    expect_same(cache, whole);
  }
  for (const exl3::Isa isa : kIsas) {
    for (const int threads : {1, 2, 5}) {
      Cache cache;
      EXPECT_TRUE(in_chunks(100, cache, isa, threads) == want);
      expect_same(cache, whole);
    }
  }
}

TEST(AttentionSteps, RowsOfTwoLanesTogetherAreThoseOfEachAlone) {
  Cache apart;
  TestStep first, second;
  first.add(0, 0, 120);
  second.add(1, 0, 77, 1, 1);
  const Rows a = run(first, lanes(), apart);
  const Rows b = run(second, lanes(), apart);
  Cache shared;
  TestStep step;
  step.add(0, 0, 50).add(1, 0, 40, 1, 1);
  const Rows one = run(step, lanes(), shared, exl3::Isa::kAvx512, 2);
  step = TestStep();
  step.add(1, 40, 37, 1, 1).add(0, 50, 70);
  const Rows two = run(step, lanes(), shared, exl3::Isa::kAvx512, 2);
  EXPECT_TRUE(part(one, 0, 50) == part(a, 0, 50));
  EXPECT_TRUE(part(one, 50, 40) == part(b, 0, 40));
  EXPECT_TRUE(part(two, 0, 37) == part(b, 40, 37));
  EXPECT_TRUE(part(two, 37, 70) == part(a, 50, 70));
  expect_same(shared, apart);
}

// A rejected draft leaves rows in the cache; what follows overwrites them and never reads them.
TEST(AttentionSteps, StaleRowsOfARejectedDraftAreNeverSeen) {
  Cache clean;
  const Rows want = in_chunks(kTokens, clean);
  std::vector<Tokens> other = lanes();
  other[0] = Tokens(kTokens, 99);
  Cache cache;
  for (int pos = 0; pos < kTokens;) {
    TestStep draft;  // wrong tokens, over all block edges; the state before them stays
    draft.add(0, pos, std::min(9, kTokens - pos), 0, 2);
    run(draft, other, cache);
    const int keep = std::min(1 + pos % 5, kTokens - pos);
    TestStep step;
    step.add(0, pos, keep);
    ASSERT_TRUE(run(step, lanes(), cache) == part(want, pos, keep)) << pos;
    pos += keep;
  }
  expect_same(cache, clean);
}

}  // namespace
}  // namespace flashnext
