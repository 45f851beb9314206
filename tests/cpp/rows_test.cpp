// Decode steps of many rows on the host device.
#include "tests/cpp/rows_cases.h"

namespace flashnext {
namespace {

using namespace test;

const LaneTexts& texts() {
  static const LaneTexts all = lane_texts(demo_options());
  return all;
}

TEST(Rows, ASessionDecodesAWindowALane) {
  EXPECT_EQ(decode_rows(1), 8);
  EXPECT_EQ(decode_rows(2), 16);
  EXPECT_EQ(decode_rows(3), 24);
  EXPECT_EQ(decode_rows(4), 32);
  EXPECT_EQ(decode_rows(64), 32);
}

// A decode step is one graph at every bucket, with all layers and whatever experts they miss: the
// host is asked nothing in between. A graph more undoes rows of it.
TEST(Rows, MissesAreFoundWithinTheGraph) {
  SessionOptions o = offloaded(demo_options(), kDemoExperts / 4);
  o.lanes = 4;
  o.chunk = kDecodeRows;
  o.window = 512;
  o.cpu_misses = "2";
  o.cpu_threads = 1;
  const auto session = open_demo(o);
  EXPECT_EQ(session->engine().stream(), nullptr);
  EXPECT_EQ(session->engine().counters().graphs, 2 * std::size(kDecodeBuckets));
}

TEST(Rows, Resident) { check_row_counts(demo_options(), texts(), "resident"); }
TEST(Rows, Eager) {
  SessionOptions o = demo_options();
  o.graphs = false;
  check_row_counts(o, texts(), "eager");
}
TEST(Rows, Offloaded) { check_offloaded_row_counts(demo_options(), texts()); }
TEST(Rows, StalledProcessor) { check_stalled_rows(demo_options(), texts()); }
TEST(Rows, Rewinds) {
  check_rewinds_of_many_rows(demo_options(), texts());
  check_rewinds_of_many_rows(offloaded(demo_options(), kDemoTopK + 1), texts());
}

TEST(Rows, OrdersOfExecution) {
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    SessionOptions o = offloaded(demo_options(), kDemoExperts / 4);
    o.seed = seed;
    o.graphs = seed % 2 == 0;
    o.policy = std::make_shared<WildPolicy>();
    o.plan_every = 2;
    o.cpu_misses = seed % 2 == 0 ? "off" : "2";
    o.cpu_threads = 1;
    check_row_counts(o, texts(), "seed " + std::to_string(seed));
  }
}

}  // namespace
}  // namespace flashnext
