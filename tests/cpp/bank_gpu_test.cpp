// The bank and the weights that stay in host memory, as a GPU reads them.
#include "cpp/bank/bank.h"
#include "cpp/bank/weights.h"
#include "tests/cpp/checkpoint_writer.h"
#include "tests/cpp/gpu_rig.h"

#include <cstring>

namespace flashnext {
namespace {

using namespace testing_checkpoint;

constexpr std::uint64_t kPlenty = std::uint64_t{4} << 30;

class BankGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// A kernel gathers lines from the pinned regions; what arrives is what the lines hold.
TEST_F(BankGpu, KernelsReadPinnedLines) {
  const Checkpoint c = Checkpoint::open(demo_model());
  test::Rig rig = test::Rig::cuda();
  const Bank bank = Bank::fill(c, rig.device(), {kPlenty, 2});
  ASSERT_EQ(bank.report().note, "");
  for (const Bank::Layer& layer : bank.layers()) {
    const auto line = static_cast<std::size_t>(layer.layout.bytes);
    const std::vector<std::int32_t> experts = {0, 7, c.shape().experts - 1};
    std::byte* to = rig.room<std::byte>(line * experts.size());
    std::vector<Fetch> fetches;
    for (std::size_t i = 0; i < experts.size(); ++i) {
      fetches.push_back({to + i * line, experts[i], 0});
    }
    FetchArgs args{};
    args.fetches = rig.put(fetches);
    args.count = rig.put(std::vector<std::int32_t>{static_cast<std::int32_t>(experts.size())});
    args.bank = layer.lines;
    args.counters = rig.put(std::vector<CacheCounters>(1));
    args.line_bytes = layer.layout.bytes;
    args.max_fetches = static_cast<std::int32_t>(experts.size());
    rig.run(args);
    const std::vector<std::byte> got = rig.get(to, line * experts.size());
    for (std::size_t i = 0; i < experts.size(); ++i) {
      EXPECT_EQ(std::memcmp(got.data() + i * line,
                            layer.lines + static_cast<std::size_t>(experts[i]) * line, line),
                0);
    }
  }
}

TEST_F(BankGpu, UnpinsWhenItGoes) {
  const Checkpoint c = Checkpoint::open(demo_model());
  const auto device = make_cuda_device(0, {});
  for (int i = 0; i < 3; ++i) {
    const Bank bank = Bank::fill(c, *device, {kPlenty, 2});
    EXPECT_FALSE(device->allocations().empty());
  }
  EXPECT_TRUE(device->allocations().empty());
}

// Without experts and embedding the card holds that much less, and rows of the embedding are read
// where they are.
TEST_F(BankGpu, WeightsWithoutExpertsAndEmbedding) {
  const Checkpoint c = Checkpoint::open(demo_model());
  test::Rig rig = test::Rig::cuda();
  WeightOptions options;
  options.rope_positions = 64;
  options.experts = options.embedding = false;
  const Weights weights = Weights::load(c, rig.device(), options);
  for (const LayerWeights& layer : weights.layers) {
    EXPECT_EQ(layer.moe.experts, nullptr);
    EXPECT_NE(layer.moe.shared, nullptr);
    EXPECT_GT(layer.moe.words[2], 0);
  }
  const Tensor& table = c.plain("model.language_model.embed_tokens.weight");
  ASSERT_EQ(std::memcmp(weights.embedding, table.data, table.bytes), 0);
  const std::vector<std::byte> got = rig.get(weights.embedding, table.bytes);
  EXPECT_EQ(std::memcmp(got.data(), table.data, table.bytes), 0);
}

}  // namespace
}  // namespace flashnext
