// Lines of one layer: random operations against a model that knows nothing but the rule.
#include "cpp/base/errors.h"
#include "cpp/cache/lines.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace flashnext::cache {
namespace {

// A cache as a list of lines, each with what it holds; everything else is found by looking.
class Model {
 public:
  struct Line {
    std::optional<int> expert;    // ready
    std::optional<int> awaiting;  // filling
    int stamp = 0;
    int changes = 0;
  };
  explicit Model(int lines) : lines(static_cast<std::size_t>(lines)) {}

  int find(int expert) const {
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (lines[i].expert == expert) return static_cast<int>(i);
    }
    return -1;
  }
  int victim(int sequence) const {
    std::vector<std::tuple<int, int, int, int>> keys;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      const Line& l = lines[i];
      const int number = static_cast<int>(i);
      if (l.awaiting) continue;
      if (!l.expert) {
        keys.emplace_back(0, 0, 0, number);
      } else if (sequence == 0 || l.stamp != sequence) {
        const auto place = std::find(evict.begin(), evict.end(), *l.expert) - evict.begin();
        const bool listed = place < static_cast<std::ptrdiff_t>(evict.size());
        keys.emplace_back(listed ? 1 : 2, listed ? static_cast<int>(place) : 0, l.stamp, number);
      }
    }
    return keys.empty() ? -1 : std::get<3>(*std::min_element(keys.begin(), keys.end()));
  }
  StepCounts step(const std::vector<int>& ids, int sequence) {
    std::vector<int> distinct, misses, fetched;
    for (const int id : ids) {
      if (std::find(distinct.begin(), distinct.end(), id) == distinct.end()) distinct.push_back(id);
    }
    StepCounts c;
    for (const int id : distinct) {
      const int line = find(id);
      if (line >= 0) {
        at(line).stamp = sequence;
        ++c.hits;
      } else {
        misses.push_back(id);
      }
    }
    for (const int id : misses) {
      if (unreachable.count(id) == 0) fetched.push_back(id);
    }
    const auto share = static_cast<std::size_t>(cpu_share.empty() ? 0 : cpu_share[fetched.size()]);
    for (std::size_t n = std::min(share, fetched.size()); n > 0; --n) {
      auto coldest = fetched.begin();
      for (auto it = fetched.begin(); it != fetched.end(); ++it) {
        if (seen_at(*it) <= seen_at(*coldest)) coldest = it;
      }
      fetched.erase(coldest);
    }
    for (const int id : distinct) seen[id] = sequence;
    c.on_cpu = static_cast<int>(misses.size() - fetched.size());
    c.fetched = static_cast<int>(fetched.size());
    for (const int id : fetched) {
      const int line = install ? victim(sequence) : -1;
      if (line < 0) continue;
      at(line).expert = id;
      at(line).stamp = sequence;
      ++at(line).changes;
      ++c.installed;
    }
    return c;
  }
  bool awaited(int expert) const {
    return std::any_of(lines.begin(), lines.end(),
                       [expert](const Line& l) { return l.awaiting == expert; });
  }
  int seen_at(int expert) const {
    const auto it = seen.find(expert);
    return it == seen.end() ? 0 : it->second;
  }
  Line& at(int line) { return lines[static_cast<std::size_t>(line)]; }

  std::vector<Line> lines;
  std::vector<int> evict, cpu_share;
  std::set<int> unreachable;
  std::map<int, int> seen;  // experts that steps chose: the last of them
  bool install = true;
};

void expect_same(const Lines& lines, const Model& model) {
  lines.check_integrity();
  for (int i = 0; i < lines.num_lines(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Model::Line& want = model.lines[at];
    const int holds = want.awaiting ? kFillingLine : want.expert.value_or(kFreeLine);
    ASSERT_EQ(lines.expert_of()[at], holds) << "line " << i;
    ASSERT_EQ(lines.state(i), want.awaiting ? LineState::kFilling
                              : want.expert ? LineState::kReady
                                            : LineState::kFree);
    if (holds != kFreeLine) {
      ASSERT_EQ(lines.stamp()[at], want.stamp) << "line " << i;
    }
    ASSERT_EQ(lines.id(i).generation, static_cast<std::uint32_t>(want.changes)) << "line " << i;
  }
  for (int e = 0; e < lines.num_experts(); ++e) {
    ASSERT_EQ(lines.line_of()[static_cast<std::size_t>(e)], model.find(e)) << "expert " << e;
    ASSERT_EQ(lines.seen()[static_cast<std::size_t>(e)], model.seen_at(e)) << "expert " << e;
  }
}

class RandomOperations : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(RandomOperations, GiveWhatTheRuleSays) {
  const auto [experts, num_lines, seed] = GetParam();
  constexpr int kSlots = 4;
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Lines lines(experts, num_lines);
  Model model(num_lines);
  std::vector<std::pair<int, int>> filling;  // line, expert
  int sequence = 0;
  for (int i = 0; i < 4000; ++i) {
    const int what = below(100);
    if (what < 60) {
      const int rows = 1 + below(8);
      std::vector<int> ids;
      for (int k = 0; k < rows * kSlots; ++k)
        ids.push_back(std::min(below(experts), below(experts)));
      ++sequence;
      ASSERT_EQ(lines.resolve(ids.data(), rows, kSlots, sequence), model.step(ids, sequence));
      ASSERT_EQ(lines.resolved().size(), std::set<int>(ids.begin(), ids.end()).size());
    } else if (what < 72) {
      const int expert = below(experts);
      const int spared = below(3) == 0 ? 0 : sequence;
      const int want = model.find(expert) >= 0 || model.awaited(expert) ? -1 : model.victim(spared);
      ASSERT_EQ(lines.begin_fill(expert, spared), want);
      if (want >= 0) {
        model.at(want).expert.reset();
        model.at(want).awaiting = expert;
        model.at(want).stamp = spared;
        ++model.at(want).changes;
        filling.emplace_back(want, expert);
      }
    } else if (what < 84 && !filling.empty()) {
      const auto at = filling.begin() + below(static_cast<int>(filling.size()));
      const auto [line, expert] = *at;
      filling.erase(at);
      model.at(line).awaiting.reset();
      ++model.at(line).changes;
      if (what < 81) {
        const bool lands = model.find(expert) < 0;
        if (lands) model.at(line).expert = expert;
        ASSERT_EQ(lines.finish_fill(line, expert), lands);
      } else {
        lines.abort_fill(line);
      }
    } else if (what < 90) {
      std::vector<int> all(static_cast<std::size_t>(experts));
      for (int e = 0; e < experts; ++e) all[static_cast<std::size_t>(e)] = e;
      std::shuffle(all.begin(), all.end(), random);
      all.resize(static_cast<std::size_t>(below(experts + 1)));
      model.evict = all;
      lines.set_order(all);
    } else if (what < 94) {
      model.install = below(3) != 0;
      lines.set_install(model.install);
    } else if (what < 97) {
      model.cpu_share.clear();
      if (below(2) == 0) model.cpu_share.resize(static_cast<std::size_t>(experts) + 1, 0);
      for (std::size_t m = 1; m < model.cpu_share.size(); ++m) {
        model.cpu_share[m] = below(static_cast<int>(m) + 1);
      }
      lines.set_cpu_share(model.cpu_share);
    } else {
      model.unreachable.clear();
      std::vector<int> reachable(static_cast<std::size_t>(experts), 1);
      for (int k = below(4); k > 0; --k) {
        const int expert = below(experts);
        model.unreachable.insert(expert);
        reachable[static_cast<std::size_t>(expert)] = 0;
      }
      lines.set_reachable(reachable);
    }
    expect_same(lines, model);
    if (HasFatalFailure()) FAIL() << "after operation " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RandomOperations,
                         ::testing::Values(std::tuple(16, 5, 1), std::tuple(16, 16, 2),
                                           std::tuple(40, 12, 3), std::tuple(40, 1, 4),
                                           std::tuple(64, 40, 5), std::tuple(9, 0, 6)));

TEST(Lines, FillPutsTheBestWhereTheyLastLongest) {
  Lines lines(8, 4);
  lines.fill(std::vector<std::int32_t>{5, 2, 7});
  EXPECT_EQ(lines.line_of()[5], 2);
  EXPECT_EQ(lines.line_of()[2], 1);
  EXPECT_EQ(lines.line_of()[7], 0);
  EXPECT_EQ(lines.state(3), LineState::kFree);
  lines.check_integrity();
  // The free line goes first, then the least of the three.
  const std::vector<std::int32_t> ids = {0, 1};
  EXPECT_EQ(lines.resolve(ids.data(), 1, 2, 1), (StepCounts{0, 2, 2, 0}));
  EXPECT_EQ(lines.line_of()[0], 3);
  EXPECT_EQ(lines.line_of()[1], 0);
  EXPECT_EQ(lines.line_of()[7], -1);
}

TEST(Lines, FillForgetsWhatWasSeen) {
  Lines lines(8, 2);
  const std::vector<std::int32_t> share = {0, 0, 1}, early = {6, 7}, late = {7, 5};
  lines.set_cpu_share(share);
  lines.fill(std::vector<std::int32_t>{0, 1});
  lines.resolve(early.data(), 1, 2, 1);
  EXPECT_EQ(lines.seen()[6], 1);
  EXPECT_EQ(lines.seen()[5], 0);
  lines.resolve(late.data(), 1, 2, 2);  // 7 was seen, 5 was not
  EXPECT_GE(lines.line_of()[7], 0);
  EXPECT_EQ(lines.line_of()[5], -1);
  lines.fill(std::vector<std::int32_t>{0, 1});
  for (const std::int32_t seen : lines.seen()) EXPECT_EQ(seen, 0);
}

TEST(Lines, AnIdTellsWhetherTheContentIsStillTheSame) {
  Lines lines(8, 2);
  lines.fill(std::vector<std::int32_t>{0, 1});
  const LineId zero = lines.id(lines.line_of()[0]), one = lines.id(lines.line_of()[1]);
  const std::vector<std::int32_t> ids = {0, 3};
  lines.resolve(ids.data(), 1, 2, 1);
  EXPECT_TRUE(lines.holds(zero));
  EXPECT_FALSE(lines.holds(one));
}

TEST(Lines, AMissThatOvertakesACopyFreesItsLine) {
  Lines lines(8, 3);
  lines.fill(std::vector<std::int32_t>{0, 1, 2});
  const std::int32_t line = lines.begin_fill(6, 0);
  ASSERT_EQ(line, 0);
  EXPECT_EQ(lines.begin_fill(6, 0), -1);  // on its way
  EXPECT_EQ(lines.begin_fill(1, 0), -1);  // has a line
  const std::vector<std::int32_t> ids = {6};
  EXPECT_EQ(lines.resolve(ids.data(), 1, 1, 1), (StepCounts{0, 1, 1, 0}));
  EXPECT_FALSE(lines.finish_fill(line, 6));
  EXPECT_EQ(lines.state(line), LineState::kFree);
  lines.check_integrity();
}

TEST(Lines, WrongCallsAreLogicErrors) {
  Lines lines(4, 2, "layer 7");
  EXPECT_THROW(lines.fill(std::vector<std::int32_t>{0, 1, 2}), LogicError);
  EXPECT_THROW(lines.fill(std::vector<std::int32_t>{1, 1}), LogicError);
  EXPECT_THROW(lines.fill(std::vector<std::int32_t>{4}), LogicError);
  EXPECT_THROW(lines.abort_fill(0), LogicError);
  EXPECT_THROW(lines.begin_fill(4, 0), LogicError);
  ASSERT_EQ(lines.begin_fill(3, 0), 0);
  EXPECT_THROW(lines.finish_fill(0, 2), LogicError);
  EXPECT_THROW(lines.fill(std::vector<std::int32_t>{0}), LogicError);
  try {
    lines.finish_fill(1, 3);
    FAIL();
  } catch (const LogicError& e) {
    EXPECT_NE(std::string(e.what()).find("layer 7"), std::string::npos);
  }
}

TEST(Lines, TheIntegrityCheckSeesWhatIsWrong) {
  const auto broken = [](auto&& damage) {
    Lines lines(6, 3);
    lines.fill(std::vector<std::int32_t>{0, 1, 2});
    lines.check_integrity();
    damage(lines.view());
    EXPECT_THROW(lines.check_integrity(), LogicError);
  };
  broken([](const CacheTables& t) { t.line_of[0] = 0; });
  broken([](const CacheTables& t) { t.line_of[5] = 1; });
  broken([](const CacheTables& t) { t.line_of[1] = -1; });
  broken([](const CacheTables& t) { t.line_of[1] = 3; });
  broken([](const CacheTables& t) { t.expert_of[0] = 0; });
  broken([](const CacheTables& t) { t.expert_of[0] = 9; });
  broken([](const CacheTables& t) { t.expert_of[1] = kFillingLine; });
  broken([](const CacheTables& t) { t.stamp[1] = -4; });
  broken([](const CacheTables& t) { t.seen[5] = -1; });
}

}  // namespace
}  // namespace flashnext::cache
