// The token recurrence on the host against spec/model.md 3 in double precision, in both forms, and
// on bits against itself over every split, lane, thread count and instruction set.
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
using Doubles = std::vector<double>;

constexpr int kHead = 128;
constexpr int kKeyHeads = 2;
constexpr int kValueHeads = 6;
constexpr int kChannels = (2 * kKeyHeads + kValueHeads) * kHead;
constexpr std::size_t kMatrix = kValueHeads * kHead * kHead;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

struct Tokens {
  explicit Tokens(int n, std::uint32_t seed = 20)
      : qkv(uniform(size(n) * kChannels, -1, 1, seed)),
        decay(uniform(size(n) * kValueHeads, 0.6f, 1, seed + 1)),
        beta(uniform(size(n) * kValueHeads, 0, 1, seed + 2)) {
    // Unit keys, as the convolution leaves them: else the recurrence grows without bound.
    for (int row = 0; row < n * kChannels / kHead; ++row) {
      if (row % (kChannels / kHead) >= 2 * kKeyHeads) continue;
      float* x = qkv.data() + row * kHead;
      float squares = 0;
      for (int i = 0; i < kHead; ++i) squares += x[i] * x[i];
      for (int i = 0; i < kHead; ++i) x[i] /= std::sqrt(squares);
    }
  }
  double q(int t, int head, int i) const { return at(t, head / 3 * kHead + i); }
  double k(int t, int head, int i) const { return at(t, (kKeyHeads + head / 3) * kHead + i); }
  double v(int t, int head, int i) const { return at(t, (2 * kKeyHeads + head) * kHead + i); }
  double at(int t, int c) const { return static_cast<double>(qkv[size(t * kChannels + c)]); }
  double d(int t, int head) const {
    return static_cast<double>(decay[size(t * kValueHeads + head)]);
  }
  double b(int t, int head) const {
    return static_cast<double>(beta[size(t * kValueHeads + head)]);
  }
  Floats qkv, decay, beta;
};

// Runs the rows of `step`, which are the tokens from `first` on; returns o.
Floats run(const TestStep& step, const Tokens& tokens, int first, Floats& state,
           exl3::Isa isa = exl3::Isa::kAvx512, int threads = 1) {
  Floats o(step.rows.size() * kValueHeads * kHead, kNan);
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  GdnRecurArgs args{};
  args.step = step.view();
  args.dims = {kKeyHeads, kValueHeads, kHead, 4, static_cast<std::int64_t>(kMatrix)};
  args.qkv = tokens.qkv.data() + size(first) * kChannels;
  args.decay = tokens.decay.data() + size(first) * kValueHeads;
  args.beta = tokens.beta.data() + size(first) * kValueHeads;
  args.state = state.data();
  args.o = o.data();
  host::gdn_recur(args, context);
  return o;
}

Floats slot(const Floats& state, int i) {
  const auto first = state.begin() + static_cast<std::ptrdiff_t>(size(i) * kMatrix);
  return Floats(first, first + kMatrix);
}

// The decode form of one head in double precision: o (rows, 128), m (128, 128) in place.
Doubles recurrence(const Tokens& tokens, int rows, int head, Doubles& m) {
  Doubles o(size(rows) * kHead);
  for (int t = 0; t < rows; ++t) {
    for (double& x : m) x *= tokens.d(t, head);
    for (int c = 0; c < kHead; ++c) {
      double seen = 0;
      for (int i = 0; i < kHead; ++i) seen += m[size(i * kHead + c)] * tokens.k(t, head, i);
      const double delta = tokens.b(t, head) * (tokens.v(t, head, c) - seen);
      double sum = 0;
      for (int i = 0; i < kHead; ++i) {
        m[size(i * kHead + c)] += tokens.k(t, head, i) * delta;
        sum += m[size(i * kHead + c)] * tokens.q(t, head, i);
      }
      o[size(t * kHead + c)] = sum;
    }
  }
  return o;
}

// The chunk form, one chunk: forward substitution of (I + A) U = diag(beta) V and
// (I + A) Y = diag(beta exp(G)) K.
Doubles chunk(const Tokens& tokens, int rows, int head, Doubles& m) {
  Doubles total(size(rows));  // G
  double g = 0;
  for (int t = 0; t < rows; ++t) total[size(t)] = g += std::log(tokens.d(t, head));
  const auto dot = [&](bool query, int i, int k) {
    double sum = 0;
    for (int c = 0; c < kHead; ++c) {
      sum += (query ? tokens.q(i, head, c) : tokens.k(i, head, c)) * tokens.k(k, head, c);
    }
    return sum;
  };
  Doubles u(size(rows) * kHead), y(size(rows) * kHead);
  for (int i = 0; i < rows; ++i) {
    const double beta = tokens.b(i, head);
    for (int c = 0; c < kHead; ++c) {
      u[size(i * kHead + c)] = beta * tokens.v(i, head, c);
      y[size(i * kHead + c)] = beta * std::exp(total[size(i)]) * tokens.k(i, head, c);
    }
    for (int k = 0; k < i; ++k) {
      const double a = beta * std::exp(total[size(i)] - total[size(k)]) * dot(false, i, k);
      for (int c = 0; c < kHead; ++c) {
        u[size(i * kHead + c)] -= a * u[size(k * kHead + c)];
        y[size(i * kHead + c)] -= a * y[size(k * kHead + c)];
      }
    }
  }
  Doubles o(size(rows) * kHead);
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < kHead; ++c) {
      double old = 0;
      for (int j = 0; j < kHead; ++j) old += y[size(i * kHead + j)] * m[size(j * kHead + c)];
      u[size(i * kHead + c)] -= old;  // V'
      double read = 0;
      for (int j = 0; j < kHead; ++j) read += m[size(j * kHead + c)] * tokens.q(i, head, j);
      o[size(i * kHead + c)] = std::exp(total[size(i)]) * read;
    }
    for (int k = 0; k <= i; ++k) {
      const double w = std::exp(total[size(i)] - total[size(k)]) * dot(true, i, k);
      for (int c = 0; c < kHead; ++c) o[size(i * kHead + c)] += w * u[size(k * kHead + c)];
    }
  }
  for (double& x : m) x *= std::exp(g);
  for (int k = 0; k < rows; ++k) {
    for (int j = 0; j < kHead; ++j) {
      const double w = std::exp(g - total[size(k)]) * tokens.k(k, head, j);
      for (int c = 0; c < kHead; ++c) m[size(j * kHead + c)] += w * u[size(k * kHead + c)];
    }
  }
  return o;
}

TEST(GdnRecur, MatchesTheDecodeFormAndTheChunkFormFromAnyState) {
  constexpr int kRows = 70;
  const Tokens tokens(kRows);
  const Floats start = uniform(kMatrix, -1, 1, 30);
  Floats state = start;
  state.resize(2 * kMatrix, kNan);
  TestStep step;
  step.add(0, 5, kRows, 0, 1);
  const Floats o = run(step, tokens, 0, state);
  EXPECT_EQ(slot(state, 0), start) << "the state that is read stays as it is";
  const Floats end = slot(state, 1);
  for (int head = 0; head < kValueHeads; ++head) {
    const auto first = start.begin() + head * kHead * kHead;
    Doubles by_token(first, first + kHead * kHead);
    Doubles by_chunk = by_token;
    const Doubles want = recurrence(tokens, kRows, head, by_token);
    const Doubles also = chunk(tokens, kRows, head, by_chunk);
    for (int t = 0; t < kRows; ++t) {
      for (int c = 0; c < kHead; ++c) {
        const double got = static_cast<double>(o[size((t * kValueHeads + head) * kHead + c)]);
        ASSERT_NEAR(got, want[size(t * kHead + c)], 3e-6) << t << " " << head << " " << c;
        ASSERT_NEAR(got, also[size(t * kHead + c)], 3e-6) << t << " " << head << " " << c;
      }
    }
    for (int i = 0; i < kHead * kHead; ++i) {
      ASSERT_NEAR(end[size(head * kHead * kHead + i)], by_token[size(i)], 3e-6);
      ASSERT_NEAR(end[size(head * kHead * kHead + i)], by_chunk[size(i)], 3e-6);
    }
  }
}

TEST(GdnRecur, EverySplitOfASequenceGivesTheSameBits) {
  constexpr int kRows = 21;
  const Tokens tokens(kRows);
  Floats state(3 * kMatrix, kNan);  // at position 0 whatever the slot holds is zero
  TestStep whole;
  whole.add(0, 0, kRows, 0, 0);
  const Floats want = run(whole, tokens, 0, state);
  const Floats end = slot(state, 0);
  EXPECT_TRUE(std::none_of(want.begin(), want.end(), [](float x) { return std::isnan(x); }));
  for (int cut = 1; cut < kRows; ++cut) {
    // Odd cuts chain through other slots, even ones stay in place.
    const int to = cut % 2 == 0 ? 0 : 1;
    Floats chained(3 * kMatrix, kNan);
    TestStep head, tail;
    head.add(0, 0, cut, 0, to);
    tail.add(0, cut, kRows - cut, to, 2 * to);
    Floats got = run(head, tokens, 0, chained);
    const Floats rest = run(tail, tokens, cut, chained);
    got.insert(got.end(), rest.begin(), rest.end());
    ASSERT_EQ(got, want) << "cut at " << cut;
    ASSERT_EQ(slot(chained, 2 * to), end) << "cut at " << cut;
  }
}

TEST(GdnRecur, OtherLanesThreadsAndInstructionSetsKeepTheBits) {
  const Tokens tokens(20);
  const Floats other = uniform(kMatrix, -1, 1, 31);
  const auto fresh = [&] {
    Floats state(3 * kMatrix, kNan);
    std::copy(other.begin(), other.end(), state.begin() + kMatrix);
    return state;
  };
  TestStep both;
  both.add(0, 0, 13, 0, 0).add(1, 9, 7, 1, 2);
  Floats state = fresh();
  const Floats want = run(both, tokens, 0, state, exl3::Isa::kScalar);
  for (const exl3::Isa isa : kIsas) {
    for (const int threads : {1, 2, 3}) {
      Floats again = fresh();
      EXPECT_EQ(run(both, tokens, 0, again, isa, threads), want);
      EXPECT_EQ(slot(again, 0), slot(state, 0));
      EXPECT_EQ(slot(again, 2), slot(state, 2));
    }
  }
  TestStep alone;
  alone.add(0, 9, 7, 0, 0);
  Floats single = other;
  const Floats o = run(alone, tokens, 13, single);
  EXPECT_TRUE(std::equal(o.begin(), o.end(), want.begin() + 13 * kValueHeads * kHead));
  EXPECT_EQ(single, slot(state, 2));
}

}  // namespace
}  // namespace flashnext
