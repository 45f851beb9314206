// The rule of resolution against a formulation of its own (lists that are sorted and cut, nothing
// marked on the way), and what must hold of the tables whatever happens.
#include "cpp/device/resolve.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace flashnext {
namespace {

std::size_t z(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Layer {
  std::vector<std::int32_t> line_of, expert_of, stamp, seen, order, cpu_of, reachable;
  std::int32_t rule = 1;

  Layer(std::int32_t experts, std::int32_t lines)
      : line_of(z(experts), -1),
        expert_of(z(lines), kFreeLine),
        stamp(z(lines), 0),
        seen(z(experts), 0),
        order(z(experts), kUnordered) {}
  void hold(std::int32_t line, std::int32_t expert, std::int32_t used_at) {
    expert_of[z(line)] = expert;
    line_of[z(expert)] = line;
    stamp[z(line)] = used_at;
  }
  CacheTables tables() {
    return {line_of.data(),
            expert_of.data(),
            stamp.data(),
            seen.data(),
            order.data(),
            &rule,
            cpu_of.empty() ? nullptr : cpu_of.data(),
            reachable.empty() ? nullptr : reachable.data(),
            static_cast<std::int32_t>(line_of.size()),
            static_cast<std::int32_t>(expert_of.size())};
  }
  std::vector<Resolved> resolve(const std::vector<std::int32_t>& ids, std::int32_t rows,
                                std::int32_t sequence) {
    std::vector<Resolved> out(ids.size());
    const auto slots = static_cast<std::int32_t>(ids.size()) / rows;
    out.resize(z(flashnext::resolve(tables(), ids.data(), rows, slots, sequence, out.data())));
    return out;
  }
};

// What resolve.h says, from the tables before: who goes where. Changes them as it says.
std::vector<Resolved> by_lists(Layer& layer, const std::vector<std::int32_t>& ids,
                               std::int32_t sequence) {
  std::vector<std::int32_t> distinct;
  for (const std::int32_t id : ids) {
    if (std::count(distinct.begin(), distinct.end(), id) == 0) distinct.push_back(id);
  }
  std::vector<std::int32_t> hits, near, far;
  for (const std::int32_t id : distinct) {
    const bool can_be_read = layer.reachable.empty() || layer.reachable[z(id)] != 0;
    (layer.line_of[z(id)] >= 0 ? hits : can_be_read ? near : far).push_back(id);
  }
  std::vector<std::tuple<int, int, int, int>> victims;  // free first, order, stamp, line
  for (std::int32_t line = 0; line < static_cast<std::int32_t>(layer.expert_of.size()); ++line) {
    const std::int32_t held = layer.expert_of[z(line)];
    if (held == kFillingLine || std::count(hits.begin(), hits.end(), held) > 0) continue;
    if (held == kFreeLine) {
      victims.emplace_back(0, 0, 0, line);
    } else if (layer.stamp[z(line)] != sequence) {
      victims.emplace_back(1, layer.order[z(held)], layer.stamp[z(line)], line);
    }
  }
  std::sort(victims.begin(), victims.end());
  if (layer.rule == 0) victims.clear();
  const std::size_t share =
      layer.cpu_of.empty() ? 0 : std::min(near.size(), z(layer.cpu_of[near.size()]));
  // The longest unseen first, of equals the last; those are cut off, the others keep their order.
  std::vector<std::tuple<int, int, std::int32_t>> coldest;
  for (std::size_t i = 0; i < near.size(); ++i) {
    coldest.emplace_back(layer.seen[z(near[i])], -static_cast<int>(i), near[i]);
  }
  std::sort(coldest.begin(), coldest.end());
  for (std::size_t i = 0; i < share; ++i) std::erase(near, std::get<2>(coldest[i]));
  for (const std::int32_t id : distinct) layer.seen[z(id)] = sequence;

  std::map<std::int32_t, Resolved> where;
  for (const std::int32_t id : distinct) where[id] = {id, kGroupCpu, -1, -1};
  for (const std::int32_t id : hits) where[id] = {id, kGroupHit, layer.line_of[z(id)], -1};
  for (std::size_t i = 0; i < near.size(); ++i) {
    const bool installed = i < victims.size();
    where[near[i]] = {near[i], kGroupFetched, installed ? std::get<3>(victims[i]) : -1,
                      installed ? -1 : static_cast<std::int32_t>(i - victims.size())};
  }
  for (const auto& [id, r] : where) {
    if (r.line < 0) continue;
    const std::int32_t old = layer.expert_of[z(r.line)];
    if (old >= 0 && old != id) layer.line_of[z(old)] = -1;
    layer.hold(r.line, id, sequence);
  }
  std::vector<Resolved> out;
  for (const std::int32_t id : distinct) out.push_back(where[id]);
  return out;
}

void expect_same(const std::vector<Resolved>& got, const std::vector<Resolved>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].expert, want[i].expert) << i;
    EXPECT_EQ(got[i].group, want[i].group) << i;
    EXPECT_EQ(got[i].line, want[i].line) << i;
    EXPECT_EQ(got[i].staging, want[i].staging) << i;
  }
}

// line_of and expert_of say the same, and no two experts share a line.
void expect_sound(const Layer& layer) {
  std::int32_t held = 0;
  for (std::size_t e = 0; e < layer.line_of.size(); ++e) {
    const std::int32_t line = layer.line_of[e];
    if (line < 0) continue;
    ++held;
    ASSERT_LT(z(line), layer.expert_of.size());
    EXPECT_EQ(layer.expert_of[z(line)], static_cast<std::int32_t>(e));
  }
  EXPECT_EQ(held, std::count_if(layer.expert_of.begin(), layer.expert_of.end(),
                                [](std::int32_t e) { return e >= 0; }));
}

Layer random_layer(std::mt19937& random, std::int32_t experts, std::int32_t lines) {
  const auto below = [&](std::int32_t n) { return static_cast<std::int32_t>(random() % z(n)); };
  Layer layer(experts, lines);
  std::vector<std::int32_t> ids(z(experts));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  for (std::int32_t line = 0; line < std::min(lines, experts); ++line) {
    const std::int32_t kind = below(8);
    if (kind == 0) layer.expert_of[z(line)] = kFillingLine;
    if (kind > 1) layer.hold(line, ids[z(line)], below(4));
  }
  for (std::int32_t& s : layer.seen) s = below(4);
  for (std::int32_t& o : layer.order) o = below(3) == 0 ? below(6) - 2 : kUnordered;
  layer.rule = below(4) == 0 ? 0 : 1;
  if (below(2) == 0) {
    for (std::int32_t m = 0; m <= 320; ++m) layer.cpu_of.push_back(below(m + 2));
  }
  if (below(2) == 0) {
    for (std::int32_t e = 0; e < experts; ++e) layer.reachable.push_back(below(4) == 0 ? 0 : 1);
  }
  return layer;
}

TEST(Resolve, AgreesWithListsOnRandomLayers) {
  std::mt19937 random(1);
  std::size_t installed = 0, staged = 0, on_cpu = 0, hits = 0;
  for (int round = 0; round < 2000; ++round) {
    // Now and then a step of 32 rows of a model with many experts.
    const bool large = round % 50 == 49;
    const auto experts = static_cast<std::int32_t>(4 + random() % (large ? 509 : 60));
    const auto lines = static_cast<std::int32_t>(random() % (large ? 300 : 40));
    Layer layer = random_layer(random, experts, lines);
    for (std::int32_t sequence = 4; sequence < 9; ++sequence) {
      const auto rows = large ? kDecodeRows : static_cast<std::int32_t>(1 + random() % 8);
      std::vector<std::int32_t> ids(z(rows) * (large ? 10 : 1 + random() % 10));
      for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % z(experts));
      Layer expected = layer;
      const std::vector<Resolved> want = by_lists(expected, ids, sequence);
      const std::vector<std::int32_t> before = layer.expert_of;
      const std::vector<Resolved> got = layer.resolve(ids, rows, sequence);
      expect_same(got, want);
      EXPECT_EQ(layer.line_of, expected.line_of);
      EXPECT_EQ(layer.expert_of, expected.expert_of);
      EXPECT_EQ(layer.stamp, expected.stamp);
      EXPECT_EQ(layer.seen, expected.seen);
      expect_sound(layer);
      std::set<std::int32_t> used, staging;
      for (const Resolved& r : got) {
        hits += r.group == kGroupHit ? 1 : 0;
        on_cpu += r.group == kGroupCpu ? 1 : 0;
        if (r.line >= 0) {
          EXPECT_TRUE(used.insert(r.line).second) << "a line for two experts";
          EXPECT_NE(before[z(r.line)], kFillingLine);
          EXPECT_EQ(layer.expert_of[z(r.line)], r.expert);
          EXPECT_EQ(layer.stamp[z(r.line)], sequence);
          installed += r.group == kGroupFetched ? 1 : 0;
        }
        if (r.staging >= 0) {
          EXPECT_TRUE(staging.insert(r.staging).second);
          ++staged;
        }
      }
      // What a hit uses, nobody takes: it still is there.
      for (const Resolved& r : got) {
        if (r.group == kGroupHit) {
          EXPECT_EQ(before[z(r.line)], r.expert);
        }
      }
      if (::testing::Test::HasFailure()) return;
    }
  }
  // Every kind was seen often.
  for (const std::size_t n : {installed, staged, on_cpu, hits}) EXPECT_GT(n, 1000u);
}

// By hand: three lines, and who goes first.
TEST(Resolve, OrderBeforeAgeAndFreeBeforeBoth) {
  Layer layer(10, 4);
  layer.hold(0, 5, 3);
  layer.hold(1, 6, 1);
  layer.hold(2, 7, 2);
  layer.order[5] = 0;  // the policy gives up 5 first, though it was used last
  expect_same(layer.resolve({1, 2, 3, 4}, 1, 9), {{1, kGroupFetched, 3, -1},  // free
                                                  {2, kGroupFetched, 0, -1},  // ordered
                                                  {3, kGroupFetched, 1, -1},  // longest unused
                                                  {4, kGroupFetched, 2, -1}});
  EXPECT_EQ(layer.line_of, (std::vector<std::int32_t>{-1, 3, 0, 1, 2, -1, -1, -1, -1, -1}));
  EXPECT_EQ(layer.stamp, (std::vector<std::int32_t>{9, 9, 9, 9}));
}

TEST(Resolve, LinesOfTheStepStayAndTheRestPassesThroughStaging) {
  Layer layer(10, 2);
  layer.hold(0, 5, 1);
  layer.hold(1, 6, 2);
  // 6 comes last in the step and still is not given up for 1.
  expect_same(layer.resolve({1, 2, 6}, 1, 3),
              {{1, kGroupFetched, 0, -1}, {2, kGroupFetched, -1, 0}, {6, kGroupHit, 1, -1}});
  // Rows share an expert: it appears once.
  expect_same(layer.resolve({6, 1, 1, 6, 2, 6}, 3, 4),
              {{6, kGroupHit, 1, -1}, {1, kGroupHit, 0, -1}, {2, kGroupFetched, -1, 0}});
}

TEST(Resolve, TheProcessorTakesWhatWasSeenLongestAgoAndTheUnreachable) {
  Layer layer(10, 2);
  layer.cpu_of = {0, 1, 1, 2};
  layer.reachable = std::vector<std::int32_t>(10, 1);
  layer.reachable[4] = 0;
  expect_same(layer.resolve({4, 1, 2, 3}, 1, 1), {{4, kGroupCpu, -1, -1},
                                                  {1, kGroupFetched, 0, -1},
                                                  {2, kGroupCpu, -1, -1},
                                                  {3, kGroupCpu, -1, -1}});
  layer.cpu_of = {9, 9, 9, 9};  // more than there are
  expect_same(layer.resolve({5, 1}, 1, 2), {{5, kGroupCpu, -1, -1}, {1, kGroupHit, 0, -1}});
  // 9 never, 4 and 2 at 1, 5 at 2; 4 is out of reach and does not count among the three.
  EXPECT_EQ(layer.seen, (std::vector<std::int32_t>{0, 2, 1, 1, 1, 2, 0, 0, 0, 0}));
  layer.cpu_of = {0, 1, 1, 2};
  expect_same(layer.resolve({9, 2, 4, 5}, 1, 3), {{9, kGroupCpu, -1, -1},
                                                  {2, kGroupCpu, -1, -1},
                                                  {4, kGroupCpu, -1, -1},
                                                  {5, kGroupFetched, 1, -1}});
  // 9 and 2 were seen at 3 alike: the later goes; 3, at 1, before them.
  expect_same(layer.resolve({3, 2, 9}, 1, 4),
              {{3, kGroupCpu, -1, -1}, {2, kGroupFetched, 0, -1}, {9, kGroupCpu, -1, -1}});
  EXPECT_EQ(layer.seen, (std::vector<std::int32_t>{0, 2, 4, 4, 3, 3, 0, 0, 0, 4}));
}

TEST(Resolve, RefusesIdsThatAreNoExperts) {
  Layer layer(10, 2);
  EXPECT_THROW(layer.resolve({10}, 1, 1), LogicError);
  EXPECT_THROW(layer.resolve({-1}, 1, 1), LogicError);
}

TEST(Resolve, MembersLieWhereTheLayoutSays) {
  const LineLayout layout{{0, 256, 512}, {768, 1024, 1280}, {1536, 1792, 2048}, 2304};
  std::byte line[2304];
  const ExpertRef ref = expert_in_line(layout, line);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(ref.trellis[i], line + 256 * i);
    EXPECT_EQ(ref.suh[i], line + 768 + 256 * i);
    EXPECT_EQ(ref.svh[i], line + 1536 + 256 * i);
  }
}

}  // namespace
}  // namespace flashnext
