// The processor's share of the misses: option, table, choice.
#include "cpp/cache/cpu_share.h"

#include "cpp/base/errors.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <string>

namespace flashnext::cache {
namespace {

using Mode = CpuMisses::Mode;
using Table = std::vector<std::int32_t>;

TEST(CpuShare, ParsesTheOption) {
  EXPECT_EQ(parse_cpu_misses("off").mode, Mode::kOff);
  EXPECT_EQ(parse_cpu_misses("off").most, 0);
  EXPECT_EQ(parse_cpu_misses("0").mode, Mode::kOff);
  EXPECT_EQ(parse_cpu_misses("auto").mode, Mode::kAuto);
  EXPECT_EQ(parse_cpu_misses("4").mode, Mode::kCount);
  EXPECT_EQ(parse_cpu_misses("4").most, 4);
  for (const char* text : {"", "on", "-1", "4.5", " 4", "4 ", "4x", "AUTO", "99999999999", "0x4"}) {
    try {
      parse_cpu_misses(text);
      ADD_FAILURE() << text;
    } catch (const InputError& e) {
      const std::string what = e.what();
      EXPECT_NE(what.find("cpu_misses = \"" + std::string(text) + "\""), std::string::npos) << what;
      EXPECT_NE(what.find("off, auto"), std::string::npos) << what;
    }
  }
}

TEST(CpuShare, Table) {
  EXPECT_EQ(cpu_table(4, 0.0, 100), (Table{0, 0, 0, 0, 0}));
  EXPECT_EQ(cpu_table(4, 1.0, 100), (Table{0, 1, 2, 3, 4}));
  EXPECT_EQ(cpu_table(5, 1.0, 2), (Table{0, 1, 2, 2, 2, 2}));
  EXPECT_EQ(cpu_table(5, 1.0, 0), (Table{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(cpu_table(6, 0.5, 100), (Table{0, 0, 1, 1, 2, 2, 3}));
  // An expert takes the processor 5/3 of a fetch: of four misses a second one would be done after
  // 3.33, later than three fetches; of five that is sooner than four.
  EXPECT_EQ(cpu_table(8, 0.375, 100), (Table{0, 0, 1, 1, 1, 2, 2, 2, 3}));
  // 1/3 each: even a single miss is done sooner than fetched.
  EXPECT_EQ(cpu_table(4, 0.75, 100), (Table{0, 1, 1, 2, 3}));
  // 1/15 each: nine would be done before one is fetched, yet of two or more one is.
  EXPECT_EQ(cpu_table(9, 0.9375, 100), (Table{0, 1, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(cpu_table(0, 0.5, 100), (Table{0}));
  for (int eighths = 0; eighths <= 8; ++eighths) {
    const Table t = cpu_table(80, eighths / 8.0, 37);
    ASSERT_EQ(t.size(), 81u);
    EXPECT_EQ(t[0], 0);
    for (std::size_t m = 1; m < t.size(); ++m) {
      EXPECT_GE(t[m], t[m - 1]);
      EXPECT_LE(t[m], static_cast<std::int32_t>(m));
      EXPECT_LE(t[m], 37);
      if (m > 1 && eighths < 8) {
        EXPECT_LT(t[m], static_cast<std::int32_t>(m));
      }
    }
  }
  EXPECT_THROW(cpu_table(4, 1.5, 4), LogicError);
  EXPECT_THROW(cpu_table(4, -0.1, 4), LogicError);
  EXPECT_THROW(cpu_table(-1, 0.5, 4), LogicError);
  EXPECT_THROW(cpu_table(4, std::nan(""), 4), LogicError);
}

double best(std::vector<ShareTrial> trials) { return best_share(trials); }

TEST(CpuShare, TakesTheFastestWhenItGains) {
  EXPECT_EQ(best({{0, 1.0}, {0.25, 0.8}, {0.5, 0.7}, {0.75, 0.9}, {1, 1.3}}), 0.5);
  EXPECT_EQ(best({{0, 1.0}, {0.25, 0.98}, {0.5, 0.975}}), 0.0);  // less than 3 %
  EXPECT_EQ(best({{0, 1.0}, {0.25, 0.96}, {0.5, 0.98}}), 0.25);
  EXPECT_EQ(best({{0, 1.0}, {0.5, 1.1}, {1, 2.0}}), 0.0);
  EXPECT_EQ(best({{0, 1.0}, {1, 0.2}}), 1.0);
  EXPECT_EQ(best({{0, 1.0}}), 0.0);
  // Equally fast: the lower share, whatever the order.
  EXPECT_EQ(best({{0.5, 0.70}, {0.375, 0.705}, {0, 1.0}, {0.25, 0.72}}), 0.375);
}

TEST(CpuShare, IgnoresWhatIsNoTime) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(best({{0, 1.0}, {0.25, nan}, {0.5, 0.8}, {0.75, 0.0}, {1, -1.0}}), 0.5);
  EXPECT_EQ(best({{0, 1.0}, {0.5, inf}}), 0.0);
  EXPECT_THROW(best({}), LogicError);
  EXPECT_THROW(best({{0.5, 1.0}}), LogicError);
  EXPECT_THROW(best({{0, nan}, {0.5, 1.0}}), LogicError);
}

}  // namespace
}  // namespace flashnext::cache
