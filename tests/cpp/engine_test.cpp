// Sequences as things: rewind, snapshot, restore, pages; and the errors of a step.
#include "tests/cpp/mtp_cases.h"

#include <gtest/gtest.h>

namespace flashnext {
namespace {

using namespace test;

TEST(Rewind, EveryKeptCountOfEveryWindow) { check_rewinds(demo_options()); }
TEST(Rewind, OneLaneOfSeveral) { check_rewind_of_one_lane(demo_options()); }
TEST(Snapshots, RestoreIntoAnotherLaneAtAnyPosition) { check_snapshots(demo_options()); }

TEST(Mtp, SlotsAfterRewinds) { check_mtp_rewinds(demo_options()); }
TEST(Mtp, SlotsOfTwoLanes) { check_mtp_lanes(demo_options()); }
TEST(Mtp, RefusesLanesWithoutRowsInTheLastStep) { check_mtp_order(demo_options()); }

TEST(Mtp, IsNotBuiltUnlessWanted) {
  const auto without = open_demo();
  const auto with = open_demo(with_mtp(demo_options()));
  EXPECT_FALSE(without->engine().has_mtp());
  // A program of the head for every bucket.
  EXPECT_GT(with->engine().counters().graphs, without->engine().counters().graphs);
  EXPECT_GT(with->engine().state().slot_bytes(), without->engine().state().slot_bytes());
  try {
    without->mtp_logits(sample_ids(5, 1));
    FAIL() << "a head that is not there has no logits";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("mtp = true"), std::string::npos) << e.what();
  }
  // The trunk does not know.
  EXPECT_EQ(without->logits(sample_ids(90, 2)), with->logits(sample_ids(90, 2)));
}

TEST(Mtp, SlotsDoNotDependOnChunks) {
  const auto ids = sample_ids(120, 6);
  SessionOptions o = with_mtp(demo_options());
  const auto whole = open_demo(o)->mtp_logits(ids);
  ASSERT_EQ(whole.size(), 119 * kVocab);
  for (const std::int32_t chunk : {1, 5, 64}) {
    o.chunk = chunk;
    EXPECT_EQ(open_demo(o)->mtp_logits(ids), whole) << chunk;
  }
}

TEST(Steps, RefuseBadRowsAndStayUsable) {
  const auto session = open_demo();
  const auto cold = session->logits(sample_ids(10, 1));
  Engine& engine = engine_of(*session);
  ASSERT_TRUE(engine.reserve(0, 10));
  const std::vector<std::int32_t> bad = {5, 1536};
  const LaneRows rows{0, bad, LaneRows::Logits::kAll, {}};
  try {
    engine.step({&rows, 1}, true);
    FAIL() << "an id outside the vocabulary was accepted";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("1536"), std::string::npos) << e.what();
  }
  EXPECT_EQ(run(engine, 0, sample_ids(10, 1)), cold);
}

TEST(Steps, WindowIsABound) {
  SessionOptions o = demo_options();
  o.window = 100;
  const auto session = open_demo(o);
  EXPECT_EQ(session->logits(sample_ids(100, 1)).size(), 100 * kVocab);
  EXPECT_THROW(session->logits(sample_ids(101, 1)), InputError);
  Request r;
  r.prompt = sample_ids(90, 1);
  r.max_new_tokens = 11;
  EXPECT_THROW(session->generate({&r, 1}, {}), InputError);
  r.max_new_tokens = 10;
  EXPECT_EQ(session->generate({&r, 1}, {})[0].tokens.size(), 10u);
}

TEST(Open, RefusesOptionsByName) {
  const auto refused = [](auto change, const char* name) {
    SessionOptions o = demo_options();
    change(o);
    try {
      open_demo(o);
      FAIL() << name << " was accepted";
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  };
  refused([](SessionOptions& o) { o.window = 5000; }, "window");
  refused([](SessionOptions& o) { o.window = -1; }, "window");
  refused([](SessionOptions& o) { o.lanes = 0; }, "lanes");
  refused([](SessionOptions& o) { o.levels = 255; }, "levels");
  refused([](SessionOptions& o) { o.isa = "neon"; }, "isa");
  refused([](SessionOptions& o) { o.device = "gpu"; }, "device");
  refused([](SessionOptions& o) { o.threads = -2; }, "threads");
  refused([](SessionOptions& o) { o.chunk = -1; }, "chunk");
  refused([](SessionOptions& o) { o.snapshots = -1; }, "snapshots");
  refused([](SessionOptions& o) { o.token_limit = 9999; }, "token_limit");
}

TEST(Open, MemoryLimitNamesThePartsAndLeavesNothing) {
  SessionOptions o = demo_options();
  o.memory_limit = 20 << 20;
  try {
    open_demo(o);
    FAIL() << "20 MiB were enough";
  } catch (const OutOfMemory& e) {
    const std::string message = e.what();
    for (const char* part :
         {"weights", "KV pages", "recurrent state", "activations", "snapshots"}) {
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
    }
    EXPECT_NE(message.find(std::to_string(e.bytes())), std::string::npos) << message;
    EXPECT_GT(e.bytes(), std::size_t{20} << 20);
  }
}

}  // namespace
}  // namespace flashnext
