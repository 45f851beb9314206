// Replay: small traces worked out by hand, and properties of long ones.
#include "cpp/base/errors.h"
#include "cpp/cache/replay.h"
#include "cpp/cache/synthetic_trace.h"

#include <gtest/gtest.h>
#include <stdexcept>
#include <string>
#include <vector>

namespace flashnext::cache {
namespace {

using Lists = std::vector<std::vector<std::int32_t>>;

// One layer of 8 experts, two a token, one row a step.
Trace small(const std::vector<std::vector<std::uint16_t>>& steps) {
  Trace t;
  t.head = {1, 8, 2, 100, 0};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto rows = static_cast<std::int32_t>(steps[i].size() / 2);
    t.add(TraceKind::kStep, static_cast<std::int32_t>(i) + 1, rows, 0, 1, steps[i]);
  }
  return t;
}

std::vector<int> hits(const ReplayResult& r) {
  std::vector<int> out;
  for (const StepReplay& s : r.steps) out.push_back(s.counts.hits);
  return out;
}

TEST(Replay, RecencyByHand) {
  // Three lines hold 0, 1, 2; 2 is in the lowest line and goes first.
  const Trace t = small({{0, 3}, {3, 1}, {2, 0}, {3, 3}, {1, 4, 4, 5}});
  const ReplayResult r = replay(t, shape_of(t.head, 3), nullptr);
  // 1: 0 hits, 3 replaces 2: 3 1 0. 2: both hit. 3: 0 hits, 2 replaces 1 or 3, last used in step 2
  // both, 3 being in the lower line: 2 1 0. 4: 3 replaces 1, unused since step 2: 2 3 0. 5: 1 and 4
  // replace 2 and 0 of step 3, 5 replaces 3 of step 4.
  EXPECT_EQ(hits(r), (std::vector<int>{1, 2, 1, 0, 0}));
  EXPECT_EQ(r.steps[3].counts, (StepCounts{0, 1, 1, 0}));
  EXPECT_EQ(r.steps[4].counts, (StepCounts{0, 3, 3, 0}));
  EXPECT_EQ(r.steps[4].rows, 2);
  EXPECT_EQ(r.sum.hits, 4u);
  EXPECT_EQ(r.sum.fetched, 6u);
  EXPECT_EQ(r.bytes, 600u);
  EXPECT_DOUBLE_EQ(r.hit_rate(), 0.4);
  EXPECT_EQ(r.policy, "recency");
}

TEST(Replay, StaticByHand) {
  const Trace t = small({{0, 3}, {3, 1}, {2, 0}, {3, 3}, {1, 4, 4, 5}});
  ReplayOptions o;
  o.plan_every = 2;
  const ReplayResult r = replay(t, shape_of(t.head, 3), make_policy("static"), o);
  // The first plan comes before the first step: the lines stay 2 1 0.
  EXPECT_EQ(hits(r), (std::vector<int>{1, 1, 2, 0, 1}));
  EXPECT_EQ(r.steps[3].counts, (StepCounts{0, 1, 0, 0}));
  EXPECT_EQ(r.plans, 3u);
}

TEST(Replay, TheProfileFillsTheLines) {
  const Trace t = small({{6, 7}, {6, 7}});
  ReplayOptions o;
  o.profile = {0, 0, 0, 1, 0, 0, 9, 8};
  EXPECT_EQ(hits(replay(t, shape_of(t.head, 3), nullptr, o)), (std::vector<int>{2, 2}));
  EXPECT_EQ(hits(replay(t, shape_of(t.head, 3), nullptr)), (std::vector<int>{0, 2}));
}

// Promotes what it is told to, at the plan after so many steps.
class Promoter : public Policy {
 public:
  std::string name() const override { return "promoter"; }
  Lists initial(const CacheShape& s, std::span<const std::uint64_t> p) override {
    return make_policy("recency")->initial(s, p);
  }
  PlanOutput plan(const PolicyInput& in) override {
    asked.push_back(in.sequence);
    for (const std::uint32_t n : in.recent) recent += n;
    if (in.sequence == 6) throw std::runtime_error("enough");
    PlanOutput out;
    if (in.sequence == 2) out.promote = {{0, 7}, {0, 3}, {0, 6}};
    if (in.sequence == 4) out.evict = {{1}};
    return out;
  }
  std::vector<std::int32_t> asked;
  std::uint64_t recent = 0;
};

TEST(Replay, PromotionsLandBeforeTheNextStep) {
  const Trace t = small({{0, 3}, {3, 1}, {7, 6}, {1, 1}, {4, 1}, {2, 2}, {1, 1}});
  auto policy = std::make_shared<Promoter>();
  ReplayOptions o;
  o.plan_every = 2;
  const ReplayResult r = replay(t, shape_of(t.head, 3), policy, o);
  // Lines 2 1 0 in order of number. 1: 3 1 0 (3 is in line 0). 2: hits. Plan 2: 7 takes the line of
  // 0; 3 has one; 1 and 3 are of step 2, so 6 finds none. 3: 7 hits, 6 replaces 3: 6 1 7. 4: 1
  // hits. Plan 4: 1 is the first to go. 5: 1 hits and is in use, 4 replaces 6 of step 3, line 0: 4
  // 1 7. 6: 2 replaces 1, by the order. Plan 6 fails, recency goes on. 7: 1 is gone; replaces 7.
  EXPECT_EQ(policy->asked, (std::vector<std::int32_t>{0, 2, 4, 6}));
  EXPECT_EQ(policy->recent, 4u + 3 + 3);
  EXPECT_EQ(hits(r), (std::vector<int>{1, 2, 1, 1, 1, 0, 0}));
  EXPECT_EQ(r.sum.promoted, 1u);
  EXPECT_EQ(r.sum.fetched, 5u);
  EXPECT_EQ(r.bytes, 600u);
  ASSERT_TRUE(r.fault.has_value());
  EXPECT_EQ(r.fault->sequence, 6);
  EXPECT_EQ(r.policy, "recency");
  o.max_promotions = 0;
  EXPECT_EQ(replay(t, shape_of(t.head, 3), std::make_shared<Promoter>(), o).sum.promoted, 0u);
}

TEST(Replay, TheProcessorTakesItsShare) {
  const Trace t = small({{0, 3}, {4, 5, 6, 7}});
  ReplayOptions o;
  o.cpu_of = {0, 0, 1, 1, 3, 3, 3, 3, 3};
  const ReplayResult r = replay(t, shape_of(t.head, 3), nullptr, o);
  EXPECT_EQ(r.steps[0].counts, (StepCounts{1, 1, 1, 0}));
  EXPECT_EQ(r.steps[1].counts, (StepCounts{0, 1, 1, 3}));
  EXPECT_EQ(r.bytes, 200u);
}

// What is asked for again gets the one line that time allows a step, wherever it stands.
TEST(Replay, TheProcessorTakesWhatWasSeenLongestAgo) {
  const Trace t = small({{3, 4}, {5, 4}, {4, 6}, {6, 7}, {0, 6}});
  ReplayOptions o;
  o.cpu_of = {0, 0, 1};
  // Lines 1 0 by number. 1: 3 and 4 alike, 3 first, replaces 1: 3 0. 2: 4 seen, 5 not; 4 replaces
  // 0: 3 4. 3: 4 hits, 6 replaces 3: 6 4. 4: 6 hits, 7 replaces 4: 6 7. 5: 6 hits, 0 replaces 7.
  const ReplayResult r = replay(t, shape_of(t.head, 2), nullptr, o);
  EXPECT_EQ(hits(r), (std::vector<int>{0, 0, 1, 1, 1}));
  EXPECT_EQ(r.steps[1].counts, (StepCounts{0, 1, 1, 1}));
  EXPECT_EQ(r.sum.on_cpu, 2u);
}

TEST(Replay, PromptsCountAndLeaveTheLines) {
  Trace t;
  t.head = {2, 8, 2, 100, 0};
  const std::vector<std::uint16_t> prompt = {0, 7, 7, 6, 0, 1};
  t.add(TraceKind::kPrompt, 0, 3, 0, 1, prompt);
  t.add(TraceKind::kPrompt, 0, 3, 1, 1, prompt);
  const std::vector<std::uint16_t> step = {7, 2};
  t.add(TraceKind::kStep, 1, 1, 1, 1, step);
  const ReplayResult r = replay(t, shape_of(t.head, 3), nullptr);
  EXPECT_EQ(r.layers[0].prompt_uses, 4u);
  EXPECT_EQ(r.layers[0].prompt_hits, 2u);
  EXPECT_EQ(r.sum.prompt_uses, 8u);
  EXPECT_EQ(r.layers[0].hits + r.layers[0].fetched, 0u);
  EXPECT_EQ(r.layers[1].hits, 1u);
  EXPECT_EQ(r.layers[1].fetched, 1u);
  EXPECT_EQ(r.bytes, 100u);
}

TEST(Replay, RefusesWhatDoesNotFit) {
  const Trace t = small({{0, 3}});
  EXPECT_THROW(replay(t, shape_of(t.head, 0), nullptr), InputError);
  EXPECT_THROW(replay(t, shape_of(t.head, 9), nullptr), InputError);
  EXPECT_THROW(replay(t, {2, 8, 2, 3, 100}, nullptr), InputError);
  ReplayOptions o;
  o.profile = {1};
  EXPECT_THROW(replay(t, shape_of(t.head, 3), nullptr, o), InputError);
}

TEST(Replay, MoreLinesNeverHurtRecencyAndAllLinesMissNothingTwice) {
  SyntheticTraceOptions o;
  o.head = {3, 64, 6, 1000, 0};
  o.steps = 200;
  o.zipf = 0.9;
  const Trace t = synthetic_trace(o);
  double last = 0;
  for (const std::int32_t lines : {6, 8, 16, 32, 48, 64}) {
    const double rate = replay(t, shape_of(t.head, lines), nullptr).hit_rate();
    EXPECT_GE(rate, last) << lines;
    last = rate;
  }
  EXPECT_EQ(last, 1.0);  // with a line for each the first fill holds them all
  for (const std::string& name : policy_names()) {
    const ReplayResult a = replay(t, shape_of(t.head, 16), make_policy(name, 3));
    const ReplayResult b = replay(t, shape_of(t.head, 16), make_policy(name, 3));
    EXPECT_FALSE(a.fault.has_value()) << name;
    EXPECT_EQ(a.sum.hits, b.sum.hits) << name;
    EXPECT_EQ(a.sum.hits + a.sum.fetched, 200u * 3 * 6) << name;
    EXPECT_EQ(a.bytes, 1000 * (a.sum.fetched + a.sum.promoted)) << name;
    EXPECT_GT(a.hit_rate(), 0.2) << name;
  }
}

}  // namespace
}  // namespace flashnext::cache
