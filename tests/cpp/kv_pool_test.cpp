// One pool of KV pages for all lanes: its size, who gets pages, and answers when they run out.
#include "tests/cpp/request_cases.h"
#include "tests/cpp/rewind_cases.h"

#include <gtest/gtest.h>
#include <string>

namespace flashnext {
namespace {

using namespace test;

constexpr std::int32_t kWindow = 4 * kPageTokens;

const ModelShape& shape() {
  static const Checkpoint checkpoint = Checkpoint::open(demo_path());
  return checkpoint.shape();
}

SessionOptions small_pool(std::int32_t lanes, std::uint64_t pages) {
  SessionOptions o = demo_options();
  o.window = kWindow;
  o.lanes = lanes;
  o.kv_bytes = pages * page_bytes(shape(), false);
  return o;
}

TEST(KvPool, HoldsAWindowAndAQuarterForEveryFurtherLane) {
  EXPECT_EQ(pool_pages(shape(), false, 1, 1, 0), 2);
  EXPECT_EQ(pool_pages(shape(), false, kPageTokens, 3, 0), 4);
  EXPECT_EQ(pool_pages(shape(), false, kPageTokens + 1, 3, 0), 5);
  EXPECT_EQ(pool_pages(shape(), false, 32768, 1, 0), 513);
  EXPECT_EQ(pool_pages(shape(), true, 32768, 8, 0), 512 + 7 * 128 + 1);
}

TEST(KvPool, HasTheBytesThatWereAskedFor) {
  for (const bool mtp : {false, true}) {
    const std::uint64_t page = page_bytes(shape(), mtp);
    EXPECT_EQ(pool_pages(shape(), mtp, kWindow, 1, 5 * page), 5);
    EXPECT_EQ(pool_pages(shape(), mtp, kWindow, 9, 6 * page - 1), 5);
    EXPECT_EQ(pool_pages(shape(), mtp, kWindow, 2, 700 * page), 700);
    try {
      pool_pages(shape(), mtp, kWindow, 1, 5 * page - 1);
      FAIL() << "less than a window was accepted";
    } catch (const InputError& e) {
      const std::string message = e.what();
      for (const std::string& part : {std::string("kv_bytes"), std::to_string(5 * page - 1),
                                      std::to_string(5 * page), std::to_string(kWindow)}) {
        EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
      }
    }
  }
  const auto session = open_demo(small_pool(2, 6));
  EXPECT_EQ(session->engine().state().num_pages(), 6);
  EXPECT_EQ(session->engine().state().bytes_per_page(), page_bytes(shape(), false));
  EXPECT_THROW(open_demo(small_pool(2, 4)), InputError);
}

TEST(KvPool, GivesAllPagesOrNone) {
  const auto session = open_demo(small_pool(3, 6));
  Engine& engine = engine_of(*session);
  const StatePool& pool = engine.state();
  ASSERT_TRUE(engine.reserve(0, 3 * kPageTokens));
  EXPECT_EQ(pool.free_pages(), 3);
  EXPECT_FALSE(engine.reserve(1, 3 * kPageTokens + 1));
  EXPECT_EQ(pool.free_pages(), 3);
  EXPECT_TRUE(engine.reserve(1, 2 * kPageTokens));
  EXPECT_TRUE(engine.reserve(1, kPageTokens));  // they are there already
  EXPECT_TRUE(engine.reserve(2, 1));
  EXPECT_FALSE(engine.reserve(0, kWindow));
  engine.reset(2);
  EXPECT_TRUE(engine.reserve(0, kWindow));
  for (std::int32_t l = 0; l < 3; ++l) engine.reset(l);
  EXPECT_EQ(pool.free_pages(), 6);
  pool.check_integrity();
}

// Four answers that want sixteen pages in a pool of five: sequences are put back and computed
// again, and no token changes.
TEST(KvPool, AnswersOfLanesThatOutgrowItAreThoseOfEachAlone) {
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 4; ++i) {
    Request r;
    r.prompt = sample_ids(70 + 10 * i, 60 + i);
    r.max_new_tokens = kWindow - static_cast<std::int32_t>(r.prompt.size());
    r.sampling.seed = i;
    r.sampling.temperature = 0.8f;
    requests.push_back(r);
  }
  for (const std::int32_t snapshots : {0, 8}) {
    SessionOptions o = small_pool(4, 5);
    o.snapshots = snapshots;
    const auto session = open_demo(o);
    const std::vector<Completion> together = session->generate(requests, {});
    with_engine(*session,
                [&](Engine&) { EXPECT_GT(session->scheduler().counters().preempted, 0u); });
    const auto one = open_demo();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(together[i].tokens, one->generate({&requests[i], 1}, {})[0].tokens) << i;
      EXPECT_EQ(static_cast<std::int32_t>(together[i].tokens.size()), requests[i].max_new_tokens);
    }
    expect_tidy(*session);
  }
}

}  // namespace
}  // namespace flashnext
