// mix, residual, dense and combine against the formulas in double precision, and their bits
// over row counts, threads and instruction sets.
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "tests/cpp/host_op_case.h"

#include <algorithm>
#include <numeric>

namespace flashnext {
namespace {

using test::Rng;
using test::same_bits;

constexpr std::int32_t kStreams = 4;

struct MixCase {
  std::int32_t rows, dim, rank;
  bool inject, pending, pick;
  std::vector<float> streams, inj_in, y, norm;
  std::vector<std::uint16_t> down, up, inject_w;
  std::vector<std::int32_t> picked;

  MixCase(std::int32_t rows_, std::int32_t dim_, std::int32_t rank_, bool inject_, bool pending_,
          bool pick_)
      : rows(rows_), dim(dim_), rank(rank_), inject(inject_), pending(pending_), pick(pick_) {
    Rng rng(17);
    const auto stack = static_cast<std::size_t>(kStreams * dim);
    const auto n = static_cast<std::size_t>(rows);
    streams = rng.floats(n * stack, 3.0f);
    inj_in = rng.floats(n * kStreams);
    y = rng.floats(n * static_cast<std::size_t>(dim));
    norm = rng.floats(stack, 0.3f, 1.0f);
    const float scale = 1.0f / std::sqrt(static_cast<float>(stack));
    down = rng.halves(static_cast<std::size_t>(rank) * stack, 3 * scale);
    up = rng.halves(stack * static_cast<std::size_t>(rank), 0.5f);
    inject_w = rng.halves(kStreams * stack, 3 * scale);
    if (pick) {
      for (std::int32_t r = 0; r < rows; r += 2) picked.push_back(rows - 1 - r);
    }
  }

  std::int32_t outputs() const { return pick ? static_cast<std::int32_t>(picked.size()) : rows; }

  struct Result {
    std::vector<float> x, inj, streams;
  };

  // Rows [begin, end) of the outputs in one op.
  Result run(host::Context& context, std::int32_t begin, std::int32_t end) const {
    Result result{
        std::vector<float>(static_cast<std::size_t>((end - begin) * dim)),
        std::vector<float>(inject ? static_cast<std::size_t>((end - begin) * kStreams) : 0),
        streams};
    const std::int32_t count = end - begin;
    const std::int64_t first = pick ? 0 : begin;
    MixArgs args{};
    args.rows = {&count, 1, count};
    args.pick = pick ? picked.data() + begin : nullptr;
    args.streams = result.streams.data() + first * kStreams * dim;
    args.pending_inj = pending ? inj_in.data() + first * kStreams : nullptr;
    args.pending_y = pending ? y.data() + first * dim : nullptr;
    args.w = {norm.data(), down.data(), up.data(), inject ? inject_w.data() : nullptr};
    args.x = result.x.data();
    args.inj = inject ? result.inj.data() : nullptr;
    args.eps = 1e-6f;
    args.num_streams = kStreams;
    args.dim = dim;
    args.rank = rank;
    std::vector<float> workspace(host::workspace_bytes(args, context.pool.threads()) / 4, NAN);
    args.workspace = {workspace.data(), workspace.size() * 4};
    host::mix(args, context);
    return result;
  }

  void expected(std::vector<double>* x, std::vector<double>* inj, std::vector<double>* s) const {
    const int stack = kStreams * dim;
    s->assign(streams.begin(), streams.end());
    for (int i = 0; i < outputs(); ++i) {
      const int row = pick ? picked[static_cast<std::size_t>(i)] : i;
      double* state = s->data() + row * stack;
      std::vector<double> n(static_cast<std::size_t>(stack)), a(static_cast<std::size_t>(rank));
      for (int h = 0; h < kStreams; ++h) {
        double sum = 0;
        for (int c = 0; c < dim; ++c) {
          double& v = state[h * dim + c];
          if (pending) v += double{inj_in[row * kStreams + h]} * y[row * dim + c];
          sum += v * v;
        }
        for (int c = 0; c < dim; ++c) {
          n[h * dim + c] = state[h * dim + c] / std::sqrt(sum / dim + 1e-6) * norm[h * dim + c];
        }
      }
      const auto dot = [&](const std::vector<std::uint16_t>& w, int out, int in,
                           const std::vector<double>& v) {
        double total = 0;
        for (int k = 0; k < in; ++k) total += double{f16_to_f32(w[out * in + k])} * v[k];
        return total;
      };
      for (int j = 0; j < rank; ++j) a[j] = test::silu(dot(down, j, stack, n) / kStreams);
      for (int c = 0; c < dim; ++c) {
        double total = 0;
        for (int h = 0; h < kStreams; ++h) {
          total += test::sigmoid(dot(up, h * dim + c, rank, a)) * n[h * dim + c];
        }
        x->push_back(total / kStreams);
      }
      for (int h = 0; inject && h < kStreams; ++h) {
        inj->push_back(2 * test::sigmoid(dot(inject_w, h, stack, n) / kStreams));
      }
    }
  }
};

class Mix : public testing::TestWithParam<std::tuple<int, bool, bool, bool>> {};

TEST_P(Mix, FollowsTheFormulaWithEqualBitsEverywhere) {
  const auto [rows, inject, pending, pick] = GetParam();
  const MixCase c(rows, 64, 40, inject, pending, pick);  // rank 40: a product with a tail
  std::vector<double> x, inj, streams;
  c.expected(&x, &inj, &streams);
  MixCase::Result first;
  test::for_each_context([&](host::Context& context) {
    const MixCase::Result all = c.run(context, 0, c.outputs());
    if (first.x.empty()) {
      first = all;
      test::expect_near(all.x, x, 2e-6);
      test::expect_near(all.inj, inj, 2e-6);
      test::expect_near(all.streams, streams, 1e-6);
    }
    EXPECT_TRUE(same_bits(all.x, first.x));
    EXPECT_TRUE(same_bits(all.inj, first.inj));
    EXPECT_TRUE(same_bits(all.streams, first.streams));
    std::vector<float> alone;
    for (std::int32_t i = 0; i < c.outputs(); ++i) {
      const MixCase::Result one = c.run(context, i, i + 1);
      alone.insert(alone.end(), one.x.begin(), one.x.end());
    }
    EXPECT_TRUE(same_bits(alone, first.x));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, Mix,
                         testing::Values(std::tuple{1, true, false, false},
                                         std::tuple{37, true, true, false},
                                         std::tuple{9, false, false, true},
                                         std::tuple{5, false, true, false}));

TEST(Mix, RefusesMoreRowsThanItsBuffersHold) {
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  const MixCase c(3, 32, 16, true, false, false);
  MixArgs args{};
  const std::int32_t count = 3;
  args.rows = {&count, 1, 2};
  args.num_streams = kStreams;
  args.dim = 32;
  args.rank = 16;
  args.workspace.bytes = 1 << 20;
  EXPECT_THROW(host::mix(args, context), LogicError);
}

TEST(Residual, AddsToEveryStream) {
  Rng rng(5);
  const std::int32_t rows = 7, dim = 50;  // not a multiple of any vector
  const auto streams = rng.floats(rows * kStreams * dim), inj = rng.floats(rows * kStreams);
  const auto y = rng.floats(rows * dim);
  std::vector<double> want(streams.begin(), streams.end());
  for (int i = 0; i < rows * kStreams * dim; ++i) {
    want[i] += double{inj[i / dim]} * y[i / dim / kStreams * dim + i % dim];
  }
  std::vector<float> first;
  test::for_each_context([&](host::Context& context) {
    auto got = streams;
    host::residual({{&rows, 1, rows}, got.data(), inj.data(), y.data(), kStreams, dim}, context);
    test::expect_near(got, want, 1e-7);
    if (first.empty()) first = got;
    EXPECT_TRUE(same_bits(got, first));
  });
}

TEST(Dense, SeveralWeightsFollowTheProductForAnyNumberOfRows) {
  Rng rng(6);
  for (const std::int32_t in : {16, 100, 256, 1040}) {
    const std::int32_t outs[3] = {1, 48, 37}, rows = 67;
    const auto x = rng.floats(static_cast<std::size_t>(rows * in));
    std::vector<std::uint16_t> w[3];
    std::vector<double> want[3];
    for (int i = 0; i < 3; ++i) {
      w[i] = rng.halves(static_cast<std::size_t>(outs[i] * in), 0.1f);
      w[i][0] = 0x0001;  // a subnormal half
      for (int r = 0; r < rows; ++r) {
        for (int o = 0; o < outs[i]; ++o) {
          double sum = 0;
          for (int k = 0; k < in; ++k) sum += double{f16_to_f32(w[i][o * in + k])} * x[r * in + k];
          want[i].push_back(sum);
        }
      }
    }
    std::vector<float> first[3];
    test::for_each_context([&](host::Context& context) {
      for (const std::int32_t step : {rows, 1, 5}) {
        std::vector<float> y[3];
        for (int i = 0; i < 3; ++i) y[i].assign(static_cast<std::size_t>(rows * outs[i]), NAN);
        for (std::int32_t r = 0; r < rows; r += step) {
          const std::int32_t count = std::min(step, rows - r);
          DenseArgs args{};
          args.rows = {&count, 1, step};
          args.x = x.data() + r * in;
          args.n = 3;
          for (int i = 0; i < 3; ++i) {
            args.w[i] = {w[i].data(), in, outs[i]};
            args.y[i] = y[i].data() + r * outs[i];
          }
          host::dense(args, context);
        }
        for (int i = 0; i < 3; ++i) {
          if (first[i].empty()) {
            first[i] = y[i];
            test::expect_near(y[i], want[i], 1e-6);
          }
          ASSERT_TRUE(same_bits(y[i], first[i])) << "in " << in << " rows a step " << step;
        }
      }
    });
  }
}

TEST(Combine, AddsSlotsInOrderThenTheSharedExpert) {
  Rng rng(7);
  const std::int32_t rows = 6, slots = 5, dim = 72;
  const auto slot_y = rng.floats(rows * slots * dim), weights = rng.floats(rows * slots);
  const auto shared = rng.floats(rows * dim), gate = rng.floats(rows);
  // The contract fixes the operations, so the expected bits can be written down with std::fma.
  std::vector<float> want;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < dim; ++c) {
      float acc = 0;
      for (int s = 0; s < slots; ++s) {
        acc = std::fma(weights[r * slots + s], slot_y[(r * slots + s) * dim + c], acc);
      }
      want.push_back(std::fma(math::sigmoid(gate[r]), shared[r * dim + c], acc));
    }
  }
  test::for_each_context([&](host::Context& context) {
    std::vector<float> y(rows * dim, NAN);
    host::combine({{&rows, 1, rows},
                   slot_y.data(),
                   weights.data(),
                   shared.data(),
                   gate.data(),
                   y.data(),
                   slots,
                   dim},
                  context);
    EXPECT_TRUE(same_bits(y, want));
  });
}

}  // namespace
}  // namespace flashnext
