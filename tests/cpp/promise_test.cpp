// The promise on the host device.
#include "cpp/exl3/exl3.h"
#include "tests/cpp/promise_cases.h"

#include <cstdio>

namespace flashnext {
namespace {

using namespace test;

// Scalar code on one thread.
const std::vector<float>& reference() {
  static const std::vector<float> logits = [] {
    SessionOptions o = demo_options();
    o.isa = "scalar";
    o.threads = 1;
    return plain_logits(o);
  }();
  return logits;
}

TEST(Promise, ReferenceIsFinite) {
  ASSERT_EQ(reference().size(), kTokens * 1536);
  for (const float v : reference()) ASSERT_TRUE(std::isfinite(v));
}

TEST(Promise, ChunksOfAnySize) { check_chunks(demo_options(), reference()); }
TEST(Promise, EagerAndReplayedGraphs) { check_graphs(demo_options(), reference()); }
TEST(Promise, LanesTogetherAndAlone) { check_lanes(demo_options()); }
TEST(Promise, PrefixReuseAgainstCold) { check_prefixes(demo_options()); }
TEST(Promise, SampledTextDoesNotDependOnCompany) { check_sampling(demo_options()); }

TEST(Promise, ThreadsAndInstructionSets) {
  for (const exl3::Isa of : exl3::kIsas) {
    const std::string isa(exl3::to_string(of));
    if (!exl3::supported(of)) {
      std::printf("[ not run  ] %s: this processor lacks it\n", isa.c_str());
      continue;
    }
    for (const int threads : {1, 2}) {
      SessionOptions o = demo_options();
      o.isa = isa;
      o.threads = threads;
      expect_same(open_demo(o)->logits(sample_ids(kTokens, 1), 64), reference(),
                  std::string(isa) + ", threads " + std::to_string(threads));
    }
  }
}

TEST(Promise, TenOrdersOfExecution) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SessionOptions o = demo_options();
    o.seed = seed;
    o.graphs = seed % 2 == 0;
    expect_same(open_demo(o)->logits(sample_ids(kTokens, 1), 33), reference(),
                "seed " + std::to_string(seed));
  }
}

}  // namespace
}  // namespace flashnext
