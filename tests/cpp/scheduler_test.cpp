// The scheduler by itself: prefixes that are kept where prompts part, prompts beside decoding
// neighbours, and the bookkeeping of lanes.
#include "tests/cpp/request_cases.h"

#include <map>

namespace flashnext {
namespace {

using namespace test;

Request turn(const std::vector<std::int32_t>& prompt, std::vector<std::int32_t> marks = {},
             std::int32_t shared = 0) {
  Request r;
  r.prompt = prompt;
  r.max_new_tokens = 8;
  r.marks = std::move(marks);
  r.shared_mark = shared;
  return r;
}

std::vector<std::int32_t> joined(std::vector<std::int32_t> a, const std::vector<std::int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(Scheduler, ASharedBeginningIsReadOnce) {
  SessionOptions o = demo_options();
  o.lanes = 4;
  const auto session = open_demo(o);
  const auto system = sample_ids(600, 1);
  std::vector<Request> requests;
  for (std::uint32_t i = 0; i < 4; ++i) {
    requests.push_back(turn(joined(system, sample_ids(30 + i, 10 + i)), {600}, 600));
  }
  const auto done = session->generate(requests, {});
  EXPECT_EQ(done[0].reused_tokens, 0);
  for (std::size_t i = 1; i < 4; ++i) EXPECT_EQ(done[i].reused_tokens, 600) << i;
  // All the rows there were: the beginning once, and each request's own.
  const std::uint64_t rows = session->stats()->engine.rows;
  EXPECT_LT(rows, 600u + 4 * (40 + 8));
  // The same from another conversation, much later.
  for (std::uint32_t i = 0; i < 30; ++i) alone(*session, turn(sample_ids(40, 40 + i)));
  EXPECT_EQ(alone(*session, turn(joined(system, sample_ids(50, 99)), {600}, 600)).reused_tokens,
            600);
}

TEST(Scheduler, WhatReplacesAPartOfTheHistoryReusesWhatStandsBefore) {
  const auto session = open_demo();
  std::vector<std::int32_t> prompt = sample_ids(50, 1), marks;
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::uint32_t t = 0; t < 4; ++t) {
    marks.push_back(static_cast<std::int32_t>(prompt.size()));
    prompt = joined(prompt, sample_ids(40, 20 + t));  // a user's turn
    marks.push_back(static_cast<std::int32_t>(prompt.size()));
    prompt = joined(prompt, sample_ids(4, 5));  // the answer's opening
    const Completion c = alone(*session, turn(prompt, marks, marks.front()));
    prompts.push_back(prompt);
    prompt = joined(prompt, c.tokens);
  }
  // The third user says something else: all before that turn is known.
  const auto begin = prompts[2].begin();
  const auto other = joined({begin, begin + marks[4]}, sample_ids(44, 77));
  const Completion c = alone(*session, turn(other, {marks.begin(), marks.begin() + 5}, marks[0]));
  EXPECT_LE(c.reused_tokens, marks[4]);
  EXPECT_GE(c.reused_tokens, marks[4] - 16);  // that close, a snapshot is not worth its place
  // The same question again: all but the opening.
  EXPECT_EQ(alone(*session, turn(prompts[1], {marks.begin(), marks.begin() + 4})).reused_tokens,
            marks[3]);
}

TEST(Scheduler, LongPromptsDoNotStarveShortOnes) {
  SessionOptions o = demo_options();
  o.lanes = 3;
  o.chunk = 64;
  const auto session = open_demo(o);
  Request large = turn(sample_ids(1500, 1)), small = turn(sample_ids(40, 2));
  const auto first = session->submit({large});
  const auto second = session->submit({small});
  std::map<std::string, double> ended;
  const auto start = std::chrono::steady_clock::now();
  while (!second->ended()) second->wait(std::chrono::milliseconds(1));
  EXPECT_FALSE(first->ended()) << "the short prompt waited for the long one";
  finish(*first);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));
}

TEST(Scheduler, PartsBesideANeighbourFollowTheWait) {
  SessionOptions o = demo_options();
  o.lanes = 2;
  o.chunk = 512;
  std::map<double, std::int32_t> parts;
  for (const double wait : {1e-9, 100.0}) {
    o.token_wait = wait;
    const auto session = open_demo(o);
    Request talker = turn(sample_ids(10, 1));
    talker.max_new_tokens = 1500;
    const auto talking = session->submit({talker});
    until_told(*talking);
    const auto reading = session->submit({turn(sample_ids(300, 2))});
    while (!reading->ended()) {
      for (const Update& u : reading->wait(std::chrono::milliseconds(50))) {
        parts[wait] += u.kind == Update::Kind::kPrefill ? 1 : 0;
      }
    }
  }
  EXPECT_GE(parts[1e-9], 200);  // a row at a time
  EXPECT_LE(parts[100.0], 5);
}

TEST(Scheduler, CancelsReachRequestsInEveryState) {
  SessionOptions o = demo_options();
  o.chunk = 16;
  const auto session = open_demo(o);
  Request r = turn(sample_ids(900, 1));
  r.max_new_tokens = 1000;
  const auto running = session->submit({r}), queued = session->submit({r});
  until_told(*running);
  session->thread().cancel(queued);
  finish(*queued);
  EXPECT_EQ(queued->completion(0).finish, Finish::kCancelled);
  EXPECT_FALSE(running->ended());
  session->cancel();  // while its prompt is read
  finish(*running);
  EXPECT_EQ(running->completion(0).finish, Finish::kCancelled);
  EXPECT_EQ(session->stats()->scheduler.cancelled, 2u);
  // What was read of the prompt is known now.
  r.max_new_tokens = 1;
  EXPECT_GE(alone(*session, r).reused_tokens, 16);
  expect_tidy(*session);
}

TEST(Scheduler, BorrowedLanesAreNobodyElses) {
  SessionOptions o = demo_options();
  o.lanes = 2;
  const auto session = open_demo(o);
  session->thread().run(EngineThread::When::kAlone, [&] {
    Engine& engine = session->engine();
    std::optional<LaneLease> a = engine.borrow(), b = engine.borrow();
    ASSERT_TRUE(a && b);
    EXPECT_NE(a->lane(), b->lane());
    EXPECT_FALSE(engine.borrow());
    ASSERT_TRUE(engine.reserve(b->lane(), 5));
    b.reset();
    EXPECT_EQ(engine.free_lanes(), 1);
    EXPECT_EQ(engine.state().free_pages(), engine.state().num_pages());
  });
  expect_tidy(*session);
}

}  // namespace
}  // namespace flashnext
