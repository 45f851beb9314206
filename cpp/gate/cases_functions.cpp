// The elementary functions of cpp/base/math.h through the ops that use them, over all exponents and
// bit for bit.
#include "cpp/base/half.h"
#include "cpp/gate/cases.h"

#include <bit>
#include <cmath>

namespace flashnext::gate {

namespace {

// Every sign and exponent of normal numbers from 2^-40 to 2^9, `each` random mantissas, and zeros.
std::vector<float> all_exponents(Random& random, std::int32_t each) {
  std::vector<float> v = {0.0f, 88.0f, -88.0f, 20.0f, -20.0f};
  for (int exponent = -40; exponent <= 9; ++exponent) {
    for (std::int32_t i = 0; i < each; ++i) {
      const float x = std::ldexp(random.uniform(1.0f, 2.0f), exponent);
      v.push_back(i % 2 == 0 ? x : -x);
    }
  }
  return v;
}

}  // namespace

Case sigmoid_case() {
  Random random(61);
  Case c;
  c.op = Op::kCombine;
  c.name = "sigmoid by combine";
  constexpr std::int32_t kDim = 16;
  std::vector<float> gates = all_exponents(random, 40);
  c.rows = static_cast<std::int32_t>(gates.size());
  const auto slot_y = c.add("slot_y", std::vector<float>(gates.size() * kDim), kDim);
  const auto weights = c.add("weights", std::vector<float>(gates.size()), 1);
  const auto shared_y = c.add("shared_y", std::vector<float>(gates.size() * kDim, 1.0f), kDim);
  const auto gate_at = c.add("shared_gate", gates, 1);
  const auto y = c.out<float>("y", kDim);
  c.launch = [=](const Placed& p) {
    CombineArgs a{p.count(),
                  p.at<float>(slot_y),
                  p.at<float>(weights),
                  p.at<float>(shared_y),
                  p.at<float>(gate_at),
                  p.at<float>(y),
                  1,
                  kDim};
    enqueue(p, a);
  };
  return c;
}

Case silu_exp_softplus_case() {
  Random random(62);
  Case c;
  c.op = Op::kGdnConv;
  c.name = "silu, exp, softplus and sigmoid by gdn_conv";
  constexpr std::int32_t kHead = 128;
  constexpr std::int32_t kHeads = 48;  // value heads of one key head
  constexpr std::int32_t kChannels = (2 + kHeads) * kHead;
  constexpr std::int32_t kIn = 48;
  const std::vector<float> values = all_exponents(random, 60);
  constexpr std::int32_t kRows = 24;
  // One sequence from position 0; queries and keys are zero, so that their norms say nothing.
  Segmented s;
  s.segments.push_back({0, kRows, 0, 0, 0, 0});
  // Each gate's product picks one fp16 value of x, which leaves nothing to round; the bias of
  // softplus may be any value.
  std::vector<float> u(z(kRows) * kChannels), x(z(kRows) * kIn);
  std::vector<std::uint16_t> picks(z(kHeads) * kIn);
  std::size_t at = 0;
  for (std::int32_t r = 0; r < kRows; ++r) {
    s.rows.push_back({1, 0, 0, r, 0, 0});
    for (std::int32_t i = 2 * kHead; i < kChannels; ++i) {
      u[z(r) * kChannels + z(i)] = values[at++ % values.size()];
    }
    // The first rows have no more than the bias.
    for (std::int32_t i = 0; i < kIn && r >= kRows / 4; ++i) {
      x[z(r) * kIn + z(i)] = f16_to_f32(f32_to_f16(values[(at += 53) % values.size()]));
    }
  }
  std::vector<float> dt_bias_values(kHeads);
  for (std::int32_t h = 0; h < kHeads; ++h) {
    picks[z(h) * kIn + z(h)] = f32_to_f16(1.0f);
    dt_bias_values[z(h)] = values[(at += 67) % values.size()];
  }
  c.rows = kRows;
  c.segments = 1;
  std::vector<float> taps(z(kChannels) * 4);
  for (std::size_t i = 3; i < taps.size(); i += 4) taps[i] = 1.0f;  // the newest row alone
  const std::int64_t stride = 3 * kChannels;
  const auto rows_at = c.add("rows", s.rows);
  const auto segments = c.add("segments", s.segments);
  const auto u_at = c.add("u", u);
  const auto x_at = c.add("x", x);
  const auto picks_at = c.add("picks", picks);
  const auto conv = c.add("conv", taps);
  const auto rate = c.add("rate", std::vector<float>(kHeads, 1.0f));
  const auto dt_bias = c.add("dt_bias", dt_bias_values);
  const auto window = c.add("window", std::vector<float>(z(stride)));
  const auto qkv = c.out<float>("values", kChannels);
  const auto decay = c.out<float>("decay", kHeads);
  const auto beta = c.out<float>("beta", kHeads);
  c.launch = [=](const Placed& p) {
    GdnConvArgs a{};
    a.step.head = p.head;
    a.step.rows = p.at<Row>(rows_at);
    a.step.segments = p.at<Segment>(segments);
    a.step.max_rows = p.max_rows;
    a.step.max_segments = 1;
    a.dims = {1, kHeads, kHead, 4, stride};
    a.u = p.at<float>(u_at);
    a.x = p.at<float>(x_at);
    a.a = a.b = {p.at<std::uint16_t>(picks_at), kIn, kHeads};
    a.conv = p.at<float>(conv);
    a.rate = p.at<float>(rate);
    a.dt_bias = p.at<float>(dt_bias);
    a.window = p.at<float>(window);
    a.qkv = p.at<float>(qkv);
    a.decay = p.at<float>(decay);
    a.beta = p.at<float>(beta);
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::gate
