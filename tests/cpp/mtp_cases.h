// The slots of the MTP head, on any device: the same logits whatever steps its sequence came in.
#pragma once

#include "tests/cpp/rewind_cases.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <span>
#include <string>
#include <vector>

namespace flashnext::test {

inline SessionOptions with_mtp(SessionOptions options) {
  options.mtp = true;
  return options;
}

// The token after the first `n` of `ids`, as mtp_step wants it.
inline std::int32_t next_of(const std::vector<std::int32_t>& ids, std::size_t n) {
  return n < ids.size() ? ids[n] : -1;
}

// Windows of drafts of which some rows are kept, over block edges on both sides of the selection
// budget, then mtp_step; with and without knowing the next token.
inline void check_mtp_rewinds(const SessionOptions& base) {
  const auto session = open_demo(with_mtp(base));
  const auto truth = sample_ids(110, 3);
  const std::vector<float> cold = session->mtp_logits(truth);
  Engine& engine = engine_of(*session);
  for (const bool knows_next : {true, false}) {
    engine.reset(0);
    std::vector<float> slots;
    for (std::size_t at = 0, step = 0; at < truth.size(); ++step) {
      const std::size_t window = std::min<std::size_t>(1 + step % 8, truth.size() - at);
      const std::size_t keep = window == 1 ? 1 : step * 5 % (window + 1);
      std::vector<std::int32_t> rows(truth.begin() + static_cast<std::ptrdiff_t>(at),
                                     truth.begin() + static_cast<std::ptrdiff_t>(at + keep));
      const auto wrong = sample_ids(window - keep, 99);
      rows.insert(rows.end(), wrong.begin(), wrong.end());
      run(engine, 0, rows);
      engine.rewind(0, static_cast<std::int32_t>(keep));
      at += keep;
      const std::vector<float> some = engine.mtp_step(0, knows_next ? next_of(truth, at) : -1);
      slots.insert(slots.end(), some.begin(), some.end());
    }
    EXPECT_TRUE(slots == cold) << "next " << knows_next << ", " << slots.size() / kVocab;
  }
}

// Two sequences share steps; a snapshot is restored into the other's lane.
inline void check_mtp_lanes(const SessionOptions& base) {
  SessionOptions o = with_mtp(base);
  o.lanes = 2;
  const auto session = open_demo(o);
  const std::vector<std::int32_t> truth[2] = {sample_ids(90, 3), sample_ids(90, 4)};
  const std::vector<float> cold[2] = {session->mtp_logits(truth[0]), session->mtp_logits(truth[1])};
  Engine& engine = engine_of(*session);
  engine.reset(0);
  std::vector<float> slots[2];
  const auto mtp_step = [&](std::int32_t lane, std::size_t end) {
    const std::vector<float> some = engine.mtp_step(lane, next_of(truth[lane], end));
    slots[lane].insert(slots[lane].end(), some.begin(), some.end());
  };
  constexpr std::size_t kShared = 83;
  for (std::size_t at = 0, n = 1; at < kShared; n = 1 + n % 4) {
    n = std::min(n, kShared - at);
    std::vector<LaneRows> rows;
    for (std::int32_t l = 0; l < 2; ++l) {
      ASSERT_TRUE(engine.reserve(l, static_cast<std::int32_t>(n)));
      rows.push_back({l, std::span(truth[l]).subspan(at, n), LaneRows::Logits::kNone, {}});
    }
    engine.step(rows, false);
    at += n;
    for (const std::int32_t l : {1, 0}) mtp_step(l, at);
  }
  // Each goes on alone, the first in the second's lane.
  Snapshot kept = engine.snapshot(0);
  run(engine, 1, std::span(truth[1]).subspan(kShared));
  mtp_step(1, truth[1].size());
  ASSERT_TRUE(engine.restore(1, kept));
  run(engine, 1, std::span(truth[0]).subspan(kShared));
  const std::vector<float> rest = engine.mtp_step(1, -1);
  slots[0].insert(slots[0].end(), rest.begin(), rest.end());
  engine.release(kept);
  for (std::size_t l = 0; l < 2; ++l) EXPECT_TRUE(slots[l] == cold[l]) << l;
}

// The streams that mtp_step reads are those of the last step: it refuses any other lane's.
inline void check_mtp_order(const SessionOptions& base) {
  SessionOptions o = with_mtp(base);
  o.lanes = 3;
  const auto session = open_demo(o);
  Engine& engine = engine_of(*session);
  const auto refused = [&](std::int32_t lane, const char* why) {
    try {
      engine.mtp_step(lane, 7);
      ADD_FAILURE() << "lane " << lane << " was not refused: " << why;
    } catch (const LogicError& e) {
      const std::string message = e.what();
      EXPECT_NE(message.find("lane " + std::to_string(lane)), std::string::npos) << message;
      EXPECT_NE(message.find(why), std::string::npos) << message;
    }
  };
  const auto ids = sample_ids(6, 1);
  refused(0, "no rows of this lane");
  run(engine, 0, ids);
  run(engine, 2, ids);
  refused(0, "no rows of this lane");  // another lane has stepped since
  refused(1, "no rows of this lane");
  engine.mtp_step(2, -1);
  run(engine, 0, ids);
  refused(0, "not called after every step");
  Snapshot kept = engine.snapshot(2);
  run(engine, 2, ids);
  ASSERT_TRUE(engine.restore(2, kept));
  refused(2, "no rows of this lane");  // the step was not one of the restored sequence
  engine.release(kept);
  engine.reset(0);
  run(engine, 0, ids);
  engine.mtp_step(0, -1);
  EXPECT_THROW(engine.rewind(0, 3), LogicError);
  engine.reset(0);
  refused(0, "no rows of this lane");
}

}  // namespace flashnext::test
