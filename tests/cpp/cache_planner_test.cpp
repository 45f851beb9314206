// The planner: counts, and what becomes of a policy that misbehaves.
#include "cpp/base/errors.h"
#include "cpp/cache/planner.h"

#include <chrono>
#include <functional>
#include <gtest/gtest.h>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace flashnext::cache {
namespace {

using Lists = std::vector<std::vector<std::int32_t>>;
constexpr CacheShape kShape{2, 6, 2, 3, 10};
const std::vector<std::int32_t> kHeld = {0, 1, 2, 0, 1, 2};

class Scripted : public Policy {
 public:
  std::string name() const override { return "scripted"; }
  Lists initial(const CacheShape&, std::span<const std::uint64_t>) override { return first(); }
  PlanOutput plan(const PolicyInput& input) override { return next(input); }
  std::function<Lists()> first = [] { return Lists{{5, 4}, {3}}; };
  std::function<PlanOutput(const PolicyInput&)> next = [](const PolicyInput&) {
    return PlanOutput{};
  };
};

TEST(Planner, ShowsWhatWasUsed) {
  auto policy = std::make_shared<Scripted>();
  std::vector<std::uint64_t> profile(12, 0);
  profile[7] = 40;
  Planner planner(kShape, policy, profile);
  EXPECT_EQ(planner.initial(), (Lists{{5, 4}, {3}}));
  planner.count(0, std::vector<std::int32_t>{1, 2}, 1);
  planner.count_choices(1, std::vector<std::int32_t>{1, 1, 5, 1}, 1);
  planner.count_choices(1, std::vector<std::int32_t>{1, 0}, 2);
  int asked = 0;
  policy->next = [&](const PolicyInput& in) {
    ++asked;
    EXPECT_EQ(in.sequence, 2 * asked);
    const std::vector<std::uint32_t> recent(in.recent.begin(), in.recent.end());
    if (asked == 1) {
      EXPECT_EQ(recent, (std::vector<std::uint32_t>{0, 1, 1, 0, 0, 0, 1, 2, 0, 0, 0, 1}));
    } else {
      EXPECT_EQ(recent, std::vector<std::uint32_t>(12, 0));
    }
    EXPECT_EQ(in.total[7], 42u);
    EXPECT_EQ(in.total[6], 1u);
    EXPECT_EQ(in.last[7], 2);
    EXPECT_EQ(in.last[11], 1);
    EXPECT_EQ(in.last[0], 0);
    EXPECT_EQ(in.expert_of[4], 1);
    PlanOutput out;
    out.install = false;
    return out;
  };
  EXPECT_FALSE(planner.next(2, kHeld).install);
  planner.next(4, kHeld);
  EXPECT_EQ(asked, 2);
  EXPECT_FALSE(planner.fault().has_value());
  EXPECT_EQ(planner.policy_name(), "scripted");
  EXPECT_EQ(planner.total()[7], 42u);
  EXPECT_EQ(planner.plans(), 2u);
}

TEST(Planner, ForgetsTrials) {
  auto policy = std::make_shared<Scripted>();
  std::vector<std::uint64_t> profile(12, 0);
  profile[7] = 40;
  Planner planner(kShape, policy, profile);
  planner.count(1, std::vector<std::int32_t>{1, 2}, 3);
  planner.next(3, kHeld);
  planner.count(1, std::vector<std::int32_t>{1}, 4);
  planner.forget();
  policy->next = [&](const PolicyInput& in) {
    EXPECT_EQ(std::vector<std::uint64_t>(in.total.begin(), in.total.end()), profile);
    for (const std::uint32_t n : in.recent) EXPECT_EQ(n, 0u);
    for (const std::int32_t n : in.last) EXPECT_EQ(n, 0);
    return PlanOutput{};
  };
  planner.next(0, kHeld);
  EXPECT_FALSE(planner.fault().has_value());
}

TEST(Planner, CutsAFirstFillToTheLines) {
  auto policy = std::make_shared<Scripted>();
  policy->first = [] { return Lists{{5, 4, 3, 2, 1}, {}}; };
  Planner planner(kShape, policy);
  EXPECT_EQ(planner.initial(), (Lists{{5, 4, 3}, {}}));
  EXPECT_FALSE(planner.fault().has_value());
}

// A planner whose policy misbehaves once, after 32 steps, and what it says about it.
std::string fault_of(std::function<PlanOutput()> misbehave) {
  auto policy = std::make_shared<Scripted>();
  policy->next = [&](const PolicyInput& in) {
    return in.sequence == 32 ? misbehave() : PlanOutput{{}, {}, false};
  };
  Planner planner(kShape, policy);
  planner.initial();
  EXPECT_FALSE(planner.next(16, kHeld).install);
  EXPECT_FALSE(planner.fault().has_value());
  const PlanOutput plan = planner.next(32, kHeld);
  EXPECT_TRUE(plan.install && plan.promote.empty() && plan.evict.empty());
  if (!planner.fault()) return "no fault";
  EXPECT_EQ(planner.fault()->policy, "scripted");
  EXPECT_EQ(planner.fault()->sequence, 32);
  const std::string message = planner.fault()->message();
  EXPECT_NE(message.find("\"scripted\""), std::string::npos);
  EXPECT_NE(message.find("failed before step 33: "), std::string::npos) << message;
  EXPECT_EQ(planner.policy_name(), "recency");
  EXPECT_TRUE(planner.next(48, kHeld).install);  // and the policy is not asked again
  EXPECT_EQ(planner.fault()->sequence, 32);
  return message;
}

void expect_fault(std::function<PlanOutput()> misbehave, const std::string& words) {
  const std::string message = fault_of(std::move(misbehave));
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

TEST(Planner, ReplacesAPolicyThatThrows) {
  expect_fault([]() -> PlanOutput { throw std::runtime_error("out of ideas"); }, "out of ideas");
  expect_fault([]() -> PlanOutput { throw 3; }, "unknown kind");
}

TEST(Planner, ReplacesAPolicyThatNamesWhatIsNot) {
  expect_fault([] { return PlanOutput{{{2, 0}}, {}, true}; }, "promote[0] names layer 2");
  expect_fault([] { return PlanOutput{{{0, 5}, {-1, 0}}, {}, true}; }, "promote[1] names layer -1");
  expect_fault([] { return PlanOutput{{{0, 6}}, {}, true}; }, "names expert 6");
  expect_fault([] { return PlanOutput{{{0, -1}}, {}, true}; }, "names expert -1");
  expect_fault(
      [] {
        return PlanOutput{{{1, 4}, {1, 4}}, {}, true};
      },
      "promote[1] names expert 4 of layer 1 again");
  expect_fault(
      [] {
        return PlanOutput{{{1, 2}, {1, 3}, {1, 4}, {1, 5}}, {}, true};
      },
      "more experts of layer 1 than the 3 lines");
  expect_fault([] { return PlanOutput{{}, {{0}}, true}; }, "evict has 1 lists");
  expect_fault([] { return PlanOutput{{}, {{0, 1}, {6}}, true}; }, "evict[1] names expert 6");
  expect_fault(
      [] {
        return PlanOutput{{}, {{0, 3, 0}, {}}, true};
      },
      "evict[0] names expert 0 twice");
  EXPECT_EQ(plan_problem(kShape, {{{0, 5}, {1, 5}}, {{0, 1, 2, 3, 4, 5}, {}}, true}), "");
}

TEST(Planner, ReplacesAPolicyWhoseFirstFillIsWrong) {
  const std::vector<std::pair<std::function<Lists()>, std::string>> cases = {
      {[] { return Lists{{0}}; }, "initial gave 1 lists"},
      {[] {
         return Lists{{0}, {6}};
       },
       "initial[1] names expert 6"},
      {[] {
         return Lists{{2, 2}, {}};
       },
       "initial[0] names expert 2 twice"},
      {[]() -> Lists { throw InputError("no"); }, "no"},
  };
  std::vector<std::uint64_t> profile(12, 0);
  profile[5] = 3;
  for (const auto& [first, words] : cases) {
    auto policy = std::make_shared<Scripted>();
    policy->first = first;
    Planner planner(kShape, policy, profile);
    EXPECT_EQ(planner.initial(), (Lists{{5, 0, 1}, {0, 1, 2}}));
    ASSERT_TRUE(planner.fault().has_value());
    const std::string message = planner.fault()->message();
    EXPECT_NE(message.find(words), std::string::npos) << message;
    EXPECT_NE(message.find("failed at the first fill: "), std::string::npos) << message;
  }
}

TEST(Planner, TellsTheFirstPlanFromTheFirstFill) {
  auto policy = std::make_shared<Scripted>();
  policy->next = [](const PolicyInput&) -> PlanOutput { throw std::runtime_error("no"); };
  Planner planner(kShape, policy);
  EXPECT_EQ(planner.initial(), (Lists{{5, 4}, {3}}));
  EXPECT_FALSE(planner.fault().has_value());
  planner.next(0, kHeld);
  ASSERT_TRUE(planner.fault().has_value());
  EXPECT_FALSE(planner.fault()->is_first_fill);
  EXPECT_EQ(planner.fault()->message(),
            "policy \"scripted\" failed before step 1: no; recency took over for the rest of the "
            "run");
}

TEST(Planner, ReplacesAPolicyThatIsTooSlow) {
  using std::chrono::milliseconds;
  auto policy = std::make_shared<Scripted>();
  milliseconds pause{0};
  policy->next = [&](const PolicyInput&) {
    std::this_thread::sleep_for(pause);
    return PlanOutput{{}, {}, false};
  };
  Planner twice(kShape, policy, {}, PlannerOptions{0.05});
  pause = milliseconds(60);
  EXPECT_FALSE(twice.next(16, kHeld).install);  // one hiccup is forgiven
  EXPECT_FALSE(twice.fault().has_value());
  pause = milliseconds(0);
  twice.next(32, kHeld);
  pause = milliseconds(60);
  twice.next(48, kHeld);
  EXPECT_FALSE(twice.fault().has_value());
  EXPECT_FALSE(twice.next(64, kHeld).install);  // its plan came late, but it is a plan
  ASSERT_TRUE(twice.fault().has_value());
  EXPECT_EQ(twice.fault()->sequence, 64);
  EXPECT_NE(twice.fault()->reason.find("the limit is 50.0 ms"), std::string::npos);
  EXPECT_TRUE(twice.next(80, kHeld).install);

  Planner once(kShape, policy, {}, PlannerOptions{0.005});
  once.next(16, kHeld);
  EXPECT_TRUE(once.fault().has_value());
}

TEST(Planner, ItsOwnPolicyIsNeverTooSlow) {
  Planner planner(kShape, nullptr, {}, PlannerOptions{0});
  for (int i = 1; i < 5; ++i) planner.next(i, kHeld);
  EXPECT_FALSE(planner.fault().has_value());
}

TEST(ApplyPlan, SetsOrderAndRuleAndBeginsPromotions) {
  std::vector<Lines> layers(2, Lines(6, 3));
  for (Lines& lines : layers) lines.fill(std::vector<std::int32_t>{0, 1, 2});
  const PlanOutput plan{{{1, 5}, {0, 1}, {1, 4}, {0, 3}}, {{1, 0}, {0}}, false};
  const std::vector<Promoting> begun = apply_plan(plan, layers, 7, 3);
  // Expert 1 of layer 0 has a line; the others take what goes first there.
  ASSERT_EQ(begun.size(), 3u);
  EXPECT_EQ(begun[0].expert, 5);
  EXPECT_EQ(begun[0].line, 2);  // of expert 0
  EXPECT_EQ(begun[1].expert, 4);
  EXPECT_EQ(begun[1].line, 0);  // of expert 2, the lowest line of those left
  EXPECT_EQ(begun[2].layer, 0);
  EXPECT_EQ(begun[2].line, 1);  // of expert 1
  EXPECT_FALSE(layers[0].installs());
  EXPECT_EQ(layers[1].num_filling(), 2);
  EXPECT_EQ(apply_plan({{{0, 4}, {0, 5}}, {}, true}, layers, 8, 1).size(), 1u);
  EXPECT_TRUE(layers[0].installs());
  EXPECT_EQ(layers[0].order()[1], kUnordered);
}

}  // namespace
}  // namespace flashnext::cache
