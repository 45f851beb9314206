// The n-gram layer on the streams, its window, embed, and the entry of the draft head.
#include "cpp/base/errors.h"
#include "tests/cpp/host_op_case.h"

namespace flashnext {
namespace {

using test::Rng;
using test::same_bits;
using test::sequence;
using test::TestStep;

constexpr std::int32_t kStreams = 3, kDim = 48, kStack = kStreams * kDim;

std::vector<double> norm(const float* x, const float* w, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  std::vector<double> y(static_cast<std::size_t>(n));
  for (int i = 0; i < n; ++i) y[i] = x[i] / std::sqrt(sum / n + 1e-6) * w[i];
  return y;
}

TEST(PleGate, FollowsTheFormula) {
  Rng rng(3);
  const std::int32_t rows = 6;
  auto streams = rng.floats(rows * kStack), key = rng.floats(rows * kStack, 2.0f);
  const auto value = rng.floats(rows * kDim);
  const auto nk = rng.floats(kStack, 0.2f, 1), nq = rng.floats(kStack, 0.2f, 1),
             nc = rng.floats(kStack, 0.2f, 1);
  for (int c = 0; c < kDim; ++c) key[c] = 0;  // s = 0: the gate is one half
  std::vector<double> want_gate, want_m;
  for (int i = 0; i < rows * kStreams; ++i) {
    const int h = i % kStreams;
    const auto k = norm(&key[i * kDim], &nk[h * kDim], kDim);
    const auto q = norm(&streams[i * kDim], &nq[h * kDim], kDim);
    double s = 0;
    for (int c = 0; c < kDim; ++c) s += k[c] * q[c];
    s /= std::sqrt(double{kDim});
    const double t = s == 0 ? 0 : (s > 0 ? 1 : -1) * std::sqrt(std::max(std::abs(s), 1e-6));
    want_gate.push_back(test::sigmoid(t));
    std::vector<float> gv(kDim);
    for (int c = 0; c < kDim; ++c) {
      gv[c] = static_cast<float>(want_gate.back() * value[i / kStreams * kDim + c]);
    }
    for (double v : norm(gv.data(), &nc[h * kDim], kDim)) want_m.push_back(v);
  }
  EXPECT_EQ(want_gate[0], 0.5);
  std::vector<float> first_gate, first_m;
  test::for_each_context([&](host::Context& context) {
    std::vector<float> gate(rows * kStreams, NAN), m(rows * kStack, NAN);
    for (std::int32_t r = 0; r < rows; r += 3) {  // in two steps
      const std::int32_t count = 3;
      host::ple_gate({{&count, 1, 3},
                      &streams[r * kStack],
                      &key[r * kStack],
                      &value[r * kDim],
                      nk.data(),
                      nq.data(),
                      nc.data(),
                      &gate[r * kStreams],
                      &m[r * kStack],
                      1e-6f,
                      kStreams,
                      kDim},
                     context);
    }
    test::expect_near(gate, want_gate, 1e-5);
    test::expect_near(m, want_m, 1e-6);
    if (first_gate.empty()) first_gate = gate, first_m = m;
    EXPECT_TRUE(same_bits(gate, first_gate) && same_bits(m, first_m));
  });
}

// The n-gram convolution and its window over a sequence that is cut into steps of any length.
class PleConv : public testing::TestWithParam<int> {};

TEST_P(PleConv, GivesTheSameForAnyCutAndFollowsTheFormula) {
  const std::int32_t cut = GetParam();
  constexpr std::int32_t kTokens = 23, kKernel = 4, kDilation = 3, kDepth = 9;
  Rng rng(4);
  const auto streams = rng.floats(kTokens * kStack), gate = rng.floats(kTokens * kStreams);
  const auto value = rng.floats(kTokens * kDim), m = rng.floats(kTokens * kStack);
  const auto conv = rng.floats(kStack * kKernel);
  std::vector<double> want;
  for (int t = 0; t < kTokens; ++t) {
    for (int ch = 0; ch < kStack; ++ch) {
      double y = 0;
      for (int i = 0; i < kKernel; ++i) {
        const int source = t - kDilation * (kKernel - 1 - i);
        if (source >= 0) y += double{conv[ch * kKernel + i]} * m[source * kStack + ch];
      }
      want.push_back(streams[t * kStack + ch] +
                     double{gate[t * kStreams + ch / kDim]} * value[t * kDim + ch % kDim] +
                     test::silu(y));
    }
  }
  static std::vector<float> first;  // over all cuts
  test::for_each_context([&](host::Context& context) {
    auto got = streams;
    std::vector<float> state(2 * kDepth * kStack, NAN);  // slots 0 and 1
    std::int32_t slot = 0;
    for (std::int32_t t = 0; t < kTokens; t += cut) {
      const std::int32_t rows = std::min(cut, kTokens - t);
      TestStep step;
      step.rows.resize(static_cast<std::size_t>(rows));
      // The slots alternate, and sometimes the same slot is read and written.
      const std::int32_t out = t % 2 == 0 ? 1 - slot : slot;
      step.segments.push_back({0, rows, t, 0, slot, out});
      const StepView view = step.view();
      host::ple_conv(
          {view, &got[t * kStack], &gate[t * kStreams], &value[t * kDim], &m[t * kStack],
           conv.data(), state.data(), kDepth * kStack, kStreams, kDim, kKernel, kDilation},
          context);
      host::window_push(
          {view, &m[t * kStack], kStack, state.data(), kDepth * kStack, kDepth, kStack}, context);
      slot = out;
    }
    test::expect_near(got, want, 1e-6);
    if (first.empty()) first = got;
    EXPECT_TRUE(same_bits(got, first));
    const std::vector<float> window(&state[slot * kDepth * kStack],
                                    &state[slot * kDepth * kStack] + kDepth * kStack);
    EXPECT_TRUE(same_bits(window, std::vector<float>(m.end() - kDepth * kStack, m.end())));
  });
}

INSTANTIATE_TEST_SUITE_P(Cuts, PleConv, testing::Values(1, 2, 5, 8, 9, 10, 23));

TEST(WindowPush, StartsFromZerosAndServesSeveralSegments) {
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  const std::int32_t depth = 3, channels = 2;
  std::vector<float> state(4 * depth * channels);
  for (std::size_t i = 0; i < state.size(); ++i) state[i] = 100 + static_cast<float>(i);
  const std::int32_t x_stride = 3;  // rows lie apart
  const std::vector<float> x = {1, 2, -1, 3, 4, -1, 5, 6, -1, 7, 8, -1};
  TestStep step;
  step.rows.resize(4);
  step.segments = {{0, 2, 0, 0, 0, 0},   // a new sequence in slot 0
                   {2, 1, 9, 1, 1, 1},   // goes on in place
                   {3, 1, 9, 2, 2, 3}};  // from slot 2 to slot 3
  host::window_push(
      {step.view(), x.data(), x_stride, state.data(), depth * channels, depth, channels}, context);
  EXPECT_EQ(state, (std::vector<float>{0,   0,   1,   2,   3,   4,    //
                                       108, 109, 110, 111, 5,   6,    //
                                       112, 113, 114, 115, 116, 117,  //
                                       114, 115, 116, 117, 7,   8}));
}

std::vector<std::byte> bf16_table(Rng& rng, int rows, int dim, std::vector<float>* values) {
  std::vector<std::byte> table(1 + static_cast<std::size_t>(rows * dim) * 2);  // unaligned
  for (int i = 0; i < rows * dim; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(rng.normal()) & 0xFFFF0000u;
    values->push_back(std::bit_cast<float>(bits));
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    std::memcpy(&table[1 + static_cast<std::size_t>(i) * 2], &half, 2);
  }
  return table;
}

TEST(Embed, CopiesTheRowOfTheTokenIntoEveryStream) {
  Rng rng(1);
  std::vector<float> values;
  const auto table = bf16_table(rng, 10, kDim, &values);
  TestStep step = sequence({7, 0, 9}, 0);
  test::for_each_context([&](host::Context& context) {
    std::vector<float> streams(3 * kStack, NAN);
    host::embed({step.view(), table.data() + 1, streams.data(), kStreams, kDim}, context);
    for (int i = 0; i < 3 * kStack; ++i) {
      ASSERT_EQ(streams[i], values[step.rows[i / kStack].token * kDim + i % kDim]);
    }
  });
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  TestStep bad = sequence({1, -2}, 0);
  std::vector<float> streams(2 * kStack);
  EXPECT_THROW(host::embed({bad.view(), table.data() + 1, streams.data(), kStreams, kDim}, context),
               InputError);
}

TEST(MtpNorm, NormsAStreamOrTheStack) {
  Rng rng(2);
  std::vector<float> values;
  const auto table = bf16_table(rng, 8, kDim, &values);
  TestStep step = sequence({3, 7}, 0);
  const auto hidden = rng.floats(2 * kStack, 4.0f);
  const auto ne = rng.floats(kDim, 0.2f, 1), nh = rng.floats(kStack, 0.2f, 1);
  for (const std::int32_t per_stream : {0, 1}) {
    const int group = per_stream ? kDim : kStack;
    std::vector<double> want_e, want_h;
    for (int r = 0; r < 2; ++r) {
      for (double v : norm(&values[step.rows[r].token * kDim], ne.data(), kDim))
        want_e.push_back(v);
      for (int at = 0; at < kStack; at += group) {
        for (double v : norm(&hidden[r * kStack + at], &nh[at], group)) want_h.push_back(v);
      }
    }
    test::for_each_context([&](host::Context& context) {
      std::vector<float> e(2 * kDim, NAN), h(2 * kStack, NAN);
      host::mtp_norm({step.view(), table.data() + 1, hidden.data(), ne.data(), nh.data(), e.data(),
                      h.data(), 1e-6f, kStreams, kDim, per_stream},
                     context);
      test::expect_near(e, want_e, 1e-6);
      test::expect_near(h, want_h, 1e-6);
    });
  }
}

TEST(MtpJoin, AddsTheEmbeddingPartToEveryStream) {
  Rng rng(2);
  const std::int32_t rows = 3;
  const auto fe = rng.floats(rows * kDim), fh = rng.floats(rows * kStack);
  test::for_each_context([&](host::Context& context) {
    std::vector<float> s(rows * kStack, NAN);
    host::mtp_join({{&rows, 1, rows}, fe.data(), fh.data(), s.data(), kStreams, kDim}, context);
    for (int i = 0; i < rows * kStack; ++i) {
      ASSERT_EQ(s[i], fh[i] + fe[i / kStack * kDim + i % kDim]);
    }
  });
}

}  // namespace
}  // namespace flashnext
