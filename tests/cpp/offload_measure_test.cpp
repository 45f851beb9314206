// Experts in host memory: opening leaves the lines alone, recordings are replayed exactly, and runs
// with given tokens and routing do what they say.
#include "cpp/cache/replay.h"
#include "cpp/checkpoint/synthetic.h"
#include "cpp/session/measure.h"

#include <algorithm>
#include <cstdio>
#include <gtest/gtest.h>
#include <unistd.h>

namespace flashnext {
namespace {

constexpr std::int32_t kLayers = 4, kTopK = 4, kLines = 9;

SessionOptions offload() {
  SessionOptions o;
  o.device = "host";
  o.window = 256;
  o.chunk = 64;
  o.experts = "offload";
  o.cache_lines = kLines;
  o.cpu_misses = "off";
  o.lockstep = true;
  o.forced_routing = true;
  return o;
}

std::unique_ptr<Session> open(const SessionOptions& options) {
  const SyntheticOptions pool{1, std::size_t{4} << 20};
  return Session::open(Checkpoint::synthetic(tiny_shape(kLayers), pool), options);
}

std::vector<std::int32_t> ids(std::size_t n) {
  std::vector<std::int32_t> out;
  for (std::size_t i = 0; i < n; ++i)
    out.push_back(static_cast<std::int32_t>((i * 7919 + 13) % 1000));
  return out;
}

// Wants another expert in a line of every layer each time it is asked.
class Restless : public cache::Policy {
 public:
  explicit Restless(int* asked) : asked_(asked) {}
  std::string name() const override { return "restless"; }
  std::vector<std::vector<std::int32_t>> initial(const cache::CacheShape& shape,
                                                 std::span<const std::uint64_t> profile) override {
    return cache::make_policy("recency")->initial(shape, profile);
  }
  cache::PlanOutput plan(const cache::PolicyInput& in) override {
    ++*asked_;
    cache::PlanOutput out;
    for (std::int32_t layer = 0; layer < in.shape.layers; ++layer) {
      out.promote.push_back({layer, (in.sequence * 5 + layer) % in.shape.experts});
    }
    return out;
  }

 private:
  int* asked_;
};

std::vector<float> resident_logits(const std::vector<std::int32_t>& prompt) {
  SessionOptions o;
  o.device = "host";
  o.window = 256;
  o.chunk = 64;
  return open(o)->logits(prompt, 1);
}

TEST(OffloadOpen, LeavesTheLinesAsTheyWereFilled) {
  const std::vector<std::int32_t> prompt = ids(24);
  const std::vector<float> expected = resident_logits(prompt);
  for (const std::int32_t chunk : {5, 64}) {
    int asked = 0;
    SessionOptions o = offload();
    o.chunk = chunk;  // 5: the prompt that proves that all fits resolves misses
    o.cpu_misses = "auto";
    o.plan_every = 2;
    o.policy = std::make_shared<Restless>(&asked);
    const auto session = open(o);
    EXPECT_EQ(asked, 0);
    session->check_cache();
    EXPECT_EQ(session->logits(prompt, 1), expected) << "chunk " << chunk;
    EXPECT_GT(asked, 5);
    session->check_cache();
  }
}

TEST(OffloadMeasure, GivenRoutingIsCountedStepByStep) {
  const auto session = open(offload());
  // Two choices by turns, then one for good: eight experts of nine lines.
  std::vector<std::int32_t> routing;
  for (std::int32_t step = 0; step < 2; ++step) {
    for (std::int32_t layer = 0; layer < kLayers; ++layer) {
      for (std::int32_t k = 0; k < kTopK; ++k) routing.push_back(12 + 4 * step + k + layer);
    }
  }
  MeasureOptions o;
  o.new_tokens = 6;
  o.routing = routing;
  const std::vector<std::int32_t> feed = ids(3);
  o.feed = feed;
  const RunTimes times = measure_run(*session, ids(64), o);
  ASSERT_EQ(times.experts.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    const StepExperts& s = times.experts[i];
    EXPECT_EQ(s.hits + s.fetched, std::uint64_t{kLayers * kTopK});
    EXPECT_EQ(s.fetched, i < 2 ? std::uint64_t{kLayers * kTopK} : 0u) << i;
    EXPECT_EQ(s.fetched_bytes, s.fetched * 39168);
  }
  EXPECT_GT(times.streamed_bytes, 0u);

  MeasureOptions hits;
  hits.new_tokens = 5;
  hits.resident_sets = 2;
  for (const StepExperts& s : measure_run(*session, ids(70), hits).experts) {
    EXPECT_EQ(s.hits, std::uint64_t{kLayers * kTopK});
  }
  session->check_cache();
  // Afterwards the model chooses for itself again.
  MeasureOptions plain;
  plain.new_tokens = 8;
  SessionOptions fresh = offload();
  EXPECT_EQ(measure_run(*session, ids(40), plain).tokens,
            measure_run(*open(fresh), ids(40), plain).tokens);
}

TEST(OffloadMeasure, BadRoutingIsRefused) {
  const auto session = open(offload());
  MeasureOptions o;
  std::vector<std::int32_t> routing(static_cast<std::size_t>(kLayers * kTopK), 3);
  routing.back() = 32;
  o.routing = routing;
  EXPECT_THROW(measure_run(*session, ids(4), o), InputError);
  routing.back() = 3;
  o.routing = std::span(routing).first(7);
  EXPECT_THROW(measure_run(*session, ids(4), o), InputError);
  SessionOptions resident = offload();
  resident.experts = "resident";
  resident.cache_lines = 0;
  resident.forced_routing = false;
  const auto other = open(resident);
  o.routing = routing;
  EXPECT_THROW(measure_run(*other, ids(4), o), InputError);
  o.routing = {};
  o.resident_sets = 1;
  EXPECT_THROW(measure_run(*other, ids(4), o), InputError);
}

// The session's own steps at open, and a profile in between, leave nothing that a trace lacks: the
// processor's misses depend on what was seen before.
TEST(OffloadRecord, AReplayGivesTheEnginesOwnCounts) {
  const std::string path = testing::TempDir() + "run-" + std::to_string(getpid()) + ".trace";
  for (const char* misses : {"off", "2"}) {
    int asked = 0;
    SessionOptions o = offload();
    o.chunk = 5;
    o.plan_every = 3;
    o.policy = std::make_shared<Restless>(&asked);
    o.cpu_misses = misses;
    o.cpu_threads = 1;
    o.trace = path;
    o.mtp = true;
    const auto session = open(o);
    MeasureOptions run;
    run.new_tokens = 30;
    measure_run(*session, ids(67), run);
    session->engine().profile(2);
    measure_run(*session, ids(21), run);
    session->mtp_logits(ids(6));
    session->check_cache();
    const std::vector<cache::LayerStats> done = session->cache()->stats();
    cache::ReplayOptions options;
    options.plan_every = 3;
    const std::span<const std::int32_t> share = session->cache()->cpu_of();
    options.cpu_of.assign(share.begin(), share.end());
    EXPECT_GT(session->stop_recording(), 30u);
    EXPECT_THROW(session->stop_recording(), InputError);

    const cache::Trace trace = cache::read_trace(path);
    std::remove(path.c_str());
    const cache::ReplayResult replayed = cache::replay(trace, cache::shape_of(trace.head, kLines),
                                                       std::make_shared<Restless>(&asked), options);
    ASSERT_EQ(replayed.layers.size(), done.size());
    for (std::size_t l = 0; l < done.size(); ++l) {
      EXPECT_EQ(replayed.layers[l].hits, done[l].hits) << l;
      EXPECT_EQ(replayed.layers[l].fetched, done[l].fetched) << l;
      EXPECT_EQ(replayed.layers[l].on_cpu, done[l].on_cpu) << l;
      EXPECT_EQ(replayed.layers[l].promoted, done[l].promoted) << l;
    }
    EXPECT_GT(replayed.sum.promoted, 10u);
    EXPECT_EQ(replayed.sum.on_cpu > 100, *misses == '2');
  }
}

// A profile runs the last step again and again, op by op: none of that is the cache's, and no
// posting is left without workers.
TEST(OffloadProfile, LeavesTheCacheAsItWas) {
  for (const char* misses : {"off", "2"}) {
    SessionOptions o = offload();
    o.cpu_misses = misses;
    o.cpu_threads = 1;
    o.cpu_deadline_seconds = 0.5;
    const auto session = open(o);
    const std::vector<float> want = session->logits(ids(40), 1);
    for (const std::size_t prompt : {std::size_t{5}, std::size_t{40}}) {
      MeasureOptions m;
      m.new_tokens = prompt == 5 ? 3 : 0;  // the last step has one row, or many
      measure_run(*session, ids(prompt), m);
      session->check_cache();  // the books are up to date
      const std::vector<std::uint64_t> total(session->cache()->planner().total().begin(),
                                             session->cache()->planner().total().end());
      session->engine().profile(2);
      session->check_cache();
      EXPECT_EQ(session->cache()->stall(), "");
      EXPECT_TRUE(
          std::equal(total.begin(), total.end(), session->cache()->planner().total().begin()));
      EXPECT_EQ(session->logits(ids(40), 1), want) << misses << ", prompt " << prompt;
    }
  }
}

}  // namespace
}  // namespace flashnext
