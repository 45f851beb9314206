// Routing traces: what is written comes back, what is broken is named, and made-up traces have the
// skew and the hit rate that was asked for.
#include "cpp/base/errors.h"
#include "cpp/cache/replay.h"
#include "cpp/cache/synthetic_trace.h"
#include "cpp/cache/trace.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace flashnext::cache {
namespace {

namespace fs = std::filesystem;
const TraceHead kHead{3, 10, 2, 4096, 0x1234567890ABCDEFu};

class TraceFile : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (fs::path(::testing::TempDir()) /
             ("trace_" + std::to_string(::getpid()) + "_" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name()))
                .string();
  }
  void TearDown() override { fs::remove(path_); }
  std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  void write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  std::string error() const {
    try {
      read_trace(path_);
      return "";
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find(path_), std::string::npos) << e.what();
      return e.what();
    }
  }
  void expect_error(const std::string& words) const {
    EXPECT_NE(error().find(words), std::string::npos) << error();
  }
  // A prompt, two steps, and a step of the last layer alone.
  void record(TraceWriter& w) const {
    const std::vector<std::int32_t> prompt(3 * 20 * 2, 7);
    w.append(TraceKind::kPrompt, 0, 20, 0, 3, std::span<const std::int32_t>(prompt));
    const std::vector<std::int32_t> two = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1};
    w.append(TraceKind::kStep, 1, 2, 0, 3, std::span<const std::int32_t>(two));
    w.append(TraceKind::kStep, 2, 1, 0, 2, std::span<const std::int32_t>(two).first(4));
    w.append(TraceKind::kStep, 3, 1, 2, 1, std::span<const std::int32_t>(two).last(2));
  }
  std::string path_;
};

TEST_F(TraceFile, ComesBack) {
  {
    TraceWriter w(path_, kHead);
    record(w);
    EXPECT_EQ(w.records(), 4u);
    EXPECT_EQ(w.error(), "");
  }
  const Trace t = read_trace(path_);
  EXPECT_EQ(t.head, kHead);
  ASSERT_EQ(t.records.size(), 4u);
  EXPECT_EQ(t.records[0].kind, TraceKind::kPrompt);
  EXPECT_EQ(t.records[0].rows, 20);
  EXPECT_EQ(t.choices(t.records[0], 2).size(), 40u);
  EXPECT_EQ(t.choices(t.records[0], 2)[39], 7);
  EXPECT_EQ(t.records[1].sequence, 1);
  const auto last = t.choices(t.records[1], 2);
  EXPECT_EQ(std::vector<int>(last.begin(), last.end()), (std::vector<int>{8, 9, 0, 1}));
  EXPECT_EQ(t.records[3].first, 2);
  EXPECT_EQ(t.choices(t.records[3], 0)[1], 1);
  // Written again it is the same file.
  const std::string bytes = read();
  write_trace(path_, t);
  EXPECT_EQ(read(), bytes);
}

TEST_F(TraceFile, IsWholeAtEveryMoment) {
  TraceWriter w(path_, kHead);
  EXPECT_EQ(read_trace(path_).records.size(), 0u);
  record(w);
  w.flush();
  EXPECT_EQ(read_trace(path_).records.size(), 4u);
  // Many records, more than the buffer holds: what is in the file are whole records.
  const std::vector<std::int32_t> big(3 * 1000 * 2, 9);
  for (int i = 0; i < 200; ++i) {
    w.append(TraceKind::kPrompt, 3, 1000, 0, 3, std::span<const std::int32_t>(big));
    if (i % 20 == 0) {
      EXPECT_EQ(error(), "") << i;
    }
  }
  EXPECT_GT(read_trace(path_).records.size(), 50u);
}

TEST_F(TraceFile, EveryDamageIsNoticed) {
  {
    TraceWriter w(path_, kHead);
    record(w);
  }
  const std::string good = read();
  std::set<std::size_t> whole = {48};
  for (const std::size_t ids : {120, 12, 4, 2}) whole.insert(*whole.rbegin() + 24 + 2 * ids + 8);
  ASSERT_EQ(*whole.rbegin(), good.size());
  for (std::size_t n = 0; n < good.size(); ++n) {
    write(good.substr(0, n));
    EXPECT_EQ(error().empty(), whole.count(n) == 1) << n << " bytes";
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x20);
    write(bad);
    EXPECT_NE(error(), "") << "byte " << i;
  }
}

TEST_F(TraceFile, SaysWhatIsWrong) {
  EXPECT_NE(error().find("No such file"), std::string::npos);
  EXPECT_THROW(TraceWriter(path_ + "/no/where", kHead), InputError);
  write("");
  expect_error("not a routing trace");
  {
    TraceWriter w(path_, kHead);
    record(w);
  }
  const std::string good = read();
  write(good.substr(0, 30));
  expect_error("ends within its head");
  write(good.substr(0, good.size() - 3));
  expect_error("record 3 at byte 416 is cut off; 3 whole records stand before it");
  std::string bad = good;
  bad[100] = 'x';
  write(bad);
  expect_error("record 0 at byte 48 is damaged");
  bad = good;
  bad[8] = 3;
  write(bad);
  expect_error("version is 3");
  TraceHead wrong = kHead;
  wrong.top_k = 11;
  EXPECT_THROW(TraceWriter(path_, wrong), InputError);
}

TEST_F(TraceFile, ThatGoesBackInTimeIsRefused) {
  const std::vector<std::int32_t> ids = {1, 2};
  {
    TraceWriter w(path_, kHead);
    w.append(TraceKind::kStep, 5, 1, 0, 1, std::span<const std::int32_t>(ids));
    w.append(TraceKind::kStep, 4, 1, 0, 1, std::span<const std::int32_t>(ids));
  }
  expect_error("back in time");
  {
    TraceWriter w(path_, kHead);
    EXPECT_THROW(w.append(TraceKind::kStep, 1, 1, 3, 1, std::span<const std::int32_t>(ids)),
                 LogicError);
    EXPECT_THROW(w.append(TraceKind::kStep, 1, 2, 0, 1, std::span<const std::int32_t>(ids)),
                 LogicError);
  }
}

TEST_F(TraceFile, AFullDiskEndsTheRecordingNotTheRun) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  TraceWriter w("/dev/full", kHead);
  const std::vector<std::int32_t> ids = {1, 2};
  for (int i = 1; i < 5; ++i) {
    w.append(TraceKind::kStep, i, 1, 0, 1, std::span<const std::int32_t>(ids));
    w.flush();
  }
  EXPECT_NE(w.error().find("/dev/full"), std::string::npos);
}

TEST(SyntheticTrace, HasDistinctChoicesAndTheSkew) {
  SyntheticTraceOptions o;
  o.head = {4, 64, 6, 1, 0};
  o.steps = 500;
  o.rows = 3;
  o.zipf = 1.0;
  o.recency = 0;
  const Trace t = synthetic_trace(o);
  ASSERT_EQ(t.records.size(), 500u);
  std::vector<std::vector<int>> uses(4, std::vector<int>(64, 0));
  for (const TraceRecord& r : t.records) {
    for (int layer = 0; layer < 4; ++layer) {
      const auto ids = t.choices(r, layer);
      for (int row = 0; row < 3; ++row) {
        std::set<int> distinct(ids.begin() + 6 * row, ids.begin() + 6 * row + 6);
        EXPECT_EQ(distinct.size(), 6u);
      }
      for (const int id : ids)
        ++uses[static_cast<std::size_t>(layer)][static_cast<std::size_t>(id)];
    }
  }
  std::set<std::ptrdiff_t> favourites;
  for (std::vector<int>& layer : uses) {
    favourites.insert(std::max_element(layer.begin(), layer.end()) - layer.begin());
    std::sort(layer.rbegin(), layer.rend());
    // Low ranks go as 1 / rank where repetitions within a row hardly matter.
    EXPECT_NEAR(layer[15] / static_cast<double>(layer[31]), 2.0, 0.5);
  }
  EXPECT_GT(favourites.size(), 1u);  // each layer has its own
  EXPECT_EQ(synthetic_trace(o).ids, t.ids);
  o.seed = 2;
  EXPECT_NE(synthetic_trace(o).ids, t.ids);
}

TEST(SyntheticTrace, ReachesHitRates) {
  SyntheticTraceOptions o;
  o.head = {6, 512, 10, 1862400, 0};
  o.steps = 160;
  for (const double want : {0.45, 0.62, 0.75, 0.88}) {
    const TunedTrace t = tuned_trace(o, 115, want);
    EXPECT_NEAR(t.hit_rate, want, 0.005);
    // As the replay sees it, and by counting a list of the last used by hand.
    const ReplayResult r = replay(t.trace, shape_of(t.trace.head, 115), nullptr);
    int hits = 0, uses = 0;
    for (int layer = 0; layer < 6; ++layer) {
      std::vector<int> lru;  // most recent last
      for (int e = 114; e >= 0; --e) lru.push_back(e);
      for (std::size_t step = 0; step < t.trace.records.size(); ++step) {
        std::vector<int> missed;
        const auto ids = t.trace.choices(t.trace.records[step], layer);
        for (const int id : ids) {
          const auto at = std::find(lru.begin(), lru.end(), id);
          const bool hit = at != lru.end();
          if (hit) lru.erase(at);
          if (step >= t.trace.records.size() / 4) hits += hit, ++uses;
        }
        for (const int id : ids) lru.push_back(id);
        if (lru.size() > 115) lru.erase(lru.begin(), lru.end() - 115);
      }
    }
    EXPECT_NEAR(hits / static_cast<double>(uses), t.hit_rate, 0.002);
    EXPECT_EQ(r.steps.size(), 160u);
  }
  EXPECT_THROW(tuned_trace(o, 115, 0.1), InputError);
  o.zipf = -1;
  EXPECT_THROW(synthetic_trace(o), InputError);
}

}  // namespace
}  // namespace flashnext::cache
