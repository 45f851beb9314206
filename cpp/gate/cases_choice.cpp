// Cases of what chooses and sums: router, expert sum, sampler.
#include "cpp/base/half.h"
#include "cpp/gate/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashnext::gate {

namespace {

// (out, in): in every 64 columns one value n / 8, |n| <= 8.
std::vector<std::uint16_t> sparse_weights(Random& random, std::int32_t out, std::int32_t in) {
  std::vector<std::uint16_t> w(z(out) * z(in));
  for (std::int32_t o = 0; o < out; ++o) {
    for (std::int32_t k = 0; k < in; k += 64) {
      w[z(o) * z(in) + z(k + random.below(64))] =
          f32_to_f16(static_cast<float>(random.below(17) - 8) / 8.0f);
    }
  }
  return w;
}

}  // namespace

Case route_case(const Dims& d, std::int32_t rows, bool normalise, RouteKind kind) {
  Random random(5);
  Case c;
  c.op = Op::kRoute;
  const char* kinds[] = {"", " ties", " forced"};
  c.name = std::string("route ") + d.name + (normalise ? " normalised" : "") +
           kinds[static_cast<int>(kind)];
  c.rows = rows;
  // Values n / 2^14 with 15 bits take both halves of an activation; -1, 0, 1 make ties.
  std::vector<float> x(z(rows) * z(d.dim));
  for (float& v : x) {
    v = kind == RouteKind::kTies ? static_cast<float>(random.below(3) - 1)
                                 : static_cast<float>(random.below(32767) - 16383) * 0x1p-14f;
  }
  if (kind == RouteKind::kTies) std::fill_n(x.begin(), d.dim, 0.0f);  // row 0: all equal
  std::vector<std::int32_t> forced(z(rows) * z(d.top_k));
  for (std::int32_t r = 0; r < rows; ++r) {
    for (std::int32_t k = 0; k < d.top_k; ++k) {
      // Every third row chooses for itself.
      forced[z(r) * z(d.top_k) + z(k)] = r % 3 == 1 ? -1 : (131 * r + 7 * k) % d.experts;
    }
  }
  const auto x_at = c.add("x", x, z(d.dim));
  const auto router = c.add("router", sparse_weights(random, d.experts, d.dim));
  const auto gate_w = c.add("shared_gate", sparse_weights(random, 1, d.dim));
  const auto forced_at = c.add("forced", forced, z(d.top_k));
  const auto ids = c.out<std::int32_t>("ids", z(d.top_k));
  const auto weights = c.out<float>("weights", z(d.top_k));
  const auto gate = c.out<float>("gate", 1);
  // The first is the op's ticket and must be zero again.
  const auto ticket = c.add_output("ticket", std::vector<std::int32_t>(z(rows)), 1, 0);
  c.launch = [=](const Placed& p) {
    RouteArgs a{};
    a.rows = p.count();
    a.x = p.at<float>(x_at);
    a.router = {p.at<std::uint16_t>(router), d.dim, d.experts};
    a.shared_gate = {p.at<std::uint16_t>(gate_w), d.dim, 1};
    a.forced = kind == RouteKind::kForced ? p.at<std::int32_t>(forced_at) : nullptr;
    a.ids = p.at<std::int32_t>(ids);
    a.weights = p.at<float>(weights);
    a.gate = p.at<float>(gate);
    a.top_k = d.top_k;
    a.normalise = normalise ? 1 : 0;
    a.ticket = p.at<std::int32_t>(ticket);
    enqueue(p, a);
  };
  return c;
}

Case combine_case(const Dims& d, std::int32_t rows) {
  Random random(6);
  Case c;
  c.op = Op::kCombine;
  c.name = std::string("combine ") + d.name;
  c.rows = rows;
  const auto slots = z(d.top_k) * z(d.dim);
  const auto slot_y = c.add("slot_y", random.floats(z(rows) * slots), slots);
  const auto weights = c.add("weights", random.floats(z(rows) * z(d.top_k)), z(d.top_k));
  const auto shared_y = c.add("shared_y", random.floats(z(rows) * z(d.dim)), z(d.dim));
  const auto gate = c.add("shared_gate", random.floats(z(rows), 3.0f), 1);
  const auto y = c.out<float>("y", z(d.dim));
  c.launch = [=](const Placed& p) {
    CombineArgs a{p.count(),
                  p.at<float>(slot_y),
                  p.at<float>(weights),
                  p.at<float>(shared_y),
                  p.at<float>(gate),
                  p.at<float>(y),
                  d.top_k,
                  d.dim};
    enqueue(p, a);
  };
  return c;
}

Case sample_case(const Dims& d, std::int32_t rows, std::int32_t limit, bool coarse) {
  Random random(15);
  Case c;
  c.op = Op::kSample;
  c.name = std::string("sample ") + d.name + (coarse ? " ties" : "");
  c.rows = rows;
  std::vector<float> logits = random.floats(z(rows) * z(d.vocab), 3.0f);
  if (coarse) {
    for (float& l : logits) l = std::round(l * 2.0f) * 0.5f;
  }
  std::vector<SampleParams> params(z(rows));
  for (std::int32_t r = 0; r < rows; ++r) {
    SampleParams& p = params[z(r)];
    p.seed = 77u + z(r) * std::uint64_t{0x123456789AB};
    const float temperatures[] = {0.0f, 1.0f, 0.3f, 2.5f};
    p.temperature = temperatures[r % 4];
    p.top_p = r % 3 == 1 ? 0.9f : r % 7 == 5 ? 0.0f : 1.0f;
    p.min_p = r % 5 == 2 ? 0.05f : r % 11 == 6 ? 1.0f : 0.0f;
    p.top_k = r % 6 == 3 ? 40 : r % 13 == 9 ? 1 : 0;
    p.position = 5 * r;
    float* row = logits.data() + z(r) * z(d.vocab);
    for (std::int32_t i = limit; i < d.vocab; ++i) row[i] = 1000.0f;  // padding, never drawn
    if (r % 17 == 14) row[limit / 2] = std::numeric_limits<float>::quiet_NaN();
    if (r % 17 == 15) row[limit / 3] = std::numeric_limits<float>::infinity();
    if (r % 17 == 16) row[limit / 3] = -std::numeric_limits<float>::infinity();
    if (r % 4 == 0) row[3] = row[limit - 1] = 100.0f;  // a tie at the top
  }
  const auto logits_at = c.add("logits", logits, z(d.vocab));
  const auto params_at = c.add("params", params, 1);
  const auto tokens = c.out<std::int32_t>("tokens", 1);
  c.launch = [=](const Placed& p) {
    SampleArgs a{};
    a.step.head = p.head;
    a.step.sampling = p.at<SampleParams>(params_at);
    a.step.max_rows = a.step.max_outputs = p.max_rows;
    a.logits = p.at<float>(logits_at);
    a.tokens = p.at<std::int32_t>(tokens);
    a.vocab = d.vocab;
    a.limit = limit;
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::gate
