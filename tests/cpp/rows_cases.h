// Decode steps of 1 to 32 rows, on any device: whatever the rows of a step, of one sequence or of
// several, every logit is what the sequence gets alone, a token a step; and every such step may be
// rewound.
#pragma once

#include "tests/cpp/offload_cases.h"
#include "tests/cpp/rewind_cases.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <vector>

namespace flashnext::test {

// Every bucket of decode steps, full or not.
inline constexpr std::int32_t kRowCounts[] = {1, 2, 8, 9, 12, 16, 17, 24, 31, 32};
inline constexpr std::size_t kRowTokens = 12;  // of a lane

struct LaneTexts {
  std::vector<std::vector<std::int32_t>> ids;  // (32 lanes)
  std::vector<std::vector<float>> alone;       // their logits, the plainest way
  std::vector<std::int32_t> whole;             // one longer text,
  std::vector<float> whole_alone;              // and its logits
};

inline LaneTexts lane_texts(SessionOptions base) {
  base.graphs = false;
  const auto session = open_demo(base);
  LaneTexts texts;
  for (std::uint32_t l = 0; l < static_cast<std::uint32_t>(kDecodeRows); ++l) {
    texts.ids.push_back(sample_ids(kRowTokens, 40 + l));
    texts.alone.push_back(session->logits(texts.ids.back(), 1));
  }
  texts.whole = sample_ids(kTokens, 1);
  texts.whole_alone = session->logits(texts.whole, 1);
  return texts;
}

// Token `at` of the first `lanes` texts in one step: each lane's logits are those that it gets
// alone.
inline void check_lanes_step(Engine& engine, const LaneTexts& texts, std::int32_t lanes,
                             std::size_t at, const std::string& what) {
  std::vector<LaneRows> rows;
  for (std::int32_t l = 0; l < lanes; ++l) {
    ASSERT_TRUE(engine.reserve(l, 1));
    const auto i = static_cast<std::size_t>(l);
    rows.push_back({l, std::span(texts.ids[i]).subspan(at, 1), LaneRows::Logits::kLast, {}});
  }
  for (const StepOutput& out : engine.step(rows, true)) {
    const std::vector<float>& alone = texts.alone[static_cast<std::size_t>(out.lane)];
    ASSERT_TRUE(std::equal(out.logits, out.logits + kVocab,
                           alone.begin() + static_cast<std::ptrdiff_t>(at * kVocab)))
        << what << ", lane " << out.lane << ", position " << at;
  }
}

// Rows of so many sequences, and so many rows of one.
inline void check_row_counts(SessionOptions options, const LaneTexts& texts,
                             const std::string& what) {
  options.lanes = kDecodeRows;
  options.window = 512;
  const auto session = open_demo(options);
  for (const std::int32_t n : kRowCounts) {
    expect_same(session->logits(texts.whole, n), texts.whole_alone,
                what + ", " + std::to_string(n) + " rows of one sequence");
  }
  Engine& engine = engine_of(*session);
  for (const std::int32_t n : kRowCounts) {
    const std::string step = what + ", " + std::to_string(n) + " rows";
    for (std::size_t at = 0; at < kRowTokens; ++at) {
      ASSERT_NO_FATAL_FAILURE(check_lanes_step(engine, texts, n, at, step));
    }
    for (std::int32_t l = 0; l < n; ++l) engine.reset(l);
  }
  if (session->cache() != nullptr) session->check_cache();
}

// Experts in host memory at every row count: hits and misses, fetched or computed or both.
inline void check_offloaded_row_counts(const SessionOptions& base, const LaneTexts& texts) {
  for (const std::int32_t lines : {kDemoExperts, kDemoExperts / 2, kDemoTopK + 1}) {
    check_row_counts(offloaded(base, lines), texts, std::to_string(lines) + " lines");
  }
  for (const char* misses : {"3", "1000"}) {
    SessionOptions o = offloaded(base, kDemoExperts / 4);
    o.cpu_misses = misses;
    o.cpu_threads = 2;
    check_row_counts(o, texts, std::string(misses) + " misses to the processor");
  }
}

// A step of 32 rows that the processor leaves stalled is repeated without it, from the state before
// it.
inline void check_stalled_rows(const SessionOptions& base, const LaneTexts& texts) {
  SessionOptions o = offloaded(base, kDemoExperts / 4);
  o.lanes = kDecodeRows;
  o.window = 512;
  o.cpu_misses = "1000";
  o.cpu_threads = 1;
  o.cpu_deadline_seconds = 0.05;
  const auto session = open_demo(o);
  Engine& engine = engine_of(*session);
  for (std::size_t at = 0; at < kRowTokens; ++at) {
    if (at == kRowTokens / 2) session->cache()->cpu()->stall(true);
    ASSERT_NO_FATAL_FAILURE(check_lanes_step(engine, texts, kDecodeRows, at, "stalled"));
  }
  EXPECT_NE(session->cache()->stall(), "");
  session->check_cache();
}

// Windows of four lanes in one step, each rewound to its own count; and one window as long as a
// step.
inline void check_rewinds_of_many_rows(SessionOptions options, const LaneTexts& texts) {
  options.lanes = 4;
  options.window = 512;
  const auto session = open_demo(options);
  Engine& engine = engine_of(*session);
  const auto wrong = sample_ids(kDecodeRows, 99);
  const auto drafted = [&](std::size_t start, std::size_t keep, std::size_t window) {
    std::vector<std::int32_t> rows(texts.whole.begin() + static_cast<std::ptrdiff_t>(start),
                                   texts.whole.begin() + static_cast<std::ptrdiff_t>(start + keep));
    rows.insert(rows.end(), wrong.begin(),
                wrong.begin() + static_cast<std::ptrdiff_t>(window - keep));
    return rows;
  };
  for (const std::size_t window : {2u, 3u, 4u, 6u, 8u}) {
    std::vector<std::vector<std::int32_t>> tokens;
    std::vector<std::size_t> start, keep;
    std::vector<LaneRows> rows;
    for (std::size_t l = 0; l < 4; ++l) {
      const auto lane = static_cast<std::int32_t>(l);
      start.push_back(20 + 17 * l);
      keep.push_back(l * window / 3);
      engine.reset(lane);
      run(engine, lane, std::span(texts.whole).first(start[l]));
      ASSERT_TRUE(engine.reserve(lane, static_cast<std::int32_t>(window)));
      tokens.push_back(drafted(start[l], keep[l], window));
    }
    for (std::size_t l = 0; l < 4; ++l) {
      rows.push_back({static_cast<std::int32_t>(l), tokens[l], LaneRows::Logits::kAll, {}});
    }
    engine.step(rows, true);
    for (std::size_t l = 0; l < 4; ++l) {
      engine.rewind(static_cast<std::int32_t>(l), static_cast<std::int32_t>(keep[l]));
    }
    for (std::size_t l = 0; l < 4; ++l) {
      const std::size_t at = start[l] + keep[l];
      ASSERT_EQ(run(engine, static_cast<std::int32_t>(l), std::span(texts.whole).subspan(at, 5)),
                rows_of(texts.whole_alone, at, 5))
          << "windows of " << window << ", lane " << l;
    }
  }
  for (const std::size_t window : {9u, 12u, 17u, 32u}) {
    for (const std::size_t keep : {std::size_t{0}, std::size_t{1}, window / 2, window - 1}) {
      engine.reset(0);
      run(engine, 0, std::span(texts.whole).first(61));
      run(engine, 0, drafted(61, keep, window));
      engine.rewind(0, static_cast<std::int32_t>(keep));
      ASSERT_EQ(run(engine, 0, std::span(texts.whole).subspan(61 + keep, 5)),
                rows_of(texts.whole_alone, 61 + keep, 5))
          << keep << " of " << window;
    }
  }
}

}  // namespace flashnext::test
