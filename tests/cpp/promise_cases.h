// One sequence, one answer: the logits of a position depend on the ids before it and on nothing
// else. The cases run on any device; every comparison is == on fp32 bits, against one reference
// computed in the plainest configuration there.
#pragma once

#include "tests/cpp/demo.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace flashnext::test {

inline constexpr std::size_t kTokens =
    150;  // past the selection budget of 64 and over two page edges

// Op by op, one token at a time: nothing to go wrong.
inline std::vector<float> plain_logits(SessionOptions base) {
  base.graphs = false;
  return open_demo(base)->logits(sample_ids(kTokens, 1), 1);
}

inline void expect_same(const std::vector<float>& got, const std::vector<float>& want,
                        const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], want[i]) << what << ": position " << i / 1536 << ", id " << i % 1536;
  }
}

inline void check_chunks(const SessionOptions& base, const std::vector<float>& want) {
  SessionOptions o = base;
  o.chunk = 4096;
  const auto session = open_demo(o);
  for (const std::int32_t chunk : {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 100, 512, 4096}) {
    expect_same(session->logits(sample_ids(kTokens, 1), chunk), want,
                "chunk " + std::to_string(chunk));
  }
}

inline void check_graphs(const SessionOptions& base, const std::vector<float>& want) {
  for (const bool graphs : {false, true}) {
    SessionOptions o = base;
    o.graphs = graphs;
    expect_same(open_demo(o)->logits(sample_ids(kTokens, 1), 7), want, graphs ? "graphs" : "eager");
  }
}

// Rows of several sequences in one step give what each gives alone.
inline void check_lanes(const SessionOptions& base) {
  SessionOptions o = base;
  o.lanes = 4;
  const auto session = open_demo(o);
  std::vector<std::vector<std::int32_t>> ids;
  std::vector<std::vector<float>> alone;
  for (std::uint32_t l = 0; l < 4; ++l) {
    ids.push_back(sample_ids(90, l + 1));
    alone.push_back(session->logits(ids.back()));
  }
  Engine& engine = engine_of(*session);
  for (std::int32_t l = 0; l < 4; ++l) engine.reset(l);
  // Ragged pieces, so that every mix of segment lengths and buckets occurs.
  const std::size_t pieces[4] = {1, 3, 2, 17};
  std::size_t at[4] = {0, 0, 0, 0};
  std::map<std::pair<std::int32_t, std::int32_t>, std::vector<float>> seen;
  for (int step = 0;; ++step) {
    std::vector<LaneRows> rows;
    for (std::int32_t l = 0; l < 4; ++l) {
      const auto i = static_cast<std::size_t>(l);
      const std::size_t n =
          std::min(pieces[(i + static_cast<std::size_t>(step)) % 4], ids[i].size() - at[i]);
      if (n == 0 || (step + l) % 5 == 4) continue;
      ASSERT_TRUE(engine.reserve(l, static_cast<std::int32_t>(n)));
      rows.push_back({l, std::span(ids[i]).subspan(at[i], n), LaneRows::Logits::kAll, {}});
      at[i] += n;
    }
    if (rows.empty() && std::all_of(at, at + 4, [](std::size_t a) { return a == 90; })) break;
    if (rows.empty()) continue;
    for (const StepOutput& out : engine.step(rows, true)) {
      seen[{out.lane, out.pos}] = {out.logits, out.logits + 1536};
    }
  }
  for (std::int32_t l = 0; l < 4; ++l) {
    for (std::int32_t p = 0; p < 90; ++p) {
      const float* want = alone[static_cast<std::size_t>(l)].data() + p * 1536;
      expect_same(seen.at({l, p}), {want, want + 1536},
                  "lane " + std::to_string(l) + " position " + std::to_string(p));
    }
  }
}

inline void check_prefixes(const SessionOptions& base) {
  SessionOptions o = base;
  const auto warm = open_demo(o);
  o.snapshots = 0;
  const auto cold = open_demo(o);
  std::vector<std::int32_t> prompt = sample_ids(140, 5);
  for (int turn = 0; turn < 4; ++turn) {
    Request r;
    r.prompt = prompt;
    r.max_new_tokens = 20;
    const auto a = warm->generate({&r, 1}, {});
    const auto b = cold->generate({&r, 1}, {});
    EXPECT_EQ(a[0].tokens, b[0].tokens);
    EXPECT_EQ(b[0].reused_tokens, 0);
    if (turn > 0) {
      EXPECT_GT(a[0].reused_tokens, 100);
    }
    // The logits after the reused prefix, not the tokens alone.
    std::size_t start = 0;
    std::vector<float> got;
    with_engine(*warm, [&](Engine& engine) {
      ASSERT_EQ(engine.length(0), 0);
      const Snapshot* kept = warm->scheduler().prefixes().find(prompt);
      ASSERT_NE(kept, nullptr);
      start = kept->ids.size();
      ASSERT_TRUE(engine.restore(0, *kept));
      ASSERT_TRUE(engine.reserve(0, static_cast<std::int32_t>(prompt.size() - start)));
      const LaneRows rows{0, std::span(prompt).subspan(start), LaneRows::Logits::kAll, {}};
      for (const StepOutput& out : engine.step({&rows, 1}, true)) {
        got.insert(got.end(), out.logits, out.logits + 1536);
      }
      engine.reset(0);
    });
    const std::vector<float> all = cold->logits(prompt);
    expect_same(got, {all.begin() + static_cast<std::ptrdiff_t>(start * 1536), all.end()},
                "turn " + std::to_string(turn));
    // The next turn continues the conversation.
    prompt.insert(prompt.end(), a[0].tokens.begin(), a[0].tokens.end());
    const auto more = sample_ids(11, 50 + static_cast<std::uint32_t>(turn));
    prompt.insert(prompt.end(), more.begin(), more.end());
  }
  engine_of(*warm).state().check_integrity();
}

inline void check_sampling(const SessionOptions& base) {
  SessionOptions o = base;
  o.lanes = 3;
  const auto session = open_demo(o);
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 5; ++i) {
    Request r;
    r.prompt = sample_ids(10 + 13 * i, 20 + i);
    r.max_new_tokens = 15 + static_cast<std::int32_t>(i);
    r.sampling.seed = 7 + i;
    r.sampling.temperature = 0.9f;
    r.sampling.top_p = 0.9f;
    r.sampling.top_k = 50;
    requests.push_back(r);
  }
  const auto together = session->generate(requests, {});
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const auto alone = session->generate({&requests[i], 1}, {});
    EXPECT_EQ(alone[0].tokens, together[i].tokens) << i;
    EXPECT_EQ(static_cast<std::int32_t>(alone[0].tokens.size()), requests[i].max_new_tokens);
  }
}

}  // namespace flashnext::test
