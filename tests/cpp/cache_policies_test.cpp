// The built-in policies, by small examples worked out by hand.
#include "cpp/base/errors.h"
#include "cpp/cache/policy.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <set>
#include <string>
#include <vector>

namespace flashnext::cache {
namespace {

// Counters of a small cache that a test fills in.
struct Counters {
  explicit Counters(const CacheShape& s)
      : shape(s),
        recent(size(s.experts), 0),
        total(size(s.experts), 0),
        last(size(s.experts), 0),
        expert_of(size(s.lines), -1) {}
  std::size_t size(std::int32_t width) const {
    return static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(width);
  }
  std::size_t at(std::int32_t layer, std::int32_t expert) const {
    return static_cast<std::size_t>(layer * shape.experts + expert);
  }
  void hold(std::int32_t layer, const std::vector<std::int32_t>& experts) {
    std::copy(experts.begin(), experts.end(), expert_of.begin() + layer * shape.lines);
  }
  PolicyInput input(std::int32_t sequence) const {
    return {shape, sequence, recent, total, last, expert_of};
  }
  CacheShape shape;
  std::vector<std::uint32_t> recent;
  std::vector<std::uint64_t> total;
  std::vector<std::int32_t> last, expert_of;
};

using Lists = std::vector<std::vector<std::int32_t>>;

TEST(Policies, NamesAndUnknownNames) {
  for (const std::string& name : policy_names()) EXPECT_EQ(make_policy(name)->name(), name);
  try {
    make_policy("newest");
    FAIL();
  } catch (const InputError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("newest"), std::string::npos);
    for (const std::string& name : policy_names()) EXPECT_NE(text.find(name), std::string::npos);
  }
}

TEST(Policies, TheFirstFillIsTheProfilesMostUsed) {
  const CacheShape shape{2, 5, 1, 3, 1};
  const std::vector<std::uint64_t> profile = {1, 9, 9, 0, 4, 0, 0, 0, 0, 7};
  for (const std::string& name : policy_names()) {
    EXPECT_EQ(make_policy(name)->initial(shape, profile), (Lists{{1, 2, 4}, {4, 0, 1}})) << name;
    EXPECT_EQ(make_policy(name)->initial(shape, {}), (Lists{{0, 1, 2}, {0, 1, 2}})) << name;
  }
  const CacheShape wide{1, 3, 1, 3, 1};
  EXPECT_EQ(make_policy("recency")->initial(wide, {}), (Lists{{0, 1, 2}}));
}

TEST(Policies, RecencyAndStaticLeaveTheLinesAlone) {
  Counters c({2, 6, 1, 3, 1});
  c.hold(0, {0, 1, 2});
  c.total[4] = 100;
  for (const char* name : {"recency", "static"}) {
    const PlanOutput plan = make_policy(name)->plan(c.input(16));
    EXPECT_TRUE(plan.promote.empty());
    EXPECT_TRUE(plan.evict.empty());
    EXPECT_EQ(plan.install, std::string(name) == "recency");
  }
}

TEST(Policies, FrequencyEvictsTheLeastUsed) {
  Counters c({2, 5, 1, 3, 1});
  c.hold(0, {3, 0, 1});
  c.hold(1, {2, 4, -1});
  c.total = {7, 3, 0, 9, 3, 0, 0, 5, 0, 2};
  c.last.assign(c.last.size(), 20);
  const PlanOutput plan = make_policy("frequency")->plan(c.input(20));
  EXPECT_TRUE(plan.install);
  ASSERT_EQ(plan.evict.size(), 2u);
  // Of equal ones the higher id goes first, since the lower one ranks higher.
  EXPECT_EQ(plan.evict[0], (std::vector<std::int32_t>{2, 4, 1, 0, 3}));
  EXPECT_EQ(plan.evict[1], (std::vector<std::int32_t>{3, 1, 0, 4, 2}));
  EXPECT_TRUE(plan.promote.empty());  // expert 4 does not beat expert 1 by a margin
}

TEST(Policies, FrequencyFadesOldUses) {
  Counters c({1, 3, 1, 2, 1});
  c.hold(0, {0, 1});
  c.total = {40, 11, 30};
  c.last = {100, 100 + 2 * 1024, 100 + 2 * 1024};
  // 40 uses, two half-lives old, are 10.
  const PlanOutput plan = make_policy("frequency")->plan(c.input(100 + 2 * 1024));
  EXPECT_EQ(plan.evict[0], (std::vector<std::int32_t>{0, 1, 2}));
  ASSERT_EQ(plan.promote.size(), 1u);
  EXPECT_EQ(plan.promote[0].expert, 2);
}

TEST(Policies, FrequencyPromotesAFewWithAMargin) {
  Counters c({3, 40, 1, 10, 1});
  c.last.assign(c.last.size(), 50);
  for (std::int32_t layer = 0; layer < 3; ++layer) {
    c.hold(layer, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
    for (std::int32_t e = 0; e < 40; ++e) c.total[c.at(layer, e)] = 100;
  }
  auto policy = make_policy("frequency");
  EXPECT_TRUE(policy->plan(c.input(50)).promote.empty());
  c.total[c.at(1, 30)] = 125;  // a quarter more is not enough
  EXPECT_TRUE(policy->plan(c.input(50)).promote.empty());
  c.total[c.at(1, 30)] = 127;
  c.total[c.at(2, 20)] = 300;
  const PlanOutput two = policy->plan(c.input(50));
  ASSERT_EQ(two.promote.size(), 2u);
  EXPECT_EQ(two.promote[0].layer, 2);  // the larger gain first
  EXPECT_EQ(two.promote[0].expert, 20);
  EXPECT_EQ(two.promote[1].layer, 1);
  EXPECT_EQ(two.promote[1].expert, 30);
  for (std::int32_t e = 10; e < 40; ++e) c.total[c.at(0, e)] = 1000;
  EXPECT_EQ(policy->plan(c.input(50)).promote.size(), 8u);
}

TEST(Policies, FrequencyDoesNotPromoteIntoWhatItHas) {
  Counters c({1, 4, 1, 2, 1});
  c.hold(0, {2, -2});  // a line that is filling
  c.total = {0, 0, 500, 600};
  c.last.assign(4, 3);
  const PlanOutput plan = make_policy("frequency")->plan(c.input(3));
  EXPECT_TRUE(plan.promote.empty());
}

TEST(Policies, RandomTakesTheOldestEighthInAnOrderOfItsOwn) {
  Counters c({2, 64, 1, 24, 1});
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    std::vector<std::int32_t> held;
    for (std::int32_t i = 0; i < 24; ++i) held.push_back(2 * i);
    c.hold(layer, held);
    for (std::int32_t e = 0; e < 64; ++e) c.last[c.at(layer, e)] = 1000 - e;
  }
  auto policy = make_policy("random", 5);
  std::set<std::vector<std::int32_t>> orders;
  for (std::int32_t sequence = 1; sequence <= 60; ++sequence) {
    const PlanOutput plan = policy->plan(c.input(sequence));
    EXPECT_TRUE(plan.install);
    EXPECT_TRUE(plan.promote.empty());
    ASSERT_EQ(plan.evict.size(), 2u);
    for (std::vector<std::int32_t> list : plan.evict) {
      orders.insert(list);
      std::sort(list.begin(), list.end());
      EXPECT_EQ(list, (std::vector<std::int32_t>{42, 44, 46}));
    }
    // From the seed and the step alone: another object says the same, another seed does not.
    EXPECT_EQ(make_policy("random", 5)->plan(c.input(sequence)).evict, plan.evict);
  }
  EXPECT_EQ(orders.size(), 6u);  // every order of three comes up
  int same = 0;
  for (std::int32_t sequence = 1; sequence <= 60; ++sequence) {
    same += make_policy("random", 6)->plan(c.input(sequence)).evict ==
            policy->plan(c.input(sequence)).evict;
  }
  EXPECT_LT(same, 20);
}

}  // namespace
}  // namespace flashnext::cache
