// Sparse attention on the GPU: every op against the host device, the choice of blocks exactly.
// attention_bits_gpu_test.cpp holds the promise that the bits of a row depend on nothing else.
#include "attention_gpu_lanes.h"

#include <algorithm>
#include <numeric>

namespace flashnext {
namespace {

using namespace test;

class AttentionGpu : public GpuTest {};

TEST_F(AttentionGpu, PrepareMatchesTheHost) {
  const AttnDims dims = attention_dims(4, 2, 16);
  const int tokens = 150;
  const Lanes lanes(2, tokens);
  const LaneInputs a(dims, tokens, 10);
  const LaneInputs b(dims, tokens, 20);
  auto prepare = [&](Rig rig) {
    Planes planes(rig, dims, lanes);
    Floats q, iq;
    // The second step completes blocks that the first one began.
    for (const auto& [first, n] : {std::pair{0, 70}, {70, 1}, {71, 3}, {74, 76}}) {
      StepParts parts = lanes.step({{0, n, first, 0, 0, 0}, {0, n, first, 1, 1, 1}});
      const Prepared p = prepare_rows(rig, dims, planes, parts.on(rig), {&a, &b}, first, n);
      append(q, rig.get(p.q, size(2 * n * dims.heads * dims.head_dim)));
      append(iq, rig.get(p.iq, size(2 * n * dims.index_heads * dims.index_dim)));
    }
    return std::tuple{
        q, iq, planes.keys(rig), planes.values(rig), planes.windows(rig), planes.pooled(rig)};
  };
  const auto got = prepare(Rig::cuda());
  const auto want = prepare(Rig::host());
  EXPECT_LE(difference(std::get<0>(got), std::get<0>(want)), 2e-6);
  EXPECT_LE(difference(std::get<1>(got), std::get<1>(want)), 2e-6);
  EXPECT_LE(difference(std::get<2>(got), std::get<2>(want)), 5e-4);  // a unit of fp16
  EXPECT_TRUE(std::get<3>(got) == std::get<3>(want));
  EXPECT_TRUE(std::get<4>(got) == std::get<4>(want));
  EXPECT_LE(difference(std::get<5>(got), std::get<5>(want)), 2e-6);
}

struct Choice {
  std::vector<std::int32_t> count;
  std::vector<std::int32_t> blocks;  // of rows that choose, one after another
  Floats scores;                     // what the CUDA workspace holds
};

// Runs index_select with pooled keys and index queries as given.
Choice choose(Rig rig, const AttnDims& dims, const Lanes& lanes, StepParts parts, int max_rows,
              const Floats& pooled, const Floats& iq, int max_context) {
  parts.max_rows = max_rows;
  IndexSelectArgs s{};
  s.step = parts.on(rig);
  s.dims = dims;
  s.iq = rig.put(iq);
  s.planes.index_pooled = rig.put(pooled);
  const std::size_t rows = size(parts.rows());
  s.blocks = rig.put(std::vector<std::int32_t>(rows * size(dims.max_blocks), -7));
  s.count = rig.put(std::vector<std::int32_t>(rows, -7));
  s.max_context = max_context;
  void* workspace = rig.run(s);
  Choice choice;
  choice.count = rig.get(s.count, rows);
  const auto blocks = rig.get(s.blocks, rows * size(dims.max_blocks));
  for (std::size_t r = 0; r < rows; ++r) {
    if (choice.count[r] < 0) continue;
    const auto begin = blocks.begin() + static_cast<std::ptrdiff_t>(r * size(dims.max_blocks));
    choice.blocks.insert(choice.blocks.end(), begin, begin + choice.count[r]);
  }
  if (rig.device().kind() == "cuda" && workspace != nullptr) {
    choice.scores = rig.get(static_cast<const float*>(workspace),
                            rows * size((max_context / 4 + 63) / 64 * 64));
  }
  (void)lanes;
  return choice;
}

Floats small_integers(std::size_t n, unsigned seed) {
  Floats values = uniform(n, -2.49f, 2.49f, seed);
  for (float& v : values) v = std::nearbyint(v);
  return values;
}

// Integer data: scores are exact, full of ties, and must be resolved like the host resolves them.
TEST_F(AttentionGpu, TiesGoToTheLowestBlock) {
  const AttnDims dims = attention_dims(4, 2, 64);
  const int context = 4096;
  const Lanes lanes(2, context);
  const Floats pooled = small_integers(size(lanes.num_pages * 16 * 128), 30);
  const StepParts parts =
      lanes.step({{0, 40, 230, 0, 0, 0}, {0, 1, 4095, 1, 0, 0}, {0, 30, 3000, 0, 0, 0}});
  Floats iq = small_integers(size(71 * 4 * 128), 31);
  std::fill(iq.begin() + 45 * 512, iq.begin() + 46 * 512, 0.0f);  // all scores zero
  const Choice want = choose(Rig::host(), dims, lanes, parts, 71, pooled, iq, context);
  for (const int max_rows : {71, 128}) {
    const Choice got = choose(Rig::cuda(), dims, lanes, parts, max_rows, pooled, iq, context);
    EXPECT_TRUE(got.count == want.count);
    EXPECT_TRUE(got.blocks == want.blocks);
  }
  // The same rows one at a time take the kernels of short buckets.
  std::size_t at = 0;
  std::size_t row = 0;
  for (const Segment& s : parts.segments) {
    for (int i = 0; i < s.rows; ++i, ++row) {
      const StepParts one = lanes.step({{0, 1, s.pos0 + i, s.lane, 0, 0}});
      const Floats query(iq.begin() + static_cast<std::ptrdiff_t>(row * 512),
                         iq.begin() + static_cast<std::ptrdiff_t>(row * 512 + 512));
      if (row % 5 != 0 && want.count[row] >= 0) {
        at += 64;
        continue;
      }
      const Choice got = choose(Rig::cuda(), dims, lanes, one, 1, pooled, query, context);
      ASSERT_EQ(got.count[0], want.count[row]);
      if (got.count[0] < 0) continue;
      EXPECT_TRUE(std::equal(got.blocks.begin(), got.blocks.end(),
                             want.blocks.begin() + static_cast<std::ptrdiff_t>(at)));
      at += 64;
    }
  }
}

// Real data: scores against double precision, and the choice against a sort of those scores.
void check_scores(int context, int rows, int max_rows, int max_blocks) {
  const AttnDims dims = attention_dims(4, 2, max_blocks);
  const Lanes lanes(1, context);
  const Floats pooled = uniform(size(lanes.num_pages * 16 * 128), -2, 2, 40);
  const Floats iq = uniform(size(rows * 512), -2, 2, 41);
  const StepParts parts = lanes.step({{0, rows, context - rows, 0, 0, 0}});
  const Choice got = choose(Rig::cuda(), dims, lanes, parts, max_rows, pooled, iq, context);
  const std::int64_t stride = (context / 4 + 63) / 64 * 64;
  for (int r = 0; r < rows; ++r) {
    ASSERT_EQ(got.count[size(r)], max_blocks);
    const int complete = (context - rows + r + 1) / 4;
    const float* scores = got.scores.data() + r * stride;
    double worst = 0;
    for (int j = 0; j < complete; ++j) {
      double want = 0;
      const float* key = pooled.data() + lanes.block_row(0, j) * 128;
      for (int h = 0; h < 4; ++h) {
        double dot = 0;
        for (int d = 0; d < 128; ++d) dot += double{iq[size(r * 512 + h * 128 + d)]} * key[d];
        want += std::max(dot, 0.0);
      }
      worst = std::max(worst, std::fabs(want / std::sqrt(128.0) - scores[j]));
    }
    EXPECT_LE(worst, 2e-5);
    std::vector<std::int32_t> order(size(complete));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return scores[a] > scores[b]; });
    order.resize(size(max_blocks));
    std::sort(order.begin(), order.end());
    EXPECT_TRUE(std::equal(order.begin(), order.end(), got.blocks.begin() + r * max_blocks));
  }
}

TEST_F(AttentionGpu, ScoresAndChoiceOfLongContexts) {
  check_scores(9000, 40, 40, 512);
  check_scores(2063, 5, 8, 512);
  check_scores(80003, 1, 1, 512);
}

// Rows of one lane whose count and blocks are given; what lies past the last row is NaN.
void check_attention(int heads, int kv_heads, int max_blocks, int pos0, int rows, int max_rows) {
  const AttnDims dims = attention_dims(heads, kv_heads, max_blocks);
  const Lanes lanes(1, pos0 + rows);
  std::vector<std::int32_t> count(size(rows), -1);
  std::vector<std::int32_t> blocks(size(rows * max_blocks), -1);
  std::mt19937 engine(50);
  for (int r = 0; r < rows; ++r) {
    const int complete = (pos0 + r + 1) / 4;
    if (complete <= max_blocks) continue;
    count[size(r)] = max_blocks;
    std::vector<std::int32_t> all(size(complete));
    std::iota(all.begin(), all.end(), 0);
    std::sample(all.begin(), all.end(), blocks.begin() + r * max_blocks, max_blocks, engine);
  }
  auto attend = [&](Rig rig, int bucket) {
    StepParts parts = lanes.step({{0, rows, pos0, 0, 0, 0}});
    parts.max_rows = bucket;
    Planes planes(rig, dims, lanes);
    planes.fill(rig, lanes, pos0 + rows, 60);
    return attend_rows(rig, dims, planes, parts.on(rig), rig.put(count), rig.put(blocks), rows,
                       pos0 + rows, 61);
  };
  const Floats want = attend(Rig::host(), rows);
  const Floats got = attend(Rig::cuda(), max_rows);
  EXPECT_LE(difference(got, want), 5e-6) << heads << " heads, from " << pos0;
}

TEST_F(AttentionGpu, MatchesTheHost) {
  for (const int bucket : {16, 64}) {
    SCOPED_TRACE(bucket);
    check_attention(4, 2, 16, 0, 12, bucket);       // the first tokens
    check_attention(4, 2, 16, 60, 14, bucket);      // dense to selected, all residues of the tail
    check_attention(4, 2, 16, 1000, 9, bucket);     // one tile and a tail
    check_attention(24, 2, 512, 2044, 16, bucket);  // the real shape around 2,051
    check_attention(24, 2, 512, 6000, 5, bucket);
    check_attention(6, 6, 24, 400, 5, bucket);   // one head a kv head, a tile that is half full
    check_attention(32, 2, 20, 400, 5, bucket);  // sixteen
  }
}

TEST_F(AttentionGpu, RefusesShapesItIsNotBuiltFor) {
  Rig rig = Rig::cuda();
  AttentionArgs a{};
  a.dims = attention_dims(40, 2, 16);
  EXPECT_THROW(launch(rig.device(), rig.stream(), a), LogicError);
  a.dims = attention_dims(4, 2, 16);
  a.dims.head_dim = 128;
  EXPECT_THROW(launch(rig.device(), rig.stream(), a), LogicError);
}

}  // namespace
}  // namespace flashnext
