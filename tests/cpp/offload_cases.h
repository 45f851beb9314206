// Experts in host memory: whatever the cache does, every logit is what it is with all experts on
// the device. The cases run on any device; the reference is the plainest configuration there, with
// everything resident.
#pragma once

#include "tests/cpp/mtp_cases.h"
#include "tests/cpp/promise_cases.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

namespace flashnext::test {

inline constexpr std::int32_t kDemoExperts = 32;
inline constexpr std::int32_t kDemoTopK = 4;

inline SessionOptions offloaded(const SessionOptions& base, std::int32_t lines) {
  SessionOptions o = base;
  o.experts = "offload";
  o.cache_lines = lines;
  o.cpu_misses = "off";
  return o;
}

// Tears at the cache as no sane policy would: moves experts at random, turns the order of eviction
// about and lets misses pass now and then.
class WildPolicy final : public cache::Policy {
 public:
  std::string name() const override { return "wild"; }
  std::vector<std::vector<std::int32_t>> initial(const cache::CacheShape& shape,
                                                 std::span<const std::uint64_t>) override {
    std::vector<std::vector<std::int32_t>> all;
    for (std::int32_t l = 0; l < shape.layers; ++l) {
      std::vector<std::int32_t> some;
      for (std::int32_t i = 0; i < shape.lines / 2; ++i)
        some.push_back((7 * l + i) % shape.experts);
      all.push_back(some);
    }
    return all;
  }
  cache::PlanOutput plan(const cache::PolicyInput& in) override {
    cache::PlanOutput out;
    for (int i = 0; i < 12; ++i) {
      const cache::Promotion p{next(in.shape.layers), next(in.shape.experts)};
      const bool twice = std::any_of(out.promote.begin(), out.promote.end(), [&](const auto& q) {
        return q.layer == p.layer && q.expert == p.expert;
      });
      if (!twice) out.promote.push_back(p);
    }
    for (std::int32_t l = 0; l < in.shape.layers; ++l) {
      std::vector<std::int32_t> order;
      for (std::int32_t e = next(3); e < in.shape.experts; e += 1 + next(4)) order.push_back(e);
      out.evict.push_back(order);
    }
    out.install = next(3) != 0;
    return out;
  }

 private:
  std::int32_t next(std::int32_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(n));
  }
  std::uint64_t state_ = 1;
};

// Logits of the sample text in steps of `chunk` rows, then the cache looks itself over.
inline void expect_offloaded(const SessionOptions& options, std::int32_t chunk,
                             const std::vector<float>& want, const std::string& what) {
  const auto session = open_demo(options);
  expect_same(session->logits(sample_ids(kTokens, 1), chunk), want, what);
  ASSERT_NE(session->cache(), nullptr);
  session->check_cache();
}

inline void check_cache_sizes(const SessionOptions& base, const std::vector<float>& want) {
  for (const std::int32_t lines : {kDemoExperts, kDemoExperts / 2, kDemoExperts / 4, kDemoTopK}) {
    for (const std::int32_t chunk : {1, 2, 7, 8, 64}) {
      expect_offloaded(offloaded(base, lines), chunk, want,
                       std::to_string(lines) + " lines, chunk " + std::to_string(chunk));
    }
  }
}

inline void check_policies(const SessionOptions& base, const std::vector<float>& want) {
  for (const std::string& name : cache::policy_names()) {
    SessionOptions o = offloaded(base, kDemoExperts / 4);
    o.policy = cache::make_policy(name, 3);
    o.plan_every = 3;
    for (const std::int32_t chunk : {1, 5}) {
      expect_offloaded(o, chunk, want, name + ", chunk " + std::to_string(chunk));
    }
  }
  for (const std::int32_t lines : {kDemoTopK, 11, kDemoExperts}) {
    SessionOptions o = offloaded(base, lines);
    o.policy = std::make_shared<WildPolicy>();
    o.plan_every = 2;
    for (const std::int32_t chunk : {1, 3, 8}) {
      expect_offloaded(o, chunk, want,
                       "wild, " + std::to_string(lines) + " lines, chunk " + std::to_string(chunk));
    }
  }
}

// Misses fetched, computed by the processor, and both in one step.
inline void check_processor(const SessionOptions& base, const std::vector<float>& want) {
  for (const char* misses : {"1", "2", "1000"}) {
    for (const std::int32_t chunk : {1, 4, 8}) {
      SessionOptions o = offloaded(base, kDemoExperts / 4);
      o.cpu_misses = misses;
      o.cpu_threads = 2;
      const auto session = open_demo(o);
      expect_same(session->logits(sample_ids(kTokens, 1), chunk), want,
                  std::string(misses) + " misses to the processor, chunk " + std::to_string(chunk));
      std::uint64_t on_cpu = 0;
      for (const cache::LayerStats& s : session->cache()->stats()) on_cpu += s.on_cpu;
      EXPECT_GT(on_cpu, 0u);
      session->check_cache();
    }
  }
}

inline void check_offload_graphs(const SessionOptions& base, const std::vector<float>& want) {
  for (const bool graphs : {false, true}) {
    SessionOptions o = offloaded(base, kDemoExperts / 4);
    o.graphs = graphs;
    o.cpu_misses = "1";
    o.cpu_threads = 1;
    for (const std::int32_t chunk : {1, 100}) {
      expect_offloaded(o, chunk, want, graphs ? "graphs" : "eager");
    }
  }
}

// A worker that does not answer: the deadline ends the wait, the step is repeated without the
// processor, and no token is lost.
inline void check_stall(const SessionOptions& base, const std::vector<float>& want) {
  SessionOptions o = offloaded(base, kDemoExperts / 4);
  o.cpu_misses = "1000";
  o.cpu_threads = 1;
  o.cpu_deadline_seconds = 0.05;
  const auto session = open_demo(o);
  cache::ExpertCache& cache = *session->cache();
  cache.cpu()->stall(true);
  expect_same(session->logits(sample_ids(kTokens, 1), 1), want, "stalled workers");
  EXPECT_NE(cache.stall().find("rank 0, layer "), std::string::npos) << cache.stall();
  EXPECT_NE(cache.stall().find("sequence "), std::string::npos) << cache.stall();
  session->check_cache();
}

// The MTP head's experts have lines of their own.
inline void check_offload_mtp(const SessionOptions& base) {
  const std::vector<float> want = open_demo(with_mtp(base))->mtp_logits(sample_ids(40, 1));
  for (const char* misses : {"off", "1"}) {
    SessionOptions o = offloaded(with_mtp(base), kDemoTopK + 1);
    o.cpu_misses = misses;
    o.cpu_threads = 1;
    o.chunk = 16;
    const auto session = open_demo(o);
    expect_same(session->mtp_logits(sample_ids(40, 1)), want, std::string("MTP, cpu ") + misses);
    session->check_cache();
  }
}

// A program of the MTP head that is repeated because the processor does not answer.
inline void check_stall_mtp(const SessionOptions& base) {
  const auto ids = sample_ids(120, 1);
  const std::vector<float> want = open_demo(with_mtp(base))->mtp_logits(ids);
  for (const std::size_t stalled_at : {69u, 75u, 81u, 87u, 90u, 96u}) {
    SessionOptions o = offloaded(with_mtp(base), kDemoTopK);
    o.cpu_misses = "1000";
    o.cpu_threads = 1;
    o.cpu_deadline_seconds = 0.05;
    o.chunk = 3;
    const auto session = open_demo(o);
    Engine& engine = engine_of(*session);
    std::vector<float> got;
    for (std::size_t at = 3; at <= ids.size(); at += 3) {
      ASSERT_TRUE(engine.reserve(0, 3));
      const LaneRows rows{0, std::span(ids).subspan(at - 3, 3), LaneRows::Logits::kNone, {}};
      engine.step({&rows, 1}, false);
      if (at == stalled_at) session->cache()->cpu()->stall(true);
      const auto some = engine.mtp_step(0, at < ids.size() ? ids[at] : -1);
      got.insert(got.end(), some.begin(), some.end());
      ASSERT_EQ(session->cache()->stall().empty(), at < stalled_at) << at;
    }
    expect_same(got, want, "MTP, stalled at " + std::to_string(stalled_at));
    session->check_cache();
  }
}

// Many short requests: what was allocated at first is all that ever is.
inline void check_no_leak(const SessionOptions& base, std::uint32_t requests) {
  SessionOptions o = offloaded(base, kDemoExperts / 4);
  o.cpu_misses = "1";
  o.cpu_threads = 1;
  const auto session = open_demo(o);
  const auto bytes = [&session] {
    std::size_t sum = 0;
    for (const Allocated& a : session->device().allocations()) sum += a.bytes;
    return sum;
  };
  const std::size_t before = bytes();
  for (std::uint32_t i = 0; i < requests; ++i) {
    Request r;
    r.prompt = sample_ids(3 + i % 5, i);
    r.max_new_tokens = 2;
    session->generate({&r, 1}, {});
  }
  EXPECT_EQ(bytes(), before);
  session->check_cache();
}

// Rows of several sequences share a step's misses.
inline void check_offload_lanes(const SessionOptions& base) {
  SessionOptions o = offloaded(base, kDemoTopK + 1);
  o.cpu_misses = "1";
  o.cpu_threads = 1;
  check_lanes(o);
}

}  // namespace flashnext::test
