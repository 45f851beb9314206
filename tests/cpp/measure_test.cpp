// Timed runs and step profiles on the host device.
#include "cpp/session/measure.h"

#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/bounds.h"

#include <gtest/gtest.h>
#include <random>

namespace flashnext {
namespace {

std::vector<std::int32_t> random_ids(std::int32_t vocab, std::size_t n) {
  std::mt19937 random(3);
  std::vector<std::int32_t> ids(n);
  for (std::int32_t& id : ids) {
    id = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab));
  }
  return ids;
}

std::unique_ptr<Session> tiny_session(std::int32_t layers = 4, std::int32_t lanes = 1) {
  SessionOptions options;
  options.lanes = lanes;
  options.device = "host";
  options.window = lanes > 1 ? 1024 : 256;  // lanes share the pages of a window and a few more
  options.chunk = 64;
  const SyntheticOptions pool{1, std::size_t{4} << 20};
  return Session::open(Checkpoint::synthetic(tiny_shape(layers), pool), options);
}

const OpFamily& family(const StepProfile& profile, const std::string& name) {
  for (const OpFamily& f : profile.families) {
    if (f.name == name) return f;
  }
  throw std::runtime_error("no family " + name);
}

TEST(Measure, DrawsTheTokensThatGenerateDraws) {
  const auto session = tiny_session();
  const std::vector<std::int32_t> prompt = random_ids(1536, 100);
  MeasureOptions options;
  options.new_tokens = 7;
  const RunTimes times = measure_run(*session, prompt, options);
  EXPECT_EQ(times.chunk_ns.size(), 2u);
  EXPECT_EQ(times.decode_ns.size(), 7u);
  for (const std::int64_t ns : times.decode_ns) EXPECT_GT(ns, 0);
  Request request;
  request.prompt = prompt;
  request.max_new_tokens = 8;
  EXPECT_EQ(session->generate({&request, 1}, {}).front().tokens, times.tokens);

  options.chunk = 7;
  options.graphs = false;
  const RunTimes eager = measure_run(*session, prompt, options);
  EXPECT_EQ(eager.chunk_ns.size(), 15u);
  EXPECT_EQ(eager.tokens, times.tokens);
}

// Lanes begin the prompt at different places of it, and draw what each would draw alone.
TEST(Measure, LanesDecodeTogether) {
  const auto session = tiny_session(4, 9);
  const std::vector<std::int32_t> prompt = random_ids(1536, 90);
  MeasureOptions options;
  options.new_tokens = 5;
  options.lanes = 9;
  const RunTimes times = measure_run(*session, prompt, options);
  EXPECT_EQ(times.chunk_ns.size(), 2u);
  EXPECT_EQ(times.decode_ns.size(), 5u);
  ASSERT_EQ(times.tokens.size(), 9u * 6u);
  for (std::size_t lane = 0; lane < 9; ++lane) {
    std::vector<std::int32_t> ids(prompt.begin() + static_cast<std::ptrdiff_t>(10 * lane),
                                  prompt.end());
    ids.insert(ids.end(), prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(10 * lane));
    Request request;
    request.prompt = ids;
    request.max_new_tokens = 6;
    std::vector<std::int32_t> drawn;
    for (std::size_t i = 0; i < 6; ++i) drawn.push_back(times.tokens[9 * i + lane]);
    EXPECT_EQ(session->generate({&request, 1}, {}).front().tokens, drawn) << lane;
  }
  // Given ids are dealt out lane by lane.
  const std::vector<std::int32_t> feed = random_ids(1536, 9 * 5);
  options.feed = feed;
  const RunTimes fed = measure_run(*session, prompt, options);
  std::vector<std::int32_t> ids = prompt;
  for (std::size_t i = 0; i < 5; ++i) ids.push_back(feed[9 * i]);
  Request request;
  request.prompt = ids;
  request.max_new_tokens = 1;
  EXPECT_EQ(session->generate({&request, 1}, {}).front().tokens.front(), fed.tokens[9 * 5]);
}

TEST(Measure, BadRunsAreRefused) {
  const auto session = tiny_session();
  const std::vector<std::int32_t> prompt = random_ids(1536, 250);
  MeasureOptions options;
  options.new_tokens = 7;
  EXPECT_THROW(measure_run(*session, prompt, options), InputError);  // 257 positions of 256
  EXPECT_THROW(measure_run(*session, {}, options), InputError);
  options.chunk = 65;
  EXPECT_THROW(measure_run(*session, std::span(prompt).first(10), options), InputError);
  for (const std::int32_t lanes : {-1, 0, 2}) {
    MeasureOptions many;
    many.lanes = lanes;
    EXPECT_THROW(measure_run(*session, std::span(prompt).first(10), many), InputError);
  }
}

TEST(Measure, APollMayStopARunAndTheSessionGoesOn) {
  const auto session = tiny_session();
  const std::vector<std::int32_t> prompt = random_ids(1536, 20);
  MeasureOptions options;
  const RunTimes whole = measure_run(*session, prompt, options);
  int calls = 0;
  options.poll = [&] {
    if (++calls == 5) throw std::runtime_error("stop");
  };
  EXPECT_THROW(measure_run(*session, prompt, options), std::runtime_error);
  EXPECT_EQ(measure_run(*session, prompt, {}).tokens, whole.tokens);
}

TEST(Profile, CountsOpsAndBytesOfAStep) {
  const auto session = tiny_session();
  const ModelShape& s = session->shape();
  MeasureOptions options;
  options.new_tokens = 1;
  measure_run(*session, random_ids(s.vocab, 30), options);
  const StepProfile profile = session->engine().profile(1);
  EXPECT_EQ(profile.rows, 1);
  EXPECT_GT(profile.seconds, 0);
  std::size_t launches = 0;
  for (const OpFamily& f : profile.families) {
    launches += static_cast<std::size_t>(f.launches);
    EXPECT_GT(f.seconds, 0) << f.name;
    EXPECT_GT(f.cost.bytes(), 0u) << f.name;
  }
  EXPECT_EQ(launches, session->engine().counters().ops_per_token);
  EXPECT_EQ(profile.experts, s.top_k);
  // One mix before each of two sublayers a layer, and one before the head.
  const OpFamily& mix = family(profile, "mix");
  EXPECT_EQ(mix.launches, 2 * s.layers + 1);
  const std::uint64_t stack = 4 * 256, products = 2 * 128 * stack;
  EXPECT_EQ(mix.cost.weight_bytes, 9 * (stack * 4 + products * 2) + 8 * 4 * stack * 2);
  EXPECT_EQ(family(profile, "gdn_recur").launches, 3);
  // Taps of 1,280 channels, gates of 6 value heads; the row of u, x, qkv and gates; the window of 3
  // rows read and written.
  const OpFamily& conv = family(profile, "gdn_conv");
  EXPECT_EQ(conv.cost.weight_bytes, 3u * (1280 * 4 * 4 + 2 * 6 * 256 * 2));
  EXPECT_EQ(conv.cost.other_bytes, 3u * 4 * (2 * 1280 + 256 + 2 * 6 + 2 * 3 * 1280));
  EXPECT_EQ(conv.cost.half_macs, 3u * 2 * 6 * 256);
  EXPECT_EQ(family(profile, "attention").launches, 1);
  EXPECT_EQ(family(profile, "head").cost.exl3_macs, 256u * 1536);
}

TEST(Profile, LeavesTheSessionUsable) {
  const auto session = tiny_session();
  const std::vector<std::int32_t> prompt = random_ids(1536, 40);
  const RunTimes before = measure_run(*session, prompt, {});
  session->engine().profile(2);
  EXPECT_EQ(session->engine().length(0), 0);
  EXPECT_EQ(measure_run(*session, prompt, {}).tokens, before.tokens);
  EXPECT_THROW(tiny_session(1)->engine().profile(1), LogicError);  // no step was run
}

// Random routers choose freely: 64 rows of 4 among 32 experts touch nearly all of them in every
// layer, where routers that agree would touch 4.
TEST(Profile, SyntheticRoutersSpreadOverTheExperts) {
  const auto session = tiny_session(8);
  MeasureOptions options;
  options.new_tokens = 0;
  measure_run(*session, random_ids(1536, 64), options);
  const StepProfile profile = session->engine().profile(1);
  EXPECT_EQ(profile.rows, 64);
  EXPECT_GT(profile.experts, 20);
  EXPECT_LE(profile.experts, 32);
}

TEST(Bounds, RatesOfTheProcessorAreInOrder) {
  const HostBounds b = measure_host_bounds(1, exl3::best_isa(), std::size_t{16} << 20);
  EXPECT_EQ(b.threads, 1);
  for (const double rate : {b.core_read, b.all_read, b.core_exl3, b.all_exl3, b.core_read_cached,
                            b.all_read_cached, b.core_exl3_cached, b.core_exl3_macs}) {
    EXPECT_GT(rate, 1e7);
    EXPECT_LT(rate, 1e13);
  }
  // Decoding cannot be faster than reading.
  EXPECT_LT(b.core_exl3_cached, b.core_read_cached * 1.5);
}

TEST(Bounds, WithoutTheDeviceThereIsAnAnswer) {
  EXPECT_THROW(measure_cuda_bounds(99), InputError);
  EXPECT_THROW(cuda_machine(-1), InputError);
}

}  // namespace
}  // namespace flashnext
