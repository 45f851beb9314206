// A DeltaNet layer as a step has it: what makes x, the projections, the convolution with its gates,
// which may read x and the window while the projections run. Many layers in one graph, each with
// other inputs in the same buffers, against every op awaited on its own.
#include "cpp/base/half.h"
#include "gpu_rig.h"

#include <algorithm>
#include <limits>

namespace flashnext {
namespace {

using test::Rig;
using test::StepParts;
using test::uniform;
using Floats = std::vector<float>;

constexpr int kKeyHeads = 16;
constexpr int kValueHeads = 48;
constexpr int kChannels = (2 * kKeyHeads + kValueHeads) * 128;
constexpr int kIn = 2560;
constexpr int kWords = 80;
constexpr int kLayers = 24;
constexpr std::int64_t kStride = 3 * kChannels + 8;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::uint16_t* put_halves(Rig& rig, std::size_t n, float range, unsigned seed) {
  std::vector<std::uint16_t> bits;
  for (const float v : uniform(n, -range, range, seed)) bits.push_back(f32_to_f16(v));
  return rig.put(bits);
}

class GdnChainGpu : public test::GpuTest {};

TEST_F(GdnChainGpu, EarlyReadsSeeTheStepsOwnInputs) {
  Rig rig = Rig::cuda();
  std::mt19937 engine(5);
  std::vector<std::uint32_t> trellis(std::size_t{kIn / 16} * (kChannels / 16) * kWords / 2);
  for (std::uint32_t& w : trellis) w = static_cast<std::uint32_t>(engine());
  Exl3LinearArgs linear{};
  linear.n = 1;
  linear.levels = 32258;
  linear.w[0].trellis = reinterpret_cast<const std::byte*>(rig.put(trellis));
  linear.w[0].suh = reinterpret_cast<const std::byte*>(put_halves(rig, kIn, 0.05f, 1));
  linear.w[0].svh = reinterpret_cast<const std::byte*>(put_halves(rig, kChannels, 1.0f, 2));
  linear.w[0].in = kIn;
  linear.w[0].out = kChannels;
  linear.w[0].words = kWords;
  GdnConvArgs conv{};
  conv.dims = {kKeyHeads, kValueHeads, 128, 4, kStride};
  conv.a = {put_halves(rig, std::size_t{kValueHeads} * kIn, 0.06f, 3), kIn, kValueHeads};
  conv.b = {put_halves(rig, std::size_t{kValueHeads} * kIn, 0.06f, 4), kIn, kValueHeads};
  conv.conv = rig.put(uniform(std::size_t{kChannels} * 4, -1, 1, 5));
  conv.rate = rig.put(uniform(kValueHeads, 0.01f, 0.5f, 6));
  conv.dt_bias = rig.put(uniform(kValueHeads, -1, 1, 7));
  for (const std::vector<Segment>& segments : {std::vector<Segment>{{0, 1, 9, 0, 0, 0}},
                                               {{0, 2, 9, 0, 0, 1}, {0, 1, 0, 1, 2, 2}},
                                               {{0, 5, 9, 0, 0, 0}, {0, 3, 20, 1, 2, 2}},
                                               {{0, 8, 9, 0, 0, 0}, {0, 7, 0, 1, 2, 2}},
                                               {{0, 31, 9, 0, 0, 1}, {0, 1, 20, 1, 2, 2}}}) {
    const StepParts parts{segments};
    const auto rows = static_cast<std::size_t>(parts.rows());
    SCOPED_TRACE(rows);
    conv.step = parts.on(rig);
    const RowCount count{&conv.step.head->rows, 1, parts.rows()};
    // x = fe + fh of the layer.
    MtpJoinArgs join{};
    join.rows = count;
    join.num_streams = 1;
    join.dim = kIn;
    float* x = rig.put(Floats(rows * kIn, kNan));
    join.streams = x;
    std::vector<const float*> inputs;
    for (int l = 0; l < kLayers; ++l) {
      inputs.push_back(rig.put(uniform(rows * kIn, -1, 1, 100 + static_cast<unsigned>(l))));
    }
    linear.rows = count;
    linear.x = conv.x = x;
    float* u = rig.put(Floats(rows * kChannels, kNan));
    linear.y[0] = u;
    const std::size_t work = rig.device().workspace_bytes(Op::kExl3Linear, &linear);
    linear.workspace = {rig.put(std::vector<std::byte>(work + 16)), work};
    conv.u = u;
    const Floats windows = uniform(3 * kStride, -1, 1, 8);
    conv.window = rig.put(windows);
    const std::size_t qkv = rows * kChannels, gates = rows * kValueHeads;
    float* outs[2];
    Floats pushed[2];
    for (const bool graph : {false, true}) {
      float* out = rig.put(Floats(kLayers * (qkv + 2 * gates), kNan));
      outs[graph ? 1 : 0] = out;
      const auto layer = [&](int l, const auto& run) {
        join.fe = inputs[static_cast<std::size_t>(l)];
        join.fh = inputs[static_cast<std::size_t>((l + 1) % kLayers)];
        conv.qkv = out + static_cast<std::size_t>(l) * (qkv + 2 * gates);
        conv.decay = conv.qkv + qkv;
        conv.beta = conv.decay + gates;
        run(join);
        run(linear);
        run(conv);
      };
      const auto awaited = [&](const auto& args) { rig.run(args); };
      const auto enqueued = [&](const auto& args) { launch(rig.device(), rig.stream(), args); };
      rig.set(conv.window, windows);
      if (graph) {
        Capture capture(rig.device(), rig.stream());
        for (int l = 0; l < kLayers; ++l) layer(l, enqueued);
        const Graph captured = capture.finish();
        for (int i = 0; i < 10; ++i) {
          rig.set(conv.window, windows);
          captured.replay(rig.stream());
        }
        rig.device().synchronize(rig.stream());
      } else {
        for (int l = 0; l < kLayers; ++l) layer(l, awaited);
      }
      pushed[graph ? 1 : 0] = rig.get(conv.window, windows.size());
    }
    const Floats want = rig.get(outs[0], kLayers * (qkv + 2 * gates));
    EXPECT_FALSE(std::any_of(want.begin(), want.end(), [](float v) { return std::isnan(v); }));
    EXPECT_TRUE(rig.get(outs[1], want.size()) == want);
    EXPECT_TRUE(pushed[1] == pushed[0]);
  }
}

}  // namespace
}  // namespace flashnext
