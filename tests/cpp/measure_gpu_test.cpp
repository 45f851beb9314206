// Bounds of the GPU, and timed runs and profiles on it.
#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/bounds.h"
#include "cpp/device/cuda_device.h"
#include "cpp/session/measure.h"

#include <gtest/gtest.h>
#include <numeric>

namespace flashnext {
namespace {

class MeasureGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device here";
  }
};

TEST_F(MeasureGpu, BoundsArePlausible) {
  const CudaBounds b = measure_cuda_bounds(0);
  EXPECT_GT(b.read, 1e11);
  EXPECT_GT(b.copy, 1e11);
  EXPECT_LT(b.copy, 2 * b.read);
  EXPECT_GT(b.int8_ops, 1e13);
  EXPECT_GT(b.half_flops, 1e13);
  EXPECT_GT(b.int8_ops, b.half_flops);
  EXPECT_GT(b.graph_node, 1e-7);
  EXPECT_LT(b.graph_node, 1e-4);
  EXPECT_GT(b.graph_launch, b.graph_node);
  ASSERT_GE(b.link.size(), 4u);
  EXPECT_GT(b.link.back().to_device, 1e9);
  EXPECT_GT(b.link.back().to_host, 1e9);
  const CudaMachine m = cuda_machine(0);
  EXPECT_FALSE(m.name.empty());
  EXPECT_EQ(m.uuid.size(), 32u);
  EXPECT_GT(m.multiprocessors, 0);
  EXPECT_GE(m.driver, m.runtime / 1000 * 1000);
}

TEST_F(MeasureGpu, RunsRepeatWithAndWithoutGraphsAndAfterAProfile) {
  const CudaMachine m = cuda_machine(0);
  SessionOptions options;
  options.device = "cuda:0";
  options.window = 512;
  options.chunk = 128;
  options.capabilities = {"sm_" + std::to_string(m.major) + std::to_string(m.minor)};
  const SyntheticOptions pool{1, std::size_t{16} << 20};
  const auto session = Session::open(Checkpoint::synthetic(tiny_shape(), pool), options);
  std::vector<std::int32_t> prompt(300);
  std::iota(prompt.begin(), prompt.end(), 200);
  MeasureOptions run;
  run.new_tokens = 8;
  const RunTimes first = measure_run(*session, prompt, run);
  const StepProfile decode = session->engine().profile(2);
  EXPECT_GE(decode.nodes, session->engine().counters().ops_per_token);
  for (const OpFamily& f : decode.families) {
    EXPECT_GE(f.nodes, static_cast<std::size_t>(f.launches)) << f.name;
    EXPECT_GT(f.seconds, 0) << f.name;
  }
  EXPECT_EQ(decode.experts, session->shape().top_k);
  run.graphs = false;
  run.chunk = 7;
  EXPECT_EQ(measure_run(*session, prompt, run).tokens, first.tokens);
}

}  // namespace
}  // namespace flashnext
