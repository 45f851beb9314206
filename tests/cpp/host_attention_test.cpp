// Attention on the host against softmax in double precision over the allowed set, for every kind of
// head group, dense and selected rows, tails and page orders.
#include "cpp/base/half.h"
#include "host_step.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <numeric>

namespace flashnext {
namespace {

using test::kIsas;
using test::kNan;
using test::TestStep;
using test::uniform;
using Floats = std::vector<float>;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// A lane of `tokens` random keys and values in pages of any order; everything else is NaN.
struct Lane {
  Lane(int heads_a_group, int head_dim, int tokens) {
    dims.kv_heads = 2;
    dims.heads = 2 * heads_a_group;
    dims.head_dim = head_dim;
    dims.block = 4;
    dims.max_blocks = 8;
    const int pages = (tokens + kPageTokens - 1) / kPageTokens;
    order.resize(size(pages));
    std::iota(order.begin(), order.end(), 1);
    std::reverse(order.begin(), order.end());
    if (pages > 2) std::swap(order[0], order[1]);
    const std::size_t plane = size(pages + 1) * 2 * kPageTokens * size(head_dim);
    k.assign(plane, 0xFFFF);
    v.assign(plane, 0xFFFF);
    const Floats values = uniform(2 * plane, -1.5f, 1.5f, 40);
    for (int pos = 0; pos < tokens; ++pos) {
      for (int kv = 0; kv < 2; ++kv) {
        for (int d = 0; d < head_dim; ++d) {
          const std::size_t at = where(pos, kv, d);
          k[at] = f32_to_f16(values[at]);
          v[at] = f32_to_f16(values[plane + at]);
        }
      }
    }
  }
  std::size_t where(int pos, int kv, int d) const {
    const int page = order[size(pos / kPageTokens)];
    return size(((page * 2 + kv) * kPageTokens + pos % kPageTokens) * dims.head_dim + d);
  }
  AttnDims dims{};
  std::vector<std::int32_t> order;
  std::vector<std::uint16_t> k, v;
};

struct Queries {
  Queries(const Lane& lane, std::size_t rows)
      : q(uniform(rows * size(lane.dims.heads * lane.dims.head_dim), -2, 2, 50)),
        qg(uniform(2 * q.size(), -3, 3, 51)),
        blocks(rows * size(lane.dims.max_blocks), -1),
        count(rows, -1) {}
  Floats q, qg;
  std::vector<std::int32_t> blocks, count;
};

Floats run(const Lane& lane, TestStep step, const Queries& in, exl3::Isa isa = exl3::Isa::kAvx512,
           int threads = 1) {
  step.pages = lane.order;
  step.max_pages = static_cast<std::int32_t>(lane.order.size());
  Floats y(in.q.size(), kNan);
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  AttentionArgs args{};
  args.step = step.view();
  args.dims = lane.dims;
  args.q = in.q.data();
  args.qg = in.qg.data();
  args.blocks = in.blocks.data();
  args.count = in.count.data();
  args.planes.k = const_cast<std::uint16_t*>(lane.k.data());
  args.planes.v = const_cast<std::uint16_t*>(lane.v.data());
  args.y = y.data();
  args.max_context = step.max_pages * kPageTokens;
  std::vector<std::byte> scratch(host::workspace_bytes(args, threads));
  args.workspace = {scratch.data(), scratch.size()};
  host::attention(args, context);
  return y;
}

// Softmax over `allowed` for one row, in double precision.
std::vector<double> expected(const Lane& lane, const Queries& in, std::size_t row,
                             const std::vector<int>& allowed) {
  const int dim = lane.dims.head_dim;
  const int group = lane.dims.heads / lane.dims.kv_heads;
  std::vector<double> y(size(lane.dims.heads * dim), 0.0);
  for (int h = 0; h < lane.dims.heads; ++h) {
    const float* q = in.q.data() + (row * size(lane.dims.heads) + size(h)) * size(dim);
    std::vector<double> score;
    for (const int pos : allowed) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) {
        dot += static_cast<double>(q[d]) *
               static_cast<double>(f16_to_f32(lane.k[lane.where(pos, h / group, d)]));
      }
      score.push_back(dot / std::sqrt(static_cast<double>(dim)));
    }
    const double max = *std::max_element(score.begin(), score.end());
    double sum = 0;
    for (double& s : score) sum += s = std::exp(s - max);
    for (int d = 0; d < dim; ++d) {
      double o = 0;
      for (std::size_t i = 0; i < allowed.size(); ++i) {
        o += score[i] *
             static_cast<double>(f16_to_f32(lane.v[lane.where(allowed[i], h / group, d)]));
      }
      const std::size_t gate =
          ((row * size(lane.dims.heads) + size(h)) * 2 + 1) * size(dim) + size(d);
      y[size(h * dim + d)] = o / sum / (1 + std::exp(-static_cast<double>(in.qg[gate])));
    }
  }
  return y;
}

void expect_row(const Floats& y, std::size_t row, const std::vector<double>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(y[row * want.size() + i], want[i], 3e-6) << "row " << row << " element " << i;
  }
}

std::vector<int> first_positions(int n) {
  std::vector<int> all(size(n));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(Attention, DenseRowsMatchSoftmaxForEveryGroupOfHeads) {
  struct Case {
    int group, dim;
  };
  // Groups beyond 16 and dims that are no multiple of 64 take the rest paths.
  for (const Case c : {Case{1, 256}, {2, 256}, {3, 64}, {12, 256}, {18, 48}, {7, 16}}) {
    const Lane lane(c.group, c.dim, 200);
    TestStep step;
    step.add(0, 0, 3).add(0, 62, 4).add(0, 127, 2).add(0, 199, 1);
    const Queries in(lane, step.rows.size());
    const Floats y = run(lane, step, in, exl3::Isa::kScalar);
    for (std::size_t r = 0; r < step.rows.size(); ++r) {
      expect_row(y, r, expected(lane, in, r, first_positions(step.rows[r].pos + 1)));
    }
    for (const exl3::Isa isa : kIsas) {
      for (const int threads : {1, 2, 9}) EXPECT_EQ(run(lane, step, in, isa, threads), y);
    }
  }
}

TEST(Attention, SelectedRowsSeeTheirBlocksAndTheTailOnly) {
  const Lane lane(2, 256, 300);
  TestStep step;
  for (int i = 0; i < 6; ++i) step.add(0, 290 + i, 1);  // tails of 3, 0, 1, 2, 3, 0
  Queries in(lane, 6);
  const std::int32_t picked[] = {0, 3, 15, 16, 17, 40, 63, 71};
  for (std::size_t r = 0; r < 6; ++r) {
    std::copy(std::begin(picked), std::end(picked), in.blocks.begin() + static_cast<int>(r) * 8);
    in.count[r] = 8;
  }
  const Floats y = run(lane, step, in);
  for (std::size_t r = 0; r < 6; ++r) {
    std::vector<int> allowed;
    for (const int block : picked) {
      for (int i = 0; i < 4; ++i) allowed.push_back(4 * block + i);
    }
    const int pos = step.rows[r].pos;
    for (int i = (pos + 1) / 4 * 4; i <= pos; ++i) allowed.push_back(i);
    expect_row(y, r, expected(lane, in, r, allowed));
  }
}

TEST(Attention, LongSelectionsSpanTiles) {
  Lane lane(2, 64, 1000);
  lane.dims.max_blocks = 100;
  TestStep step;
  step.add(0, 998, 1);
  Queries in(lane, 1);
  std::vector<int> allowed;
  for (int j = 0; j < 100; ++j) {
    in.blocks[size(j)] = 2 * j + 1;
    for (int i = 0; i < 4; ++i) allowed.push_back(4 * (2 * j + 1) + i);
  }
  in.count[0] = 100;
  for (int pos = 996; pos <= 998; ++pos) allowed.push_back(pos);
  expect_row(run(lane, step, in), 0, expected(lane, in, 0, allowed));
}

// The tiles of a selection that leaves nothing out are those of the dense row.
TEST(Attention, AllBlocksSelectedIsDense) {
  Lane lane(12, 256, 270);
  lane.dims.max_blocks = 67;
  TestStep step;
  step.add(0, 266, 4);
  Queries in(lane, 4);
  const Floats dense = run(lane, step, in);
  for (int r = 0; r < 4; ++r) {
    in.count[size(r)] = (step.rows[size(r)].pos + 1) / 4;
    std::iota(in.blocks.begin() + r * 67, in.blocks.begin() + (r + 1) * 67, 0);
  }
  in.count[3] = 67;
  EXPECT_EQ(run(lane, step, in), dense);
}

TEST(Attention, LargeScoresNeitherOverflowNorVanish) {
  const Lane lane(2, 256, 150);
  TestStep step;
  step.add(0, 149, 1);
  Queries in(lane, 1);
  for (float& q : in.q) q *= 200.0f;  // scores of some thousands
  const Floats y = run(lane, step, in);
  const std::vector<double> want = expected(lane, in, 0, first_positions(150));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(y[i], want[i], 2e-3) << i;
}

TEST(Attention, InfinityInTheCacheShowsAsNan) {
  Lane lane(2, 256, 100);
  lane.k[lane.where(70, 1, 5)] = 0x7C00;
  TestStep step;
  step.add(0, 69, 2);
  const Queries in(lane, 2);
  const Floats y = run(lane, step, in);
  const std::size_t row = size(lane.dims.heads * 256);
  EXPECT_TRUE(std::none_of(y.begin(), y.begin() + static_cast<int>(row),
                           [](float x) { return std::isnan(x); }));
  EXPECT_TRUE(std::any_of(y.begin() + static_cast<int>(row), y.end(),
                          [](float x) { return std::isnan(x); }));
}

// The vector forms widen fp16 like half.h: all finite values, each as the only value seen.
TEST(Attention, HalvesWidenExactlyOnEveryInstructionSet) {
  Lane lane(1, 64, 1);
  TestStep step;
  step.add(0, 0, 1);
  Queries in(lane, 1);
  std::fill(in.q.begin(), in.q.end(), 0.0f);    // one position: its weight is 1
  std::fill(in.qg.begin(), in.qg.end(), 1e3f);  // the gate is 1
  for (std::uint32_t first = 0; first < 65536; first += 64) {
    if ((first & 0x7C00u) == 0x7C00u) continue;
    for (int d = 0; d < 64; ++d) {
      const std::uint16_t bits = static_cast<std::uint16_t>(first + static_cast<std::uint32_t>(d));
      lane.v[lane.where(0, 0, d)] = lane.v[lane.where(0, 1, d)] = bits;
    }
    for (const exl3::Isa isa : kIsas) {
      const Floats y = run(lane, step, in, isa);
      for (int d = 0; d < 64; ++d) {
        const float want = f16_to_f32(lane.v[lane.where(0, 0, d)]);
        ASSERT_EQ(y[size(d)], want);
        ASSERT_EQ(y[size(64 + d)], want);
      }
    }
  }
}

}  // namespace
}  // namespace flashnext
