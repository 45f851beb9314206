// Gated DeltaNet on the host against spec/model.md 3 in double precision, and the promise of
// spec/numerics.md 4: the split into steps, other rows, threads and the instruction set keep every
// bit.
#include "cpp/base/half.h"
#include "cpp/base/math.h"
#include "host_step.h"

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>

namespace flashnext {
namespace {

using test::kIsas;
using test::kNan;
using test::TestStep;
using test::uniform;
using Floats = std::vector<float>;

constexpr int kHead = 128;
constexpr int kKeyHeads = 2;
constexpr int kValueHeads = 6;
constexpr int kTaps = 4;
constexpr int kChannels = (2 * kKeyHeads + kValueHeads) * kHead;
constexpr std::size_t kWindow = (kTaps - 1) * kChannels;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

GdnDims dims(std::size_t slot_stride) {
  return {kKeyHeads, kValueHeads, kHead, kTaps, static_cast<std::int64_t>(slot_stride)};
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// ---- convolution, norms and gates
// ----------------------------------------------------------------------------

// Multiples of 1/8: products of two of them add up without rounding.
Floats eighths(std::size_t n, std::uint32_t seed) {
  Floats x = uniform(n, -16, 16, seed);
  for (float& v : x) v = std::round(v) * 0.125f;
  return x;
}

constexpr int kIn = 56;  // inputs of the gates' products

struct ConvWeights {
  Floats conv = uniform(size(kChannels) * kTaps, -1, 1, 1);
  Floats rate = uniform(kValueHeads, 0.1f, 3, 2);
  Floats dt_bias = uniform(kValueHeads, -2, 2, 3);
  Floats a = eighths(size(kValueHeads) * kIn, 4);  // (v_heads, in)
  Floats b = eighths(size(kValueHeads) * kIn, 5);
};

struct ConvOut {
  Floats qkv, decay, beta, window;
  bool operator==(const ConvOut&) const = default;
};

struct Tokens {
  explicit Tokens(int n, std::uint32_t seed = 10)
      : u(uniform(size(n) * kChannels, -2, 2, seed)), x(eighths(size(n) * kIn, seed + 1)) {}
  Floats u, x;
};

std::vector<std::uint16_t> halves(const Floats& values) {
  std::vector<std::uint16_t> bits;
  for (const float v : values) bits.push_back(f32_to_f16(v));
  return bits;
}

// Rows of `step` are the tokens from `first` on. The windows come back as the op leaves them.
ConvOut run_conv(const TestStep& step, const Tokens& tokens, int first, const Floats& window,
                 exl3::Isa isa = exl3::Isa::kAvx512, int threads = 1) {
  const ConvWeights weights;
  const auto a = halves(weights.a), b = halves(weights.b);
  const std::size_t rows = step.rows.size();
  ConvOut out{Floats(rows * kChannels, kNan), Floats(rows * kValueHeads, kNan),
              Floats(rows * kValueHeads, kNan), window};
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  GdnConvArgs args{};
  args.step = step.view();
  args.dims = dims(kWindow);
  args.u = tokens.u.data() + size(first) * kChannels;
  args.x = tokens.x.data() + size(first) * kIn;
  args.a = {a.data(), kIn, kValueHeads};
  args.b = {b.data(), kIn, kValueHeads};
  args.conv = weights.conv.data();
  args.rate = weights.rate.data();
  args.dt_bias = weights.dt_bias.data();
  args.window = out.window.data();
  args.qkv = out.qkv.data();
  args.decay = out.decay.data();
  args.beta = out.beta.data();
  host::gdn_conv(args, context);
  return out;
}

// The window after the first `n` tokens of a sequence.
Floats window_after(const Tokens& tokens, int n) {
  Floats window(kWindow, 0.0f);
  for (int i = std::max(0, n - kTaps + 1); i < n; ++i) {
    std::copy_n(tokens.u.begin() + i * kChannels, kChannels,
                window.begin() + (i - n + kTaps - 1) * kChannels);
  }
  return window;
}

TEST(GdnConv, MatchesTheFormulaFromAPoisonedWindow) {
  constexpr int kRows = 37;
  const Tokens tokens(kRows);
  const ConvWeights w;
  TestStep step;
  step.add(0, 0, kRows);
  const ConvOut out = run_conv(step, tokens, 0, Floats(kWindow, kNan));
  double largest = 0;
  for (int t = 0; t < kRows; ++t) {
    std::vector<double> c(kChannels);
    for (int ch = 0; ch < kChannels; ++ch) {
      double sum = 0;
      for (int i = 0; i < kTaps; ++i) {
        const int from = t - (kTaps - 1) + i;
        if (from < 0) continue;
        sum += static_cast<double>(w.conv[size(ch * kTaps + i)]) *
               static_cast<double>(tokens.u[size(from * kChannels + ch)]);
      }
      c[size(ch)] = sum * sigmoid(sum);
    }
    for (int h = 0; h < 2 * kKeyHeads; ++h) {
      double squares = 0;
      for (int i = 0; i < kHead; ++i) squares += c[size(h * kHead + i)] * c[size(h * kHead + i)];
      const double scale =
          1.0 / std::sqrt(squares + 1e-6) / (h < kKeyHeads ? std::sqrt(128.0) : 1.0);
      for (int i = 0; i < kHead; ++i) c[size(h * kHead + i)] *= scale;
    }
    for (int ch = 0; ch < kChannels; ++ch) {
      ASSERT_NEAR(out.qkv[size(t * kChannels + ch)], c[size(ch)], 2e-6) << t << " " << ch;
    }
    for (int j = 0; j < kValueHeads; ++j) {
      double a = 0, b = 0;
      for (int k = 0; k < kIn; ++k) {
        const double x = static_cast<double>(tokens.x[size(t * kIn + k)]);
        a += static_cast<double>(w.a[size(j * kIn + k)]) * x;
        b += static_cast<double>(w.b[size(j * kIn + k)]) * x;
      }
      largest = std::max(largest, a);
      const std::size_t at = size(t * kValueHeads + j);
      const double x = a + static_cast<double>(w.dt_bias[size(j)]);
      const double g = -static_cast<double>(w.rate[size(j)]) * std::log1p(std::exp(x));
      ASSERT_NEAR(out.decay[at], std::exp(g), 3e-6 * std::exp(g) * (1 - g) + 1e-37);
      ASSERT_NEAR(out.beta[at], sigmoid(b), 1e-6);
    }
  }
  EXPECT_GT(largest, 22);  // beyond what softplus bends
  EXPECT_EQ(out.window, window_after(tokens, kRows));
}

// Products that do round: the gates stand on the bits of `dense`.
TEST(GdnConv, GatesHaveTheProductsOfDense) {
  constexpr int kRows = 5;
  Tokens tokens(kRows);
  tokens.x = uniform(size(kRows) * kIn, -2, 2, 20);
  const ConvWeights w;
  const auto a = halves(w.a), b = halves(w.b);
  Floats ax(size(kRows) * kValueHeads, kNan), bx = ax;
  TestStep step;
  step.add(0, 0, kRows);
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  DenseArgs dense{};
  dense.rows = {&step.head.rows, 1, kRows};
  dense.x = tokens.x.data();
  dense.n = 2;
  dense.w[0] = {a.data(), kIn, kValueHeads};
  dense.w[1] = {b.data(), kIn, kValueHeads};
  dense.y[0] = ax.data();
  dense.y[1] = bx.data();
  host::dense(dense, context);
  const ConvOut out = run_conv(step, tokens, 0, Floats(kWindow, kNan));
  for (std::size_t i = 0; i < ax.size(); ++i) {
    const std::size_t j = i % kValueHeads;
    EXPECT_EQ(out.decay[i], math::exp(-(w.rate[j] * math::softplus(ax[i] + w.dt_bias[j]))));
    EXPECT_EQ(out.beta[i], math::sigmoid(bx[i]));
  }
}

TEST(GdnConv, TinyVectorsAreNormedWithTheEpsilonInTheSum) {
  Tokens tokens(1);
  for (float& u : tokens.u) u *= 1e-5f;
  TestStep step;
  step.add(0, 0, 1);
  const ConvOut out = run_conv(step, tokens, 0, Floats(kWindow, kNan));
  double squares = 0;  // of the first key head
  for (int i = 0; i < kHead; ++i) {
    squares += std::pow(static_cast<double>(out.qkv[size(kKeyHeads * kHead + i)]), 2);
  }
  EXPECT_LT(squares, 1e-2);  // nearly 1 if the epsilon were not there, or of the mean
  EXPECT_GT(squares, 1e-5);
}

TEST(GdnConv, EverySplitOfASequenceGivesTheSameBits) {
  constexpr int kRows = 23;
  const Tokens tokens(kRows);
  TestStep whole;
  whole.add(0, 0, kRows);
  const ConvOut want = run_conv(whole, tokens, 0, Floats(kWindow, kNan));
  for (int cut = 1; cut < kRows; ++cut) {
    TestStep head;
    head.add(0, 0, cut);
    ConvOut got = run_conv(head, tokens, 0, Floats(kWindow, kNan));
    ASSERT_EQ(got.window, window_after(tokens, cut));
    TestStep tail;
    tail.add(0, cut, kRows - cut);
    const ConvOut rest = run_conv(tail, tokens, cut, got.window);
    got.window = rest.window;
    got.qkv.insert(got.qkv.end(), rest.qkv.begin(), rest.qkv.end());
    got.decay.insert(got.decay.end(), rest.decay.begin(), rest.decay.end());
    got.beta.insert(got.beta.end(), rest.beta.begin(), rest.beta.end());
    ASSERT_TRUE(got == want) << "cut at " << cut;
  }
}

TEST(GdnConv, OtherLanesThreadsAndInstructionSetsKeepTheBits) {
  const Tokens tokens(30);
  // Rows 0..18 start a sequence; rows 19..29 continue another one in slot 1.
  TestStep both;
  both.add(0, 0, 19, 0, 0).add(1, 40, 11, 1, 1);
  Floats windows(2 * kWindow, kNan);
  const Floats other = uniform(kWindow, -2, 2, 77);
  std::copy(other.begin(), other.end(), windows.begin() + kWindow);
  const ConvOut want = run_conv(both, tokens, 0, windows, exl3::Isa::kScalar);
  for (const exl3::Isa isa : kIsas) {
    for (const int threads : {1, 2, 3}) {
      EXPECT_TRUE(run_conv(both, tokens, 0, windows, isa, threads) == want);
    }
  }
  // The same slots once moved: neither window is lost, both are written.
  TestStep moved;
  moved.add(0, 0, 19, 0, 2).add(1, 40, 11, 1, 3);
  Floats four(windows);
  four.resize(4 * kWindow, kNan);
  const ConvOut apart = run_conv(moved, tokens, 0, four);
  EXPECT_EQ(apart.qkv, want.qkv);
  EXPECT_TRUE(
      std::equal(want.window.begin(), want.window.end(), apart.window.begin() + 2 * kWindow));
  EXPECT_TRUE(std::equal(other.begin(), other.end(), apart.window.begin() + kWindow));
  TestStep alone;
  alone.add(0, 40, 11, 0, 0);
  const ConvOut second = run_conv(alone, tokens, 19, other);
  EXPECT_TRUE(std::equal(second.qkv.begin(), second.qkv.end(), want.qkv.begin() + 19 * kChannels));
  EXPECT_TRUE(
      std::equal(second.decay.begin(), second.decay.end(), want.decay.begin() + 19 * kValueHeads));
}

// ---- the gated norm
// ------------------------------------------------------------------------------------------

Floats run_gate(const Floats& o, const Floats& z, const Floats& w, bool silu, exl3::Isa isa,
                int threads = 1) {
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  Floats y(o.size(), kNan);
  const auto rows = static_cast<std::int32_t>(o.size() / (kValueHeads * kHead));
  GdnGateArgs args{};
  args.rows = {&rows, 1, rows};
  args.o = o.data();
  args.z = z.data();
  args.w = w.data();
  args.y = y.data();
  args.eps = 1e-6f;
  args.v_heads = kValueHeads;
  args.silu_gate = silu ? 1 : 0;
  host::gdn_gate(args, context);
  return y;
}

TEST(GdnGate, MatchesTheFormula) {
  const std::size_t n = 9 * kValueHeads * kHead;
  const Floats o = uniform(n, -3, 3, 5);
  const Floats z = uniform(n, -8, 8, 6);
  const Floats w = uniform(kHead, 0.2f, 2, 7);
  for (const bool silu : {false, true}) {
    const Floats y = run_gate(o, z, w, silu, exl3::Isa::kScalar);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t first = i / kHead * kHead;
      double squares = 0;
      for (std::size_t c = 0; c < kHead; ++c) {
        squares += std::pow(static_cast<double>(o[first + c]), 2);
      }
      const double x = static_cast<double>(z[i]);
      const double gate = silu ? x * sigmoid(x) : sigmoid(x);
      const double want = static_cast<double>(o[i]) / std::sqrt(squares / kHead + 1e-6) *
                          static_cast<double>(w[i % kHead]) * gate;
      ASSERT_NEAR(y[i], want, 2e-6 * std::abs(want) + 1e-12) << i;
    }
    for (const exl3::Isa isa : kIsas) EXPECT_EQ(run_gate(o, z, w, silu, isa, 2), y);
  }
}

// With o = w = 1 only the gate is left: the vector forms of exp, sigmoid and silu are the scalar
// ones of math.h, bit for bit.
TEST(GdnGate, VectorGatesHaveTheBitsOfTheScalarOnes) {
  const std::size_t n = 40 * kValueHeads * kHead;
  Floats z = uniform(n, -100, 100, 8);
  const float special[] = {
      0.0f,   -0.0f,       1e-40f, -1e-40f, 87.0f,
      -87.0f, 88.1f,       -1e30f, 1e30f,   std::numeric_limits<float>::infinity(),
      1e-8f,  -0.34657359f};
  std::copy(std::begin(special), std::end(special), z.begin());
  const float r = math::rsqrt(1.0f + 1e-6f);
  for (const exl3::Isa isa : kIsas) {
    const Floats y = run_gate(Floats(n, 1.0f), z, Floats(kHead, 1.0f), false, isa);
    const Floats s = run_gate(Floats(n, 1.0f), z, Floats(kHead, 1.0f), true, isa);
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(math::to_bits(y[i]), math::to_bits(r * math::sigmoid(z[i]))) << z[i];
      ASSERT_EQ(math::to_bits(s[i]), math::to_bits(r * math::silu(z[i]))) << z[i];
    }
  }
  const Floats nan = run_gate(Floats(kValueHeads * kHead, 1.0f), Floats(kValueHeads * kHead, kNan),
                              Floats(kHead, 1.0f), false, exl3::Isa::kAvx512);
  EXPECT_TRUE(std::isnan(nan[17]));
}

}  // namespace
}  // namespace flashnext
