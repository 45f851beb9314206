// Sequences as things, on any device: rewind by every count, snapshots, restores.
#pragma once

#include "tests/cpp/demo.h"

#include <gtest/gtest.h>
#include <span>
#include <string>
#include <vector>

namespace flashnext::test {

inline constexpr std::size_t kVocab = 1536;

inline std::vector<float> run(Engine& engine, std::int32_t lane,
                              std::span<const std::int32_t> ids) {
  EXPECT_TRUE(engine.reserve(lane, static_cast<std::int32_t>(ids.size())));
  const LaneRows rows{lane, ids, LaneRows::Logits::kAll, {}};
  std::vector<float> logits;
  for (const StepOutput& out : engine.step({&rows, 1}, true)) {
    logits.insert(logits.end(), out.logits, out.logits + kVocab);
  }
  return logits;
}

// Positions [from, from + n) of a logits matrix.
inline std::vector<float> rows_of(const std::vector<float>& all, std::size_t from, std::size_t n) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(from * kVocab);
  return {begin, begin + static_cast<std::ptrdiff_t>(n * kVocab)};
}

// A window of W rows of which r are kept, at all residues of the position mod 4, over block, page,
// separator and budget edges; then the true continuation must give the bits of a cold run.
inline void check_rewinds(const SessionOptions& base) {
  const auto session = open_demo(base);
  const auto truth = sample_ids(140, 3);
  const std::vector<float> cold = session->logits(truth);
  Engine& engine = engine_of(*session);
  for (const std::size_t start : {1u, 2u, 3u, 17u, 61u, 62u, 63u, 64u, 124u, 125u, 126u, 127u}) {
    engine.reset(0);
    run(engine, 0, std::span(truth).first(start));
    Snapshot before = engine.snapshot(0);
    for (std::size_t window = 2; window <= 8; ++window) {
      for (std::size_t keep = 0; keep <= window; ++keep) {
        ASSERT_TRUE(engine.restore(0, before));
        // The kept rows are true, the rejected ones are wrong drafts.
        std::vector<std::int32_t> rows(truth.begin() + static_cast<std::ptrdiff_t>(start),
                                       truth.begin() + static_cast<std::ptrdiff_t>(start + keep));
        const auto wrong = sample_ids(window - keep, 99);
        rows.insert(rows.end(), wrong.begin(), wrong.end());
        const auto verify = run(engine, 0, rows);
        ASSERT_EQ(rows_of(verify, 0, keep), rows_of(cold, start, keep))
            << start << " " << window << " " << keep;
        engine.rewind(0, static_cast<std::int32_t>(keep));
        ASSERT_EQ(engine.length(0), static_cast<std::int32_t>(start + keep));
        const auto after = run(engine, 0, std::span(truth).subspan(start + keep, 5));
        ASSERT_EQ(after, rows_of(cold, start + keep, 5))
            << "start " << start << " window " << window << " keep " << keep;
      }
    }
    engine.release(before);
  }
}

inline void check_rewind_of_one_lane(const SessionOptions& base) {
  SessionOptions o = base;
  o.lanes = 3;
  const auto session = open_demo(o);
  std::vector<std::vector<std::int32_t>> truth;
  std::vector<std::vector<float>> cold;
  for (std::uint32_t l = 0; l < 3; ++l) {
    truth.push_back(sample_ids(60, 10 + l));
    cold.push_back(session->logits(truth.back()));
  }
  Engine& engine = engine_of(*session);
  for (std::int32_t l = 0; l < 3; ++l) {
    engine.reset(l);
    run(engine, l, std::span(truth[static_cast<std::size_t>(l)]).first(21));
    ASSERT_TRUE(engine.reserve(l, 4));
  }
  const auto wrong = sample_ids(2, 77);
  const std::vector<std::int32_t> a = {truth[0][21], wrong[0], wrong[1]};
  const std::vector<std::int32_t> b = {truth[1][21]};
  const std::vector<std::int32_t> c = {truth[2][21], truth[2][22], wrong[0], wrong[1]};
  const std::vector<LaneRows> rows = {{0, a, LaneRows::Logits::kAll, {}},
                                      {1, b, LaneRows::Logits::kAll, {}},
                                      {2, c, LaneRows::Logits::kAll, {}}};
  engine.step(rows, true);
  engine.rewind(2, 2);
  engine.rewind(0, 1);
  const std::size_t lengths[3] = {22, 22, 23};
  for (std::int32_t l = 0; l < 3; ++l) {
    const auto i = static_cast<std::size_t>(l);
    ASSERT_EQ(engine.length(l), static_cast<std::int32_t>(lengths[i]));
    EXPECT_EQ(run(engine, l, std::span(truth[i]).subspan(lengths[i], 9)),
              rows_of(cold[i], lengths[i], 9))
        << l;
  }
}

inline void check_snapshots(const SessionOptions& base) {
  SessionOptions o = base;
  o.lanes = 2;
  const auto session = open_demo(o);
  const auto truth = sample_ids(200, 4);
  const std::vector<float> cold = session->logits(truth);
  Engine& engine = engine_of(*session);
  for (const std::size_t at : {1u, 5u, 63u, 64u, 65u, 70u, 128u, 131u, 150u}) {
    engine.reset(0);
    run(engine, 0, std::span(truth).first(at));
    Snapshot s = engine.snapshot(0);
    // The first lane goes on with something else, in the same pages.
    run(engine, 0, sample_ids(30, 8));
    ASSERT_TRUE(engine.restore(1, s));
    EXPECT_EQ(run(engine, 1, std::span(truth).subspan(at, 40)), rows_of(cold, at, 40)) << at;
    ASSERT_TRUE(engine.restore(0, s));
    EXPECT_EQ(run(engine, 0, std::span(truth).subspan(at, 40)), rows_of(cold, at, 40)) << at;
    engine.release(s);
    engine.reset(0);
    engine.reset(1);
    engine.state().check_integrity();
    EXPECT_EQ(engine.state().free_pages(), engine.state().num_pages());
  }
}

}  // namespace flashnext::test
