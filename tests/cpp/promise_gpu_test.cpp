// The promise on a CUDA device, and the device against the host.
#include "tests/cpp/cuda_demo.h"
#include "tests/cpp/mtp_cases.h"
#include "tests/cpp/promise_cases.h"

#include <cstdio>

namespace flashnext {
namespace {

using namespace test;

const std::vector<float>& reference() {
  static const std::vector<float> logits = plain_logits(cuda_options());
  return logits;
}

TEST(PromiseGpu, CloseToTheHost) {
  const std::vector<float> host = open_demo()->logits(sample_ids(kTokens, 1));
  const std::vector<float>& cuda = reference();
  ASSERT_EQ(cuda.size(), host.size());
  double worst = 0, mean = 0;
  for (std::size_t p = 0; p < kTokens; ++p) {
    const float* h = host.data() + p * 1536;
    const float* c = cuda.data() + p * 1536;
    double sum_h = 0, sum_c = 0, kl = 0;
    for (int i = 0; i < 1536; ++i) {
      sum_h += std::exp(double{h[i]});
      sum_c += std::exp(double{c[i]});
    }
    for (int i = 0; i < 1536; ++i) {
      kl += std::exp(double{h[i]}) / sum_h *
            (double{h[i]} - std::log(sum_h) - double{c[i]} + std::log(sum_c));
    }
    worst = std::max(worst, kl);
    mean += kl / kTokens;
  }
  std::printf("KL host to CUDA: mean %.3g, worst %.3g\n", mean, worst);
  EXPECT_LT(mean, 1e-7);
}

TEST(PromiseGpu, TwoRuns) { expect_same(plain_logits(cuda_options()), reference(), "second run"); }
TEST(PromiseGpu, ChunksOfAnySize) { check_chunks(cuda_options(), reference()); }
TEST(PromiseGpu, EagerAndReplayedGraphs) { check_graphs(cuda_options(), reference()); }
TEST(PromiseGpu, LanesTogetherAndAlone) { check_lanes(cuda_options()); }
TEST(PromiseGpu, PrefixReuseAgainstCold) { check_prefixes(cuda_options()); }
TEST(PromiseGpu, SampledTextDoesNotDependOnCompany) { check_sampling(cuda_options()); }
TEST(PromiseGpu, RewindByEveryCount) { check_rewinds(cuda_options()); }
TEST(PromiseGpu, RewindOneLaneOfSeveral) { check_rewind_of_one_lane(cuda_options()); }
TEST(PromiseGpu, SnapshotsAtAnyPosition) { check_snapshots(cuda_options()); }

TEST(PromiseGpu, MtpSlotsAfterRewinds) { check_mtp_rewinds(cuda_options()); }
TEST(PromiseGpu, MtpSlotsOfTwoLanes) { check_mtp_lanes(cuda_options()); }

TEST(PromiseGpu, ABudgetTooSmallNamesThePartsAndLeaksNothing) {
  SessionOptions o = cuda_options();
  o.memory_limit = 20 << 20;
  EXPECT_THROW(open_demo(o), OutOfMemory);
  o.memory_limit = 0;
  expect_same(plain_logits(o), reference(), "after a refusal");
}

}  // namespace
}  // namespace flashnext
