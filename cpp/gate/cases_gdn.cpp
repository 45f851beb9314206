// Cases of Gated DeltaNet: convolution with gates and window, the recurrence over states, the gated
// norm.
#include "cpp/gate/cases.h"

#include <cmath>

namespace flashnext::gate {

namespace {

constexpr std::int32_t kHead = 128;
constexpr std::int32_t kTaps = 4;

std::vector<float> uniform(Random& random, std::size_t n, float low, float high) {
  std::vector<float> v(n);
  for (float& x : v) x = random.uniform(low, high);
  return v;
}

std::string shape_name(std::int32_t k_heads, std::int32_t v_heads, std::size_t segments) {
  return " " + std::to_string(k_heads) + " and " + std::to_string(v_heads) + " heads, " +
         std::to_string(segments) + " sequences";
}

void view_step(const Placed& p, std::size_t rows, std::size_t segments, std::int32_t max_segments,
               StepView& step) {
  step.head = p.head;
  step.rows = p.at<Row>(rows);
  step.segments = p.at<Segment>(segments);
  step.max_rows = p.max_rows;
  step.max_segments = max_segments;
}

}  // namespace

Case gdn_conv_case(std::int32_t k_heads, std::int32_t v_heads, std::int32_t in,
                   const std::vector<std::int32_t>& lengths, bool in_place) {
  Random random(41);
  Case c;
  c.op = Op::kGdnConv;
  c.name = "gdn_conv" + shape_name(k_heads, v_heads, lengths.size()) + ", in " +
           std::to_string(in) + (in_place ? ", in place" : "");
  Segmented s = make_segments(lengths);
  if (in_place) {
    for (Segment& segment : s.segments) segment.state_out = segment.state_in;
  }
  c.rows = static_cast<std::int32_t>(s.rows.size());
  c.segments = static_cast<std::int32_t>(s.segments.size());
  const std::int32_t channels = (2 * k_heads + v_heads) * kHead;
  const std::int64_t stride = std::int64_t{kTaps - 1} * channels + 8;
  const float scale = 2.0f / std::sqrt(static_cast<float>(in));
  const auto rows_at = c.add("rows", s.rows);
  const auto segments = c.add("segments", s.segments);
  const auto u = c.add("u", uniform(random, z(c.rows) * z(channels), -1.5f, 1.5f));
  const auto x = c.add("x", random.floats(z(c.rows) * z(in)));
  const auto a_at = c.add("a", random.halves(z(v_heads) * z(in), scale));
  const auto b_at = c.add("b", random.halves(z(v_heads) * z(in), scale));
  const auto conv = c.add("conv", uniform(random, z(channels) * kTaps, -1, 1));
  const auto rate = c.add("rate", uniform(random, z(v_heads), 0.01f, 0.5f));
  const auto dt_bias = c.add("dt_bias", uniform(random, z(v_heads), -1, 1));
  const auto window =
      c.add_output("window", uniform(random, z(2 * c.segments) * z(stride), -1.5f, 1.5f), 0, 0);
  const auto qkv = c.out<float>("qkv", z(channels), 2e-6);
  const auto decay = c.out<float>("decay", z(v_heads), kProductTolerance);
  const auto beta = c.out<float>("beta", z(v_heads), kProductTolerance);
  const std::int32_t max_segments = c.segments;
  c.launch = [=](const Placed& p) {
    GdnConvArgs a{};
    view_step(p, rows_at, segments, max_segments, a.step);
    a.dims = {k_heads, v_heads, kHead, kTaps, stride};
    a.u = p.at<float>(u);
    a.x = p.at<float>(x);
    a.a = {p.at<std::uint16_t>(a_at), in, v_heads};
    a.b = {p.at<std::uint16_t>(b_at), in, v_heads};
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

Case gdn_recur_case(std::int32_t k_heads, std::int32_t v_heads,
                    const std::vector<std::int32_t>& lengths) {
  Random random(42);
  Case c;
  c.op = Op::kGdnRecur;
  c.name = "gdn_recur" + shape_name(k_heads, v_heads, lengths.size());
  const Segmented s = make_segments(lengths);
  c.rows = static_cast<std::int32_t>(s.rows.size());
  c.segments = static_cast<std::int32_t>(s.segments.size());
  const std::int32_t channels = (2 * k_heads + v_heads) * kHead;
  const std::int64_t stride = std::int64_t{v_heads} * kHead * kHead + 8;
  const auto rows_at = c.add("rows", s.rows);
  const auto segments = c.add("segments", s.segments);
  // Unit keys, queries of the scale that the convolution gives.
  const auto qkv = c.add("qkv", random.floats(z(c.rows) * z(channels), 0.0884f));
  const auto decay = c.add("decay", uniform(random, z(c.rows) * z(v_heads), 0.5f, 1.0f));
  const auto beta = c.add("beta", uniform(random, z(c.rows) * z(v_heads), 0.0f, 1.0f));
  const auto state =
      c.add_output("state", random.floats(z(2 * c.segments) * z(stride), 0.1f), 0, 1e-5);
  const auto o = c.out<float>("o", z(v_heads) * kHead, 1e-5);
  const std::int32_t max_segments = c.segments;
  c.launch = [=](const Placed& p) {
    GdnRecurArgs a{};
    view_step(p, rows_at, segments, max_segments, a.step);
    a.dims = {k_heads, v_heads, kHead, kTaps, stride};
    a.qkv = p.at<float>(qkv);
    a.decay = p.at<float>(decay);
    a.beta = p.at<float>(beta);
    a.state = p.at<float>(state);
    a.o = p.at<float>(o);
    enqueue(p, a);
  };
  return c;
}

Case gdn_gate_case(std::int32_t v_heads, std::int32_t rows, bool silu) {
  Random random(43);
  Case c;
  c.op = Op::kGdnGate;
  c.name = std::string("gdn_gate ") + (silu ? "silu" : "sigmoid");
  c.rows = rows;
  const std::size_t width = z(v_heads) * kHead;
  const auto o = c.add("o", uniform(random, z(rows) * width, -2, 2), width);
  const auto gates = c.add("z", uniform(random, z(rows) * width, -8, 8), width);
  const auto w = c.add("w", uniform(random, kHead, 0.5f, 1.5f));
  const auto y = c.out<float>("y", width, 2e-6);
  c.launch = [=](const Placed& p) {
    GdnGateArgs a{p.count(), p.at<float>(o), p.at<float>(gates), p.at<float>(w), p.at<float>(y),
                  1e-6f,     v_heads,        silu ? 1 : 0};
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::gate
