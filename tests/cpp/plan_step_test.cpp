// The rows of a step, planned without an engine.
#include "cpp/base/errors.h"
#include "cpp/sched/plan.h"

#include <gtest/gtest.h>
#include <map>
#include <numeric>

namespace flashnext {
namespace {

constexpr StepBudget kBudget{512, 64, 128};

Waiting decoding() { return {true, 1, 1, false}; }
Waiting prompt(std::int32_t left, std::int32_t until_mark = 0) {
  return {false, left, until_mark > 0 ? until_mark : left, false};
}
Waiting scoring(std::int32_t left) { return {false, left, left, true}; }

std::map<std::size_t, std::int32_t> rows(const std::vector<Waiting>& all,
                                         const StepBudget& budget = kBudget) {
  std::map<std::size_t, std::int32_t> out;
  for (const StepShare& s : plan_step(all, budget)) out[s.sequence] = s.rows;
  return out;
}

using Rows = std::map<std::size_t, std::int32_t>;

TEST(PlanStep, NothingWaits) { EXPECT_TRUE(plan_step({}, kBudget).empty()); }

TEST(PlanStep, EveryDecodingSequenceHasARow) {
  EXPECT_EQ(rows({decoding(), decoding(), decoding()}), (Rows{{0, 1}, {1, 1}, {2, 1}}));
}

TEST(PlanStep, APromptAloneTakesTheWholeStep) {
  EXPECT_EQ(rows({prompt(1000)}), (Rows{{0, 512}}));
  EXPECT_EQ(rows({prompt(100)}), (Rows{{0, 100}}));
}

TEST(PlanStep, BesideADecodingNeighbourItTakesWhatTheWaitAllows) {
  EXPECT_EQ(rows({decoding(), prompt(1000)}), (Rows{{0, 1}, {1, 128}}));
  EXPECT_EQ(rows({prompt(1000), decoding()}), (Rows{{0, 128}, {1, 1}}));
  EXPECT_EQ(rows({prompt(1000), decoding()}, {8, 64, 128}), (Rows{{0, 7}, {1, 1}}));
}

TEST(PlanStep, PartsEndAtMarks) {
  EXPECT_EQ(rows({prompt(1000, 40)}), (Rows{{0, 40}}));
  EXPECT_EQ(rows({prompt(1000, 40), prompt(300)}), (Rows{{0, 40}, {1, 300}}));
}

TEST(PlanStep, TheFirstPromptHasHalfAndShortOnesComeBeforeLongOnes) {
  EXPECT_EQ(rows({prompt(9000), prompt(8000), prompt(60)}), (Rows{{0, 256}, {1, 196}, {2, 60}}));
  // What others do not need is the first one's.
  EXPECT_EQ(rows({prompt(9000), prompt(60)}), (Rows{{0, 452}, {1, 60}}));
}

TEST(PlanStep, RowsWithLogitsAreFew) {
  EXPECT_EQ(rows({scoring(1000)}), (Rows{{0, 64}}));
  EXPECT_EQ(rows({decoding(), scoring(1000)}), (Rows{{0, 1}, {1, 63}}));
  // Without room for its last row's logits a prompt stops before it.
  EXPECT_EQ(rows({scoring(64), prompt(10)}, {512, 64, 128}), (Rows{{0, 64}, {1, 9}}));
}

TEST(PlanStep, MoreThanAStepHoldsIsABug) {
  const std::vector<Waiting> many(9, decoding());
  EXPECT_THROW(plan_step(many, {8, 64, 128}), LogicError);
}

// Whatever waits: a step keeps to its budget, and somebody gets on.
TEST(PlanStep, AlwaysWithinTheBudgetAndNeverIdle) {
  std::uint64_t state = 1;
  const auto below = [&](std::int32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(n));
  };
  for (int round = 0; round < 2000; ++round) {
    std::vector<Waiting> all;
    const StepBudget budget{8 + below(600), 8 + below(100), 1 + below(600)};
    for (int i = below(8); i >= 0; --i) {
      const std::int32_t left = 1 + below(2000);
      const int kind = below(3);
      all.push_back(kind == 0   ? decoding()
                    : kind == 1 ? prompt(left, 1 + below(left))
                                : scoring(left));
    }
    std::int32_t total = 0, outputs = 0, decoders = 0, prompts = 0;
    const auto shares = plan_step(all, budget);
    for (const StepShare& s : shares) {
      const Waiting& w = all[s.sequence];
      ASSERT_GE(s.rows, 1);
      total += s.rows;
      if (w.decoding) {
        ASSERT_EQ(s.rows, 1);
        ++decoders;
        ++outputs;
      } else {
        ASSERT_LE(s.rows, std::min(w.left, w.until_mark));
        prompts += s.rows;
        outputs += w.every_logit ? s.rows : s.rows == w.left ? 1 : 0;
      }
    }
    ASSERT_EQ(decoders, std::count_if(all.begin(), all.end(), [](auto& w) { return w.decoding; }));
    ASSERT_LE(total, budget.rows);
    ASSERT_LE(outputs, budget.outputs);
    if (decoders > 0) {
      ASSERT_LE(prompts, budget.prompt_rows);
    }
    ASSERT_FALSE(shares.empty());
  }
}

}  // namespace
}  // namespace flashnext
