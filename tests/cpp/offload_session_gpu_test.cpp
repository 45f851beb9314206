// Experts in host memory on the first CUDA device.
#include "tests/cpp/cuda_demo.h"
#include "tests/cpp/offload_cases.h"

namespace flashnext {
namespace {

using namespace test;

const std::vector<float>& reference() {
  static const std::vector<float> logits = plain_logits(cuda_options());
  return logits;
}

TEST(OffloadSessionGpu, CacheOfAnySize) { check_cache_sizes(cuda_options(), reference()); }
TEST(OffloadSessionGpu, EveryPolicy) { check_policies(cuda_options(), reference()); }
TEST(OffloadSessionGpu, Processor) { check_processor(cuda_options(), reference()); }
TEST(OffloadSessionGpu, EagerAndReplayedGraphs) {
  check_offload_graphs(cuda_options(), reference());
}
TEST(OffloadSessionGpu, StalledWorkers) { check_stall(cuda_options(), reference()); }
TEST(OffloadSessionGpu, LanesTogetherAndAlone) { check_offload_lanes(cuda_options()); }
TEST(OffloadSessionGpu, MtpHead) { check_offload_mtp(cuda_options()); }
TEST(OffloadSessionGpu, MtpHeadStalled) { check_stall_mtp(cuda_options()); }
TEST(OffloadSessionGpu, ManyRequestsLeaveMemoryAsItIs) { check_no_leak(cuda_options(), 1000); }
TEST(OffloadSessionGpu, ASlowLinkIsPlayed) {
  SessionOptions o = offloaded(cuda_options(), kDemoExperts / 4);
  o.link_limit = 1e9;
  for (const std::int32_t chunk : {1, 100}) {
    expect_offloaded(o, chunk, reference(), "a link of 1 GB/s");
  }
}
TEST(OffloadSessionGpu, PrefixReuseAgainstCold) {
  check_prefixes(offloaded(cuda_options(), kDemoExperts / 4));
}

}  // namespace
}  // namespace flashnext
