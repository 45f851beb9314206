// Requests that come and go, on any device: whatever runs beside a request, and whatever becomes of
// its neighbours, its tokens are those that it gets alone.
#pragma once

#include "tests/cpp/promise_cases.h"

#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace flashnext::test {

// A small generator, so that cases are the same everywhere.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 1) {}
  std::int32_t below(std::int32_t n) {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<std::int32_t>((state_ >> 33) % static_cast<std::uint64_t>(n));
  }
  std::int32_t from(std::int32_t low, std::int32_t high) { return low + below(high - low + 1); }
  bool one_in(std::int32_t n) { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

// Prompts of all lengths, some of which begin alike; all kinds of sampling, limits and stops.
inline Request random_request(Dice& dice, std::int32_t longest_prompt, std::int32_t most_tokens) {
  Request r;
  const auto n = static_cast<std::size_t>(dice.one_in(3) ? dice.from(1, longest_prompt)
                                                         : dice.from(1, longest_prompt / 8));
  if (dice.one_in(2)) {  // one of three beginnings that others share
    const auto shared = static_cast<std::size_t>(20 + 30 * dice.below(3));
    r.prompt = sample_ids(std::min(shared, n), 7);
    if (shared < n) {
      r.marks = {static_cast<std::int32_t>(shared)};
      r.shared_mark = dice.one_in(2) ? static_cast<std::int32_t>(shared) : 0;
    }
  }
  const auto own =
      sample_ids(n - r.prompt.size(), static_cast<std::uint32_t>(dice.from(100, 1 << 20)));
  r.prompt.insert(r.prompt.end(), own.begin(), own.end());
  r.max_new_tokens = dice.from(1, most_tokens);
  if (dice.one_in(2)) {
    r.sampling.temperature = 0.5f + 0.25f * static_cast<float>(dice.below(5));
    r.sampling.seed = static_cast<std::uint64_t>(dice.below(1000));
    r.sampling.top_p = dice.one_in(2) ? 0.9f : 1.0f;
    r.sampling.top_k = dice.one_in(2) ? dice.from(1, 60) : 0;
    r.sampling.min_p = dice.one_in(4) ? 0.02f : 0.0f;
  }
  for (int i = dice.below(3); i > 0; --i) r.stop_ids.push_back(dice.below(1490));
  return r;
}

// Waits until all requests have ended.
inline void finish(Submission& run) {
  while (!run.ended()) run.wait(std::chrono::milliseconds(50));
}

// Waits until something is told of a request; that update is taken.
inline void until_told(Submission& run) {
  while (run.wait(std::chrono::milliseconds(50)).empty()) {
  }
}

inline Completion alone(Session& session, const Request& r) {
  return session.generate({&r, 1}, {}).front();
}

inline bool is_beginning(const std::vector<std::int32_t>& part,
                         const std::vector<std::int32_t>& whole) {
  return part.size() <= whole.size() && std::equal(part.begin(), part.end(), whole.begin());
}

// Nothing runs and nothing is lost: every lane is free, and without snapshots every page.
inline void expect_tidy(Session& session) {
  session.thread().run(EngineThread::When::kAlone, [&] {
    Engine& engine = session.engine();
    EXPECT_EQ(engine.free_lanes(), engine.options().lanes);
    engine.state().check_integrity();
    session.scheduler().prefixes().clear();
    EXPECT_EQ(engine.state().free_pages(), engine.state().num_pages());
    EXPECT_EQ(engine.free_snapshots(), engine.options().snapshots);
  });
  session.check_cache();
}

// `requests` from `threads` threads: waited for, cancelled half way, failing in a callback, dropped
// unread, submitted by threes, and sequences scored between them.
inline void check_stress(const SessionOptions& options, int requests, int threads) {
  Dice dice(11);
  std::vector<Request> asked;
  for (int i = 0; i < requests; ++i) asked.push_back(random_request(dice, 400, 40));
  SessionOptions plain = options;
  plain.lanes = 1;
  plain.snapshots = 0;
  plain.experts = "auto";
  std::vector<std::vector<std::int32_t>> want;
  std::vector<float> scores;
  {
    const auto cold = open_demo(plain);
    for (const Request& r : asked) want.push_back(alone(*cold, r).tokens);
    scores = cold->score(sample_ids(90, 3));
  }
  const auto session = open_demo(options);
  std::atomic<int> next{0};
  std::atomic<int> whole{0}, cancelled{0}, failed{0};
  const auto work = [&](std::uint64_t seed) {
    Dice mine(seed);
    for (int i = next++; i < requests; i = next++) {
      const auto at = static_cast<std::size_t>(i);
      const Request& r = asked[at];
      const std::size_t cut = static_cast<std::size_t>(mine.from(1, 20));
      switch (mine.below(8)) {
        case 0: {  // cancelled when some tokens are there
          const auto run = session->submit({r});
          std::vector<std::int32_t> got;
          while (!run->ended() && got.size() < cut) {
            for (const Update& u : run->wait(std::chrono::milliseconds(50))) {
              if (u.kind == Update::Kind::kToken) got.push_back(u.token);
            }
          }
          session->thread().cancel(run);
          finish(*run);
          const Completion c = run->completion(0);
          EXPECT_TRUE(is_beginning(got, c.tokens)) << i;
          EXPECT_TRUE(is_beginning(c.tokens, want[at])) << i;
          cancelled += c.finish == Finish::kCancelled ? 1 : 0;
          break;
        }
        case 1: {  // a callback that throws
          GenerateHooks hooks;
          std::size_t seen = 0;
          hooks.on_token = [&](std::size_t, std::int32_t) -> bool {
            if (++seen == cut) throw std::runtime_error("mine");
            return false;
          };
          const Completion c = session->generate({&r, 1}, hooks).front();
          EXPECT_TRUE(is_beginning(c.tokens, want[at])) << i;
          if (c.finish == Finish::kFailed) {
            EXPECT_EQ(c.reason, "mine");
            EXPECT_EQ(c.tokens.size(), cut);
            ++failed;
          }
          break;
        }
        case 2: {  // never read
          session->submit({r});
          break;
        }
        case 3: {  // scores beside it
          const auto run = session->submit({r});
          EXPECT_EQ(session->score(sample_ids(90, 3)), scores);
          finish(*run);
          EXPECT_EQ(run->completion(0).tokens, want[at]) << i;
          ++whole;
          break;
        }
        case 4: {  // three together, with their own ends
          const std::size_t other = static_cast<std::size_t>(mine.below(requests));
          const std::vector<Request> all = {r, asked[other], r};
          const auto done = session->generate(all, {});
          EXPECT_EQ(done[0].tokens, want[at]) << i;
          EXPECT_EQ(done[1].tokens, want[other]) << other;
          EXPECT_EQ(done[2].tokens, want[at]) << i;
          whole += 3;
          break;
        }
        default:
          EXPECT_EQ(alone(*session, r).tokens, want[at]) << i;
          ++whole;
      }
      const auto stats = session->stats();
      EXPECT_LE(stats->scheduler.reading + stats->scheduler.decoding,
                static_cast<std::size_t>(options.lanes));
    }
  };
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) all.emplace_back(work, 50 + static_cast<std::uint64_t>(t));
  for (std::thread& t : all) t.join();
  EXPECT_GT(whole.load(), requests / 4);
  if (requests >= 50) {  // so many that each end was met
    EXPECT_GT(cancelled.load(), 0);
    EXPECT_GT(failed.load(), 0);
  }
  expect_tidy(*session);
}

// One lane's state is spoilt: its request fails with the reason, and its neighbour does not notice.
inline void check_not_a_number(const SessionOptions& base) {
  SessionOptions o = base;
  o.lanes = 2;
  const auto session = open_demo(o);
  Request good, bad;
  good.prompt = sample_ids(30, 1);
  bad.prompt = sample_ids(40, 2);
  good.max_new_tokens = bad.max_new_tokens = 300;
  const Completion want = alone(*session, good), fine = alone(*session, bad);
  session->thread().run(EngineThread::When::kAlone,
                        [&] { session->scheduler().prefixes().clear(); });
  const auto spoilt = session->submit({bad});
  for (bool drawn = false; !drawn;) {
    for (const Update& u : spoilt->wait(std::chrono::milliseconds(50))) {
      drawn = drawn || u.kind == Update::Kind::kToken;
    }
  }
  const auto neighbour = session->submit({good});
  session->thread().run(EngineThread::When::kBetweenSteps, [&] {
    Engine& engine = session->engine();
    std::int32_t lane = 0;  // the one that holds the request
    while (!is_beginning(bad.prompt, engine.ids(lane))) ++lane;
    const std::vector<float> nan(engine.state().slot_bytes() / sizeof(float),
                                 std::numeric_limits<float>::quiet_NaN());
    for (std::int32_t slot = 2 * lane; slot < 2 * lane + 2; ++slot) {
      const Stream stream(session->device());
      session->device().copy_async(stream.id(), engine.state().slot(slot), nan.data(),
                                   engine.state().slot_bytes());
      session->device().synchronize(stream.id());
    }
  });
  finish(*spoilt);
  finish(*neighbour);
  const Completion c = spoilt->completion(0);
  EXPECT_EQ(c.finish, Finish::kFailed);
  EXPECT_NE(c.reason.find("not finite"), std::string::npos) << c.reason;
  EXPECT_TRUE(is_beginning(c.tokens, fine.tokens));
  EXPECT_EQ(neighbour->completion(0).tokens, want.tokens);
  EXPECT_EQ(alone(*session, bad).tokens, fine.tokens) << "a state of the failed request was kept";
  expect_tidy(*session);
}

}  // namespace flashnext::test
