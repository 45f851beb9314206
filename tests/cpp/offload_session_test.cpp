// Experts in host memory on the host device, whose streams run in seeded random order.
#include "tests/cpp/offload_cases.h"

namespace flashnext {
namespace {

using namespace test;

const std::vector<float>& reference() {
  static const std::vector<float> logits = plain_logits(demo_options());
  return logits;
}

TEST(OffloadSession, CacheOfAnySize) { check_cache_sizes(demo_options(), reference()); }
TEST(OffloadSession, EveryPolicy) { check_policies(demo_options(), reference()); }
TEST(OffloadSession, Processor) { check_processor(demo_options(), reference()); }
TEST(OffloadSession, EagerAndReplayedGraphs) { check_offload_graphs(demo_options(), reference()); }
TEST(OffloadSession, StalledWorkers) { check_stall(demo_options(), reference()); }
TEST(OffloadSession, LanesTogetherAndAlone) { check_offload_lanes(demo_options()); }
TEST(OffloadSession, PrefixReuseAgainstCold) {
  check_prefixes(offloaded(demo_options(), kDemoExperts / 4));
}

TEST(OffloadSession, MtpHead) { check_offload_mtp(demo_options()); }
TEST(OffloadSession, MtpHeadStalled) { check_stall_mtp(demo_options()); }

TEST(OffloadSession, OrdersOfExecution) {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    SessionOptions o = offloaded(demo_options(), kDemoExperts / 4);
    o.seed = seed;
    o.graphs = seed % 2 == 0;
    o.policy = std::make_shared<WildPolicy>();
    o.plan_every = 2;
    o.cpu_misses = seed % 3 == 0 ? "1" : "off";
    for (const std::int32_t chunk : {1, 33}) {
      expect_offloaded(o, chunk, reference(),
                       "seed " + std::to_string(seed) + ", chunk " + std::to_string(chunk));
    }
  }
}

}  // namespace
}  // namespace flashnext
