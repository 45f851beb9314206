// The promise on the GPU, held with ==: the bits of a row of an attention layer do not depend on
// the bucket, the chunks or the other lanes of the step.
#include "attention_gpu_lanes.h"

namespace flashnext {
namespace {

using namespace test;

struct Layer {
  Floats y;  // by lane, then position
  std::vector<std::int32_t> count;
  std::vector<std::int32_t> blocks;  // of rows that choose
  bool operator==(const Layer&) const = default;
};

// The layer over `lanes` sequences of `tokens` tokens in chunks.
std::vector<Layer> run(const AttnDims& d, const std::vector<const LaneInputs*>& inputs, int tokens,
                       int chunk, int max_rows) {
  Rig rig = Rig::cuda();
  const int n_lanes = static_cast<int>(inputs.size());
  const Lanes lanes(n_lanes, tokens);
  const Planes planes(rig, d, lanes);
  std::vector<Layer> layers(inputs.size());
  for (int first = 0; first < tokens; first += chunk) {
    const int n = std::min(chunk, tokens - first);
    std::vector<Segment> segments;
    for (int l = 0; l < n_lanes; ++l) segments.push_back({0, n, first, l, l, l});
    StepParts parts = lanes.step(segments);
    parts.max_rows = max_rows;
    const StepView step = parts.on(rig);
    const Prepared p = prepare_rows(rig, d, planes, step, inputs, first, n);
    const std::size_t rows = size(n_lanes * n);
    IndexSelectArgs s{};
    s.step = step;
    s.dims = d;
    s.iq = p.iq;
    s.planes = planes.planes;
    s.blocks = rig.put(std::vector<std::int32_t>(rows * size(d.max_blocks), -7));
    s.count = rig.put(std::vector<std::int32_t>(rows, -7));
    s.max_context = tokens;
    rig.run(s);
    AttentionArgs a{};
    a.step = step;
    a.dims = d;
    a.q = p.q;
    a.qg = p.qg;
    a.blocks = s.blocks;
    a.count = s.count;
    a.planes = planes.planes;
    const std::size_t width = size(d.heads * d.head_dim);
    a.y = rig.put(Floats(rows * width, kNan));
    a.max_context = tokens;
    rig.run(a);
    const Floats y = rig.get(a.y, rows * width);
    const auto count = rig.get(s.count, rows);
    const auto blocks = rig.get(s.blocks, rows * size(d.max_blocks));
    for (std::size_t r = 0; r < rows; ++r) {
      Layer& to = layers[r / size(n)];
      to.y.insert(to.y.end(), y.begin() + static_cast<std::ptrdiff_t>(r * width),
                  y.begin() + static_cast<std::ptrdiff_t>((r + 1) * width));
      to.count.push_back(count[r]);
      if (count[r] < 0) continue;
      const auto begin = blocks.begin() + static_cast<std::ptrdiff_t>(r * size(d.max_blocks));
      to.blocks.insert(to.blocks.end(), begin, begin + count[r]);
    }
  }
  return layers;
}

class AttentionBitsGpu : public GpuTest {};

TEST_F(AttentionBitsGpu, ChunksBucketsAndLanes) {
  const AttnDims d = attention_dims(4, 2, 16);
  const int tokens = 300;
  const LaneInputs a(d, tokens, 100);
  const LaneInputs b(d, tokens, 200);
  const Layer whole = run(d, {&a}, tokens, tokens, tokens)[0];
  ASSERT_EQ(whole.count[66], -1);  // 16 blocks and three of the tail
  ASSERT_EQ(whole.count[67], 16);
  for (const float v : whole.y) ASSERT_FALSE(std::isnan(v));
  EXPECT_TRUE(run(d, {&a}, tokens, tokens, 512)[0] == whole);
  for (const auto& [chunk, bucket] : {std::pair{1, 1}, {1, 64}, {7, 8}, {64, 64}, {64, 512}}) {
    SCOPED_TRACE(chunk);
    EXPECT_TRUE(run(d, {&a}, tokens, chunk, bucket)[0] == whole);
  }
  for (const int chunk : {5, 64}) {
    SCOPED_TRACE(chunk);
    EXPECT_TRUE(run(d, {&b, &a}, tokens, chunk, 2 * chunk)[1] == whole);
  }
}

// The real shape across 2,051 tokens, a verify window alone and inside a prompt's chunk.
TEST_F(AttentionBitsGpu, RealShapeAcrossTheBudget) {
  const AttnDims d = attention_dims(24, 2, 512);
  const int pos0 = 2040, rows = 24, context = pos0 + rows;
  const Lanes lanes(1, context);
  const Floats pooled = uniform(size(lanes.num_pages * 16 * 128), -2, 2, 300);
  const Floats iq = uniform(size(rows * 512), -2, 2, 301);
  const std::size_t width = size(d.heads * d.head_dim);
  const Floats q = uniform(size(rows) * width, -2, 2, 302);
  const Floats qg = uniform(2 * size(rows) * width, -2, 2, 303);
  auto run_rows = [&](int first, int n, int bucket) {
    Rig rig = Rig::cuda();
    Planes planes(rig, d, lanes);
    planes.fill(rig, lanes, context, 304);
    rig.set(planes.planes.index_pooled, pooled);
    StepParts parts = lanes.step({{0, n, pos0 + first, 0, 0, 0}});
    parts.max_rows = bucket;
    auto part = [&](const Floats& all, std::size_t w) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(size(first) * w);
      return rig.put(Floats(begin, begin + static_cast<std::ptrdiff_t>(size(n) * w)));
    };
    IndexSelectArgs s{};
    s.step = parts.on(rig);
    s.dims = d;
    s.iq = part(iq, 512);
    s.planes = planes.planes;
    s.blocks = rig.put(std::vector<std::int32_t>(size(n * d.max_blocks), -7));
    s.count = rig.put(std::vector<std::int32_t>(size(n), -7));
    s.max_context = context;
    rig.run(s);
    AttentionArgs a{};
    a.step = s.step;
    a.dims = d;
    a.q = part(q, width);
    a.qg = part(qg, 2 * width);
    a.blocks = s.blocks;
    a.count = s.count;
    a.planes = planes.planes;
    a.y = rig.put(Floats(size(n) * width, kNan));
    a.max_context = context;
    rig.run(a);
    const auto count = rig.get(s.count, size(n));
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(count[size(i)], pos0 + first + i <= 2050 ? -1 : 512) << pos0 + first + i;
    }
    return rig.get(a.y, size(n) * width);
  };
  const Floats whole = run_rows(0, rows, 64);
  for (const auto& [first, n, bucket] :
       {std::tuple{0, 16, 16}, {8, 16, 16}, {9, 4, 4}, {11, 1, 1}, {20, 4, 8}, {4, 20, 32}}) {
    SCOPED_TRACE(first);
    const Floats some = run_rows(first, n, bucket);
    EXPECT_TRUE(std::equal(some.begin(), some.end(),
                           whole.begin() + static_cast<std::ptrdiff_t>(size(first) * width)));
  }
}

}  // namespace
}  // namespace flashnext
