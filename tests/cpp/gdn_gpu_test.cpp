// Gated DeltaNet on the GPU: against the host device, and bit for bit against itself whatever the
// bucket, the chunks and the other sequences of the step.
#include "cpp/base/half.h"
#include "gpu_rig.h"

#include <limits>

namespace flashnext {
namespace {

using test::difference;
using test::Rig;
using test::StepParts;
using test::uniform;
using Floats = std::vector<float>;

constexpr int kDim = 128;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Shape {
  int k_heads;
  int v_heads;
  int channels() const { return (2 * k_heads + v_heads) * kDim; }
  int in() const { return v_heads == 48 ? 2560 : 328; }  // of the gates' products
  GdnDims dims(std::int64_t slot_stride) const { return {k_heads, v_heads, kDim, 4, slot_stride}; }
};

Floats rows_of(const Floats& all, int width, int first, int n) {
  return Floats(all.begin() + std::int64_t{first} * width,
                all.begin() + std::int64_t{first + n} * width);
}

// What one sequence gives the layer.
struct Inputs {
  Inputs(Shape s, int tokens, unsigned seed)
      : shape(s),
        tokens_n(tokens),
        u(uniform(size(tokens) * size(s.channels()), -1.5f, 1.5f, seed)),
        x(uniform(size(tokens) * size(s.in()), -2, 2, seed + 1)) {}
  Shape shape;
  int tokens_n;
  Floats u, x;
};

std::vector<std::uint16_t> halves(std::size_t n, float range, unsigned seed) {
  std::vector<std::uint16_t> bits;
  for (const float v : uniform(n, -range, range, seed)) bits.push_back(f32_to_f16(v));
  return bits;
}

struct Weights {
  explicit Weights(Shape s)
      : shape(s),
        conv(uniform(size(s.channels()) * 4, -1, 1, 7)),
        rate(uniform(size(s.v_heads), 0.01f, 0.5f, 8)),
        dt_bias(uniform(size(s.v_heads), -1, 1, 9)),
        a(halves(size(s.v_heads) * size(s.in()), 3.0f / std::sqrt(static_cast<float>(s.in())), 10)),
        b(halves(size(s.v_heads) * size(s.in()), 3.0f / std::sqrt(static_cast<float>(s.in())),
                 11)) {}
  // On a device, in the arguments.
  void put(Rig& rig, GdnConvArgs& to) const {
    to.conv = rig.put(conv);
    to.rate = rig.put(rate);
    to.dt_bias = rig.put(dt_bias);
    to.a = {rig.put(a), shape.in(), shape.v_heads};
    to.b = {rig.put(b), shape.in(), shape.v_heads};
  }
  Shape shape;
  Floats conv, rate, dt_bias;
  std::vector<std::uint16_t> a, b;
};

struct Outputs {
  Floats qkv, decay, beta, o, state, window;
};

// Runs convolution and recurrence of `inputs` (one a lane, of equal length) in chunks; what leaves
// is ordered by lane, then position. Lane 0 writes the slot that it reads; the others alternate.
// Slots hold NaN until the op writes them.
Outputs run(Rig rig, const std::vector<Inputs>& inputs, int chunk, int max_rows) {
  const Shape shape = inputs[0].shape;
  const int c = shape.channels();
  const int lanes = static_cast<int>(inputs.size());
  const std::int64_t window_stride = 3 * c + 8;
  const std::int64_t state_stride = std::int64_t{shape.v_heads} * kDim * kDim + 8;
  GdnConvArgs k{};
  Weights(shape).put(rig, k);
  float* state = rig.put(Floats(size(2 * lanes * state_stride), kNan));
  k.window = rig.put(Floats(size(2 * lanes * window_stride), kNan));
  std::vector<Outputs> of_lane(size(lanes));
  const int tokens = inputs[0].tokens_n;
  int turn = 0;
  for (int first = 0; first < tokens; first += chunk, ++turn) {
    const int n = std::min(chunk, tokens - first);
    StepParts parts;
    parts.max_rows = max_rows;
    Floats u, x;
    for (int l = 0; l < lanes; ++l) {
      const int in = l == 0 ? 0 : 2 * l + turn % 2;
      const int out = l == 0 ? 0 : 2 * l + (turn + 1) % 2;
      parts.segments.push_back({0, n, first, l, in, out});
      const Inputs& from = inputs[size(l)];
      for (const auto& [all, to, width] :
           {std::tuple{&from.u, &u, c}, std::tuple{&from.x, &x, shape.in()}}) {
        const Floats part = rows_of(*all, width, first, n);
        to->insert(to->end(), part.begin(), part.end());
      }
    }
    const StepView step = parts.on(rig);
    const std::size_t rows = size(parts.rows());
    k.step = step;
    k.dims = shape.dims(window_stride);
    k.u = rig.put(u);
    k.x = rig.put(x);
    k.qkv = rig.put(Floats(rows * size(c), kNan));
    k.decay = rig.put(Floats(rows * size(shape.v_heads), kNan));
    k.beta = rig.put(Floats(rows * size(shape.v_heads), kNan));
    rig.run(k);
    GdnRecurArgs m{};
    m.step = step;
    m.dims = shape.dims(state_stride);
    m.qkv = k.qkv;
    m.decay = k.decay;
    m.beta = k.beta;
    m.state = state;
    m.o = rig.put(Floats(rows * size(shape.v_heads) * kDim, kNan));
    rig.run(m);
    const Floats qkv = rig.get(k.qkv, rows * size(c));
    const Floats decay = rig.get(k.decay, rows * size(shape.v_heads));
    const Floats beta = rig.get(k.beta, rows * size(shape.v_heads));
    const Floats o = rig.get(m.o, rows * size(shape.v_heads) * kDim);
    for (int l = 0; l < lanes; ++l) {
      Outputs& to = of_lane[size(l)];
      for (const auto& [all, out, width] :
           {std::tuple{&qkv, &to.qkv, c}, std::tuple{&decay, &to.decay, shape.v_heads},
            std::tuple{&beta, &to.beta, shape.v_heads},
            std::tuple{&o, &to.o, shape.v_heads * kDim}}) {
        const Floats part = rows_of(*all, width, l * n, n);
        out->insert(out->end(), part.begin(), part.end());
      }
    }
  }
  const Floats states = rig.get(state, size(2 * lanes * state_stride));
  const Floats windows = rig.get(k.window, size(2 * lanes * window_stride));
  Outputs all;
  for (int l = 0; l < lanes; ++l) {
    const std::int64_t slot = l == 0 ? 0 : 2 * l + turn % 2;
    const auto begin = states.begin() + slot * state_stride;
    Outputs& one = of_lane[size(l)];
    one.state = Floats(begin, begin + state_stride - 8);
    const auto pushed = windows.begin() + slot * window_stride;
    one.window = Floats(pushed, pushed + 3 * c);
    for (const auto& [to, from] :
         {std::pair{&all.qkv, &one.qkv}, std::pair{&all.decay, &one.decay},
          std::pair{&all.beta, &one.beta}, std::pair{&all.o, &one.o},
          std::pair{&all.state, &one.state}, std::pair{&all.window, &one.window}}) {
      to->insert(to->end(), from->begin(), from->end());
    }
  }
  return all;
}

void expect_close(const Outputs& got, const Outputs& want) {
  EXPECT_LE(difference(got.qkv, want.qkv), 2e-6);
  EXPECT_LE(difference(got.decay, want.decay), 3e-6);
  EXPECT_LE(difference(got.beta, want.beta), 3e-6);
  EXPECT_LE(difference(got.o, want.o), 1e-5);
  EXPECT_LE(difference(got.state, want.state), 1e-5);
  EXPECT_TRUE(got.window == want.window);
}

void expect_equal(const Outputs& got, const Outputs& want) {
  EXPECT_TRUE(got.qkv == want.qkv);
  EXPECT_TRUE(got.decay == want.decay);
  EXPECT_TRUE(got.beta == want.beta);
  EXPECT_TRUE(got.o == want.o);
  EXPECT_TRUE(got.state == want.state);
  EXPECT_TRUE(got.window == want.window);
}

class GdnGpu : public test::GpuTest {};

TEST_F(GdnGpu, MatchesTheHostForEveryGroupOfHeads) {
  for (const Shape shape : {Shape{2, 6}, Shape{2, 2}, Shape{1, 2}, Shape{1, 4}, Shape{16, 48}}) {
    SCOPED_TRACE(shape.v_heads);
    const std::vector<Inputs> inputs{Inputs(shape, 37, 100)};
    expect_close(run(Rig::cuda(), inputs, 37, 0), run(Rig::host(), inputs, 37, 0));
  }
}

TEST_F(GdnGpu, ChunksAndBucketsKeepTheBits) {
  const std::vector<Inputs> inputs{Inputs({2, 6}, 150, 200)};
  const Outputs whole = run(Rig::cuda(), inputs, 150, 150);
  expect_close(whole, run(Rig::host(), inputs, 150, 150));
  expect_equal(run(Rig::cuda(), inputs, 150, 512), whole);
  EXPECT_EQ(whole.window, rows_of(inputs[0].u, inputs[0].shape.channels(), 147, 3));
  for (const auto& [chunk, bucket] : {std::pair{1, 1},
                                      {1, 8},
                                      {2, 2},
                                      {3, 4},
                                      {7, 8},
                                      {8, 8},
                                      {2, 9},
                                      {30, 32},
                                      {64, 64},
                                      {64, 128}}) {
    SCOPED_TRACE(chunk);
    expect_equal(run(Rig::cuda(), inputs, chunk, bucket), whole);
  }
}

TEST_F(GdnGpu, OtherSequencesKeepTheBits) {
  const std::vector<Inputs> inputs{Inputs({2, 6}, 70, 300), Inputs({2, 6}, 70, 310),
                                   Inputs({2, 6}, 70, 320)};
  // Together in one step of few rows or of many, alone the other way round.
  for (const auto& [chunk, bucket, alone_bucket] : {std::tuple{9, 32, 16}, {2, 8, 9}, {7, 32, 7}}) {
    SCOPED_TRACE(chunk);
    const Outputs together = run(Rig::cuda(), inputs, chunk, bucket);
    const std::size_t lane = together.o.size() / 3;
    const std::size_t state = together.state.size() / 3;
    const std::size_t window = together.window.size() / 3;
    for (std::size_t l = 0; l < 3; ++l) {
      const Outputs alone = run(Rig::cuda(), {inputs[l]}, chunk, alone_bucket);
      EXPECT_TRUE(std::equal(alone.o.begin(), alone.o.end(), together.o.begin() + l * lane));
      EXPECT_TRUE(
          std::equal(alone.state.begin(), alone.state.end(), together.state.begin() + l * state));
      EXPECT_TRUE(std::equal(alone.window.begin(), alone.window.end(),
                             together.window.begin() + l * window));
    }
  }
}

TEST_F(GdnGpu, GateMatchesTheHost) {
  for (const int silu : {0, 1}) {
    const int rows = 11, heads = 6;
    auto gate = [&](Rig rig, int max) {
      GdnGateArgs a{};
      a.rows = {rig.put(std::vector<std::int32_t>{rows}), 1, max};
      a.o = rig.put(uniform(size(rows * heads * kDim), -2, 2, 1));
      a.z = rig.put(uniform(size(rows * heads * kDim), -8, 8, 2));
      a.w = rig.put(uniform(kDim, 0.5f, 1.5f, 3));
      a.y = rig.put(Floats(size(rows * heads * kDim), kNan));
      a.eps = 1e-6f;
      a.v_heads = heads;
      a.silu_gate = silu;
      rig.run(a);
      return rig.get(a.y, size(rows * heads * kDim));
    };
    const Floats y = gate(Rig::cuda(), rows);
    EXPECT_LE(difference(y, gate(Rig::host(), rows)), 2e-6);
    EXPECT_TRUE(gate(Rig::cuda(), 64) == y);
  }
}

// Kernels that may start early must still wait for what they need: captured, replayed, with and
// without other work before them, against each op awaited on its own.
TEST_F(GdnGpu, GraphsKeepTheBits) {
  const Shape shape{16, 48};
  Rig rig = Rig::cuda();
  const Inputs inputs(shape, 3, 400);
  const std::size_t o_size = size(3 * 48 * kDim);
  const std::size_t state_size = size(48 * kDim * kDim);
  GdnConvArgs k{};
  k.step = StepParts{{{0, 3, 9, 0, 0, 1}}}.on(rig);
  k.dims = shape.dims(static_cast<std::int64_t>(state_size));
  k.u = rig.put(inputs.u);
  k.x = rig.put(inputs.x);
  Weights(shape).put(rig, k);
  k.window = rig.put(uniform(2 * state_size, -1, 1, 401));
  GdnRecurArgs m{};
  m.step = k.step;
  m.dims = k.dims;
  m.state = rig.put(uniform(2 * state_size, -0.1f, 0.1f, 402));
  GdnGateArgs g{};
  g.rows = {&k.step.head->rows, 1, 3};
  g.z = rig.put(uniform(o_size, -3, 3, 403));
  g.w = rig.put(uniform(kDim, 0.5f, 1.5f, 404));
  g.eps = 1e-6f;
  g.v_heads = 48;
  const float* y[3];
  Stream other(rig.device());
  Event forked(rig.device()), copied(rig.device());
  float* copy = rig.room<float>(o_size);
  for (int way = 0; way < 3; ++way) {
    k.qkv = rig.put(Floats(size(3 * shape.channels()), kNan));
    k.decay = rig.put(Floats(size(3 * 48), kNan));
    k.beta = rig.put(Floats(size(3 * 48), kNan));
    m.qkv = k.qkv;
    m.decay = k.decay;
    m.beta = k.beta;
    m.o = rig.put(Floats(o_size, kNan));
    g.o = m.o;
    g.y = rig.put(Floats(o_size, kNan));
    y[way] = g.y;
    if (way == 0) {
      rig.run(k);
      rig.run(m);
      rig.run(g);
      continue;
    }
    Capture capture(rig.device(), rig.stream());
    launch(rig.device(), rig.stream(), k);
    if (way == 2) {  // a copy of another stream joins between the kernels
      rig.device().record(forked.id(), rig.stream());
      rig.device().wait(other.id(), forked.id());
      rig.device().copy_async(other.id(), copy, g.z, o_size * sizeof(float));
      rig.device().record(copied.id(), other.id());
      rig.device().wait(rig.stream(), copied.id());
    }
    launch(rig.device(), rig.stream(), m);
    if (way == 2) rig.device().copy_async(rig.stream(), copy, g.z, o_size * sizeof(float));
    launch(rig.device(), rig.stream(), g);
    const Graph graph = capture.finish();
    for (int i = 0; i < 20; ++i) graph.replay(rig.stream());
    rig.device().synchronize(rig.stream());
  }
  const Floats want = rig.get(y[0], o_size);
  EXPECT_FALSE(std::isnan(want[0]));
  EXPECT_TRUE(rig.get(y[1], o_size) == want);
  EXPECT_TRUE(rig.get(y[2], o_size) == want);
}

TEST_F(GdnGpu, RefusesShapesItIsNotBuiltFor) {
  Rig rig = Rig::cuda();
  GdnRecurArgs a{};
  a.dims = {1, 5, kDim, 4, 0};
  EXPECT_THROW(launch(rig.device(), rig.stream(), a), LogicError);
  a.dims = {1, 1, 64, 4, 0};
  EXPECT_THROW(launch(rig.device(), rig.stream(), a), LogicError);
}

}  // namespace
}  // namespace flashnext
