// Requests that come and go on the host device, whose work runs in a random order.
#include "tests/cpp/offload_cases.h"
#include "tests/cpp/request_cases.h"

#include <future>
#include <poll.h>

namespace flashnext {
namespace {

using namespace test;

// Fewer under a sanitizer, which is ten times slower and more.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRequests = 24;
#else
constexpr int kRequests = 200;
#endif

SessionOptions options(std::int32_t lanes) {
  SessionOptions o = demo_options();
  o.lanes = lanes;
  o.seed = 5;
  return o;
}

TEST(Requests, ManyFromManyThreads) { check_stress(options(5), kRequests, 8); }

TEST(Requests, ManyFromManyThreadsWithExpertsInHostMemory) {
  SessionOptions o = offloaded(options(3), kDemoExperts / 4);
  o.policy = std::make_shared<WildPolicy>();
  o.cpu_misses = "2";
  o.cpu_threads = 1;
  o.plan_every = 2;
  o.chunk = 64;
  check_stress(o, kRequests / 4, 4);
}

TEST(Requests, WhatIsNoNumberEndsOneRequest) { check_not_a_number(options(2)); }

TEST(Requests, EachHasItsOwnStops) {
  const auto session = open_demo(options(3));
  Request r;
  r.prompt = sample_ids(25, 1);
  r.max_new_tokens = 30;
  const std::vector<std::int32_t> all = alone(*session, r).tokens;
  ASSERT_EQ(all.size(), 30u);
  Request stopped = r;
  stopped.stop_ids = {all[7]};
  Request limited = r;
  limited.max_new_tokens = 3;
  const std::vector<Request> requests = {r, stopped, limited};
  const auto done = session->generate(requests, {});
  EXPECT_EQ(done[0].tokens, all);
  EXPECT_EQ(done[0].finish, Finish::kLength);
  const auto first = std::find(all.begin(), all.end(), all[7]);
  EXPECT_EQ(done[1].tokens, std::vector(all.begin(), first));
  EXPECT_EQ(done[1].finish, Finish::kStop);
  EXPECT_EQ(done[2].tokens, std::vector(all.begin(), all.begin() + 3));
}

TEST(Requests, StopTextsMayBeginInOneTokenAndEndInAnother) {
  SessionOptions o = options(1);
  for (int i = 0; i < 1498; ++i) o.vocabulary.push_back(std::to_string(i) + ".");
  const auto session = open_demo(o);
  Request r;
  r.prompt = sample_ids(25, 1);
  r.max_new_tokens = 30;
  const std::vector<std::int32_t> all = alone(*session, r).tokens;
  const std::string a = std::to_string(all[4]), b = std::to_string(all[5]);
  r.stop_texts = {"nowhere", a + "." + b.substr(0, 1)};
  const Completion c = alone(*session, r);
  EXPECT_EQ(c.finish, Finish::kStop);
  EXPECT_TRUE(is_beginning(c.tokens, all));
  EXPECT_LE(c.tokens.size(), 6u);
  r.stop_texts = {""};
  EXPECT_THROW(alone(*session, r), InputError);
}

TEST(Requests, JobsRunBetweenStepsAndAlone) {
  const auto session = open_demo(options(2));
  Request r;
  r.prompt = sample_ids(20, 1);
  r.max_new_tokens = 400;
  const auto run = session->submit({r});
  until_told(*run);
  std::size_t beside = 0, apart = 1;
  session->thread().run(EngineThread::When::kBetweenSteps,
                        [&] { beside = session->scheduler().running(); });
  EXPECT_EQ(beside, 1u);
  std::future<void> job = session->thread().post(EngineThread::When::kAlone,
                                                 [&] { apart = session->scheduler().running(); });
  const auto queued = session->submit({r});  // waits for the job, the job waits for the first
  EXPECT_EQ(job.wait_for(std::chrono::milliseconds(1)), std::future_status::timeout);
  session->thread().cancel(run);
  job.get();
  EXPECT_EQ(apart, 0u);
  finish(*queued);
  EXPECT_EQ(queued->completion(0).tokens.size(), 400u);
  EXPECT_THROW(session->thread().run(EngineThread::When::kAlone,
                                     [] { throw InputError("what a job throws"); }),
               InputError);
}

TEST(Requests, TheEndOfASessionEndsThem) {
  auto session = open_demo(options(1));
  Request r;
  r.prompt = sample_ids(20, 1);
  r.max_new_tokens = 1900;
  const auto running = session->submit({r}), queued = session->submit({r});
  until_told(*running);
  session->stop();
  EXPECT_TRUE(running->ended() && queued->ended());
  EXPECT_EQ(running->completion(0).finish, Finish::kCancelled);
  EXPECT_EQ(queued->completion(0).finish, Finish::kCancelled);
  EXPECT_THROW(session->submit({r}), InputError);
  session.reset();
}

TEST(Requests, LogitsThatNoMemoryHoldsAreRefusedWithTheirSize) {
  Submission s(1);
  try {
    s.expect_logits(0, sample_ids(1000, 1), std::size_t{1} << 52, false);
    FAIL() << "more than an address can name was to be had";
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.bytes(), (std::size_t{1} << 52) * 1000 * sizeof(float));
    EXPECT_NE(std::string(e.what()).find("1000 tokens"), std::string::npos) << e.what();
  }
}

// What an event loop sees: readable while there is something to take, and for good at the end.
TEST(Requests, TheDescriptorFollowsTheUpdates) {
  const auto session = open_demo(options(1));
  Request r;
  r.prompt = sample_ids(20, 1);
  r.max_new_tokens = 30;
  const auto run = session->submit({r});
  pollfd p{run->descriptor(), POLLIN, 0};
  std::size_t tokens = 0;
  while (!run->ended()) {
    ASSERT_GE(::poll(&p, 1, 60000), 1) << "an update came and nobody was told";
    for (const Update& u : run->wait({})) tokens += u.kind == Update::Kind::kToken ? 1 : 0;
  }
  for (const Update& u : run->wait({})) tokens += u.kind == Update::Kind::kToken ? 1 : 0;
  EXPECT_EQ(tokens, 30u);
  EXPECT_EQ(::poll(&p, 1, 0), 1);
}

TEST(Requests, BadOnesAreRefusedBeforeAnythingRuns) {
  const auto session = open_demo(options(2));
  std::vector<Request> requests(2);
  requests[0].prompt = sample_ids(5, 1);
  const auto refused = [&](const char* word, auto change) {
    requests[1] = requests[0];
    change(requests[1]);
    try {
      session->generate(requests, {});
      ADD_FAILURE() << word << " was accepted";
    } catch (const InputError& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find(word), std::string::npos) << text;
      EXPECT_NE(text.find("request 1"), std::string::npos) << text;
    }
  };
  refused("empty", [](Request& r) { r.prompt.clear(); });
  refused("1536", [](Request& r) { r.prompt.push_back(1536); });
  refused("max_new_tokens", [](Request& r) { r.max_new_tokens = 0; });
  refused("window", [](Request& r) { r.max_new_tokens = 2044; });
  refused("temperature", [](Request& r) { r.sampling.temperature = -1; });
  refused("top_p", [](Request& r) { r.sampling.top_p = 0; });
  refused("min_p", [](Request& r) { r.sampling.min_p = 2; });
  refused("top_k", [](Request& r) { r.sampling.top_k = -1; });
  EXPECT_EQ(session->stats()->scheduler.requests, 0u);
}

}  // namespace
}  // namespace flashnext
