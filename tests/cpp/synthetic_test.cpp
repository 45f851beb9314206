// Synthetic checkpoints: complete, sane through many layers, and of the published sizes.
#include "cpp/checkpoint/synthetic.h"

#include "cpp/base/half.h"
#include "cpp/checkpoint/ngram_hash.h"
#include "cpp/device/host_device.h"
#include "cpp/session/session.h"

#include <cmath>
#include <gtest/gtest.h>
#include <random>
#include <set>

namespace flashnext {
namespace {

SyntheticOptions small_pool(std::uint64_t seed = 1) { return {seed, std::size_t{16} << 20}; }

std::vector<std::int32_t> random_ids(std::int32_t vocab, std::size_t n) {
  std::mt19937 random(7);
  std::vector<std::int32_t> ids(n);
  for (std::int32_t& id : ids)
    id = static_cast<std::int32_t>(random() % static_cast<unsigned>(vocab));
  return ids;
}

struct Moments {
  double mean, deviation;
  bool finite;
};
Moments moments(const float* values, std::size_t n) {
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < n; ++i) {
    sum += static_cast<double>(values[i]);
    squares += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  const double mean = sum / static_cast<double>(n);
  return {mean, std::sqrt(squares / static_cast<double>(n) - mean * mean), std::isfinite(squares)};
}

// spec/model.md 10 and 8, spec/exl3.md 1.1: the census of the published pack.
TEST(Synthetic, TheFullModelHasThePublishedSizes) {
  const ModelShape shape = flash_next_shape();
  std::uint64_t tensors = 0, linears = 0, expert = 0, table_rows = 0, shards = 0, head = 0;
  for (const SyntheticTensor& t : synthetic_tensors(shape)) {
    ++tensors;
    linears += t.name.ends_with(".mul1");
    if (t.name.starts_with("model.language_model.layers.7.mlp.experts.3.")) expert += t.bytes();
    if (t.name.starts_with("lm_head.")) head += t.bytes();
    if (t.name.find(".shard_") == std::string::npos) continue;
    table_rows += static_cast<std::uint64_t>(t.shape[0]);
    ++shards;
    EXPECT_EQ(t.shape, (std::vector<std::int64_t>{2500012, 51})) << t.name;
  }
  EXPECT_EQ(tensors, 303253u);
  EXPECT_EQ(expert, 1862412u);
  EXPECT_EQ(table_rows, 320001536u);
  EXPECT_EQ(shards, 128u);
  EXPECT_EQ(head, 248320u * 2560 * 5 / 8 + 2 * (248320 + 2560) + 4);
}

TEST(Synthetic, EveryTensorOfTheTableIsThere) {
  const Checkpoint c = Checkpoint::synthetic(tiny_shape(), small_pool());
  for (const TensorRule& rule : c.table()) {
    if (rule.role == Role::kPlain) {
      EXPECT_EQ(c.plain(rule.name).shape, rule.shape) << rule.name;
      for (const float v : c.values(rule.name)) ASSERT_TRUE(std::isfinite(v)) << rule.name;
    } else if (rule.role == Role::kExl3) {
      const Exl3Weight& w = c.linear(rule.name);
      EXPECT_EQ(w.out, rule.shape[0]) << rule.name;
      EXPECT_EQ(w.in, rule.shape[1]) << rule.name;
      for (std::int32_t i = 0; i < w.in; ++i) {
        const float v = f16_to_f32(load_u16(w.suh + 2 * i));
        ASSERT_TRUE(std::isfinite(v) && v != 0) << rule.name;
      }
    } else {
      EXPECT_EQ(c.ngram().rows, derive_ngram_hash(c.shape()).rows);
      EXPECT_EQ(c.ngram().bits, 5);
    }
  }
}

TEST(Synthetic, SeedsDrawDifferentWeightsAndRepeat) {
  const auto first = [](std::uint64_t seed) {
    return Checkpoint::synthetic(tiny_shape(2), small_pool(seed))
        .values("model.language_model.layers.0.mlp.gate.weight");
  };
  EXPECT_EQ(first(1), first(1));
  EXPECT_NE(first(1), first(2));
}

TEST(Synthetic, NumbersHaveTheDeviationThatTheirGainAsks) {
  const Checkpoint c = Checkpoint::synthetic(tiny_shape(), small_pool());
  const auto of = [&](const std::string& name) {
    const std::vector<float> v = c.values("model.language_model." + name);
    return moments(v.data(), v.size());
  };
  EXPECT_NEAR(of("embed_tokens.weight").deviation, 1, 0.02);
  EXPECT_NEAR(of("embed_tokens.weight").mean, 0, 0.02);
  EXPECT_NEAR(of("layers.2.mlp.gate.weight").deviation, 4 / std::sqrt(256.0), 0.02);
  EXPECT_NEAR(of("layers.0.linear_attn.norm.weight").mean, 1, 0.03);
  EXPECT_NEAR(of("layers.0.attn_hyper_connection.hc_norm.weight").mean, 0, 0.01);
}

void expect_sane_logits(const ModelShape& shape, std::size_t tokens) {
  SessionOptions options;
  options.device = "host";
  options.window = 256;
  options.taps = true;
  const auto session = Session::open(Checkpoint::synthetic(shape, small_pool()), options);
  const std::vector<std::int32_t> ids = random_ids(shape.vocab, tokens);
  const std::vector<float> logits = session->logits(ids);
  const auto vocab = static_cast<std::size_t>(shape.vocab);
  std::set<std::size_t> best;
  for (std::size_t t = 0; t < tokens; ++t) {
    const float* row = logits.data() + t * vocab;
    const Moments m = moments(row, vocab);
    EXPECT_TRUE(m.finite) << t;
    EXPECT_GT(m.deviation, 0.3) << t;
    EXPECT_LT(m.deviation, 10) << t;
    best.insert(static_cast<std::size_t>(std::max_element(row, row + vocab) - row));
  }
  EXPECT_GT(best.size(), tokens / 2) << "tokens collapse onto each other";
  const std::vector<float> streams = session->streams(ids);
  const auto stack = static_cast<std::size_t>(shape.stack());
  for (std::size_t l = 0; l < static_cast<std::size_t>(shape.layers); ++l) {
    const Moments m = moments(streams.data() + l * stack, stack);
    EXPECT_GT(m.deviation, 0.5) << "layer " << l;
    EXPECT_LT(m.deviation, 10) << "layer " << l;
  }
}

TEST(Synthetic, FortyEightLayersStaySane) { expect_sane_logits(tiny_shape(48), 12); }
TEST(Synthetic, TheRealDimensionsStaySane) { expect_sane_logits(flash_next_shape(4), 6); }

TEST(Synthetic, UnknownModelsAndLayerCountsAreRefused) {
  EXPECT_THROW(synthetic_shape("flash", 2), InputError);
  EXPECT_THROW(synthetic_shape("tiny", -1), InputError);
  EXPECT_THROW(synthetic_shape("tiny", 100000), InputError);
  EXPECT_EQ(synthetic_shape("flash-next", 0).layers, 48);
  EXPECT_EQ(synthetic_shape("tiny", 1).ple_layer, -1);
}

}  // namespace
}  // namespace flashnext
