// Guessed experts on the host device: which are copied ahead, and where a fetch finds their lines.
#include "cpp/base/errors.h"
#include "cpp/device/host_device.h"
#include "cpp/device/host_ops.h"
#include "cpp/gate/cases_offload.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <gtest/gtest.h>
#include <map>
#include <span>

namespace flashnext {
namespace {

using gate::Random;
using gate::z;

constexpr std::int64_t kLine = 512;
constexpr std::int64_t kMs = 1'000'000;

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Guessing {
  std::int32_t rows, max_rows, slots;
  std::vector<std::int32_t> ids, line_of, reachable;  // reachable: empty is null
  std::vector<std::byte> lines = std::vector<std::byte>(kMaxGuesses * kLine);
  std::vector<Fetch> fetches = std::vector<Fetch>(kMaxGuesses, {nullptr, -9, 0});
  std::int32_t num_fetches = 77;
  CacheCounters counters{};

  // The experts that are copied ahead.
  std::vector<std::int32_t> run(std::int32_t most) {
    std::memset(static_cast<void*>(&counters), 0xFF, sizeof counters);
    std::fill(fetches.begin(), fetches.end(), Fetch{nullptr, -9, 0});
    GuessArgs a{};
    a.rows = {&rows, 1, max_rows};
    a.ids = ids.data();
    a.line_of = line_of.data();
    a.reachable = reachable.empty() ? nullptr : reachable.data();
    a.most = &most;
    a.lines = lines.data();
    a.fetches = fetches.data();
    a.num_fetches = &num_fetches;
    a.counters = &counters;
    a.line_bytes = kLine;
    a.experts = static_cast<std::int32_t>(line_of.size());
    a.slots = slots;
    ThreadPool pool(1);
    host::Context context{pool, exl3::Isa::kScalar};
    host::guess(a, context);
    std::vector<std::int32_t> chosen;
    for (std::int32_t i = 0; i < num_fetches; ++i) {
      chosen.push_back(fetches[z(i)].expert);
      EXPECT_EQ(fetches[z(i)].to, lines.data() + i * kLine);
    }
    for (std::int32_t i = num_fetches; i < kMaxGuesses; ++i) {
      EXPECT_EQ(fetches[z(i)].expert, -9) << "written behind the end";
    }
    return chosen;
  }
};

using Ids = std::vector<std::int32_t>;

TEST(HostGuess, TakesTheBestOfEveryRowFirst) {
  Guessing g{2, 3, 3, {4, 1, 9, /**/ 4, 7, 2, /**/ -5, -5, -5}, Ids(10, -1), {}};
  EXPECT_EQ(g.run(kMaxGuesses), (Ids{4, 1, 7, 9, 2}));
  g.line_of[1] = 0;  // line 0 is a line
  EXPECT_EQ(g.run(kMaxGuesses), (Ids{4, 7, 9, 2}));
  g.reachable = Ids(10, 1);
  g.reachable[7] = 0;
  EXPECT_EQ(g.run(kMaxGuesses), (Ids{4, 9, 2}));
  EXPECT_EQ(g.run(2), (Ids{4, 9}));
  EXPECT_EQ(g.run(1), (Ids{4}));
  EXPECT_EQ(g.run(0), Ids{});
  g.rows = 1;  // the second row is no row now
  EXPECT_EQ(g.run(kMaxGuesses), (Ids{4, 9}));
  g.line_of.assign(10, 3);
  EXPECT_EQ(g.run(kMaxGuesses), Ids{});
}

TEST(HostGuess, WritesAllOfItsCounters) {
  Guessing g{1, 1, 10, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, Ids(10, -1), {}};
  const std::int64_t before = now_ns();
  EXPECT_EQ(g.run(kMaxGuesses), (Ids{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(g.counters.guessed, 8);
  EXPECT_GE(g.counters.resolved_at, before);
  EXPECT_LE(g.counters.resolved_at, now_ns());
  g.counters.guessed = 0;
  g.counters.resolved_at = 0;
  const CacheCounters zero{};
  EXPECT_EQ(std::memcmp(&g.counters, &zero, sizeof zero), 0);
  EXPECT_THROW(g.run(kMaxGuesses + 1), LogicError);
  EXPECT_THROW(g.run(-1), LogicError);
}

// Against the rule said the other way round: experts by the place of their first appearance.
TEST(HostGuess, KeepsTheRuleOnRandomIds) {
  Random random(5);
  for (int round = 0; round < 500; ++round) {
    const std::int32_t rows = 1 + random.below(8), slots = 1 + random.below(12);
    const std::int32_t experts = 1 + random.below(round % 2 == 0 ? 20 : 200);
    Guessing g{rows, 8, slots, {}, {}, {}};
    for (std::int32_t i = 0; i < 8 * slots; ++i) g.ids.push_back(random.below(experts));
    for (std::int32_t e = 0; e < experts; ++e) {
      g.line_of.push_back(random.below(3) - 1);
      if (round % 3 != 0) g.reachable.push_back(random.below(4));
    }
    std::map<std::int32_t, std::int32_t> place;  // of an expert
    for (std::int32_t row = 0; row < rows; ++row) {
      for (std::int32_t slot = 0; slot < slots; ++slot) {
        const std::int32_t at = slot * 1000 + row;
        const auto [it, fresh] = place.emplace(g.ids[z(row * slots + slot)], at);
        if (!fresh) it->second = std::min(it->second, at);
      }
    }
    std::map<std::int32_t, std::int32_t> by_place;
    for (const auto& [expert, at] : place) {
      const bool there = g.line_of[z(expert)] != -1;
      const bool reachable = g.reachable.empty() || g.reachable[z(expert)] > 0;
      if (!there && reachable) by_place[at] = expert;
    }
    const std::int32_t most = random.below(kMaxGuesses + 1);
    Ids want;
    for (const auto& [at, expert] : by_place) {
      if (static_cast<std::int32_t>(want.size()) < most) want.push_back(expert);
    }
    ASSERT_EQ(g.run(most), want) << "round " << round;
    EXPECT_EQ(g.counters.guessed, static_cast<std::int32_t>(want.size()));
  }
}

// A bank in which the line of expert e holds e + 1, and lines ahead that hold e + 101.
struct Fetching {
  std::vector<std::byte> bank = std::vector<std::byte>(20 * kLine);
  std::vector<std::byte> there = std::vector<std::byte>(kMaxGuesses * kLine);
  std::vector<std::byte> to = std::vector<std::byte>(20 * kLine);
  std::vector<Fetch> fetches, ahead;
  CacheCounters counters{}, ahead_counters{};

  Fetching(const Ids& wanted, const Ids& guessed) {
    ahead.reserve(kMaxGuesses);  // not null when there are none
    for (std::size_t i = 0; i < bank.size(); ++i) bank[i] = std::byte(i / kLine + 1);
    for (const std::int32_t e : wanted) {
      fetches.push_back({to.data() + (19 - z(e)) * kLine, e, 0});
    }
    for (const std::int32_t e : guessed) {
      std::byte* line = there.data() + ahead.size() * kLine;
      std::fill_n(line, kLine, std::byte(e + 101));
      ahead.push_back({line, e, 0});
    }
    counters = {1, 2, 3, 4, 55, 66, 0, 7, now_ns()};
    ahead_counters.resolved_at = counters.resolved_at - kMs;
  }
  void run(std::int64_t ns_per_line = 0, bool guesses = true) {
    const auto count = static_cast<std::int32_t>(fetches.size());
    const auto num_ahead = static_cast<std::int32_t>(ahead.size());
    FetchArgs a{};
    a.fetches = fetches.data();
    a.count = &count;
    a.bank = bank.data();
    a.counters = &counters;
    a.line_bytes = kLine;
    a.ns_per_line = ns_per_line;
    a.max_fetches = 20;
    if (guesses) {
      a.ahead = ahead.data();
      a.num_ahead = &num_ahead;
      a.ahead_counters = &ahead_counters;
    }
    ThreadPool pool(2);
    host::Context context{pool, exl3::Isa::kScalar};
    host::fetch(a, context);
  }
  // What lies where the expert's line goes.
  int value(std::int32_t expert) const {
    const std::byte* line = to.data() + (19 - z(expert)) * kLine;
    const bool whole = std::all_of(line, line + kLine, [&](std::byte b) { return b == *line; });
    EXPECT_TRUE(whole) << "expert " << expert;
    return std::to_integer<int>(*line);
  }
};

TEST(HostGuess, FetchTakesALineFromAheadWhenItsExpertWasGuessed) {
  Fetching f({3, 8, 0, 15, 11}, {11, 2, 0, 7});
  f.run();
  EXPECT_EQ(f.value(3), 4);
  EXPECT_EQ(f.value(8), 9);
  EXPECT_EQ(f.value(0), 101);
  EXPECT_EQ(f.value(15), 16);
  EXPECT_EQ(f.value(11), 112);
  for (const std::int32_t e : {1, 2, 4, 7, 19}) EXPECT_EQ(f.value(e), 0) << e;
  EXPECT_EQ(f.counters.guessed, 4);
  EXPECT_EQ(f.counters.guessed_in, 2);
  EXPECT_GT(f.counters.fetch_ns, 0);
  EXPECT_EQ(f.counters.hits + f.counters.fetched + f.counters.installed + f.counters.on_cpu, 10);
  EXPECT_EQ(f.counters.wait_ns, 7);
}

TEST(HostGuess, FetchCountsGuessesAlsoWhenNothingIsMissing) {
  Fetching f({}, {5, 6, 7});
  f.run();
  EXPECT_EQ(f.counters.guessed, 3);
  EXPECT_EQ(f.counters.guessed_in, 0);
  EXPECT_EQ(f.counters.fetch_ns, 0);
  Fetching none({4}, {});
  none.run();
  EXPECT_EQ(none.value(4), 5);
  EXPECT_EQ(none.counters.guessed, 0);
  EXPECT_EQ(none.counters.guessed_in, 0);
  Fetching without({4}, {4});
  without.run(0, false);
  EXPECT_EQ(without.value(4), 5);
  EXPECT_EQ(without.counters.guessed, 55);
  EXPECT_EQ(without.counters.guessed_in, 66);
}

// A played link has only the lines of the bank to carry, and starts when it is done with the guess.
TEST(HostGuess, APlayedLinkCarriesWhatWasNotThere) {
  Fetching f({3, 8, 0, 15}, {15, 8, 0});
  f.run(100 * kMs);
  EXPECT_GE(f.counters.fetch_ns, 100 * kMs);
  EXPECT_LT(f.counters.fetch_ns, 200 * kMs);
  Fetching late({3, 8, 0, 15}, {15, 8, 0});
  late.ahead_counters.fetch_ns = 101 * kMs;  // 100 ms after the resolution
  late.run(100 * kMs);
  EXPECT_GE(late.counters.fetch_ns, 200 * kMs);
  EXPECT_LT(late.counters.fetch_ns, 300 * kMs);
  Fetching all({15, 0}, {0, 15});
  all.run(10'000 * kMs);
  EXPECT_LT(all.counters.fetch_ns, 10'000 * kMs);
}

TEST(HostGuess, FetchRefusesMoreGuessesThanThereMayBe) {
  Fetching f({3}, {});
  f.ahead.resize(kMaxGuesses + 1, {nullptr, 3, 0});
  EXPECT_THROW(f.run(), LogicError);
}

// The gate's case can tell the two sources apart: of its lines just those that were found ahead are
// copies of what lies there.
TEST(HostGuess, TheGatesCaseTellsBankAndAheadApart) {
  const auto device = make_host_device({.threads = 2});
  for (const auto& [count, ahead, found] :
       {std::array{0, 3, 0}, {5, 0, 0}, {5, 8, 0}, {9, 8, 8}, {3, 3, 3}, {40, 8, 4}}) {
    const gate::Case c = gate::fetch_ahead_case(count, ahead, found, kLine);
    const gate::Results results = gate::run(*device, c);
    ASSERT_EQ(results.size(), 3u);
    const auto line = [&](std::size_t output, std::int32_t i) {
      return std::span(results[output]).subspan(z(i * kLine), kLine);
    };
    const auto zero = [](std::byte b) { return b == std::byte{0}; };
    EXPECT_TRUE(std::ranges::all_of(line(0, 0), zero));
    std::int32_t copies = 0;
    for (std::int32_t i = 1; i <= count; ++i) {
      EXPECT_FALSE(std::ranges::all_of(line(0, i), zero));
      for (std::int32_t j = 0; j < ahead; ++j) {
        copies += std::ranges::equal(line(0, i), line(1, j)) ? 1 : 0;
      }
    }
    EXPECT_EQ(copies, found);
    std::int32_t numbers[6];
    ASSERT_EQ(results[2].size(), sizeof numbers);
    std::memcpy(numbers, results[2].data(), sizeof numbers);
    EXPECT_EQ(numbers[4], ahead);
    EXPECT_EQ(numbers[5], found);
  }
}

}  // namespace
}  // namespace flashnext
