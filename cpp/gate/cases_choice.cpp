// Cases of what chooses and sums: router, expert sum, sampler.
#include "cpp/gate/cases.h"

#include <cmath>
#include <limits>

namespace flashnext::gate {

Case route_case(const Dims& d, std::int32_t rows, bool normalise, bool ties) {
  Random random(5);
  Case c;
  c.op = Op::kRoute;
  c.name =
      std::string("route ") + d.name + (normalise ? " normalised" : "") + (ties ? " ties" : "");
  c.rows = rows;
  std::vector<float> logits = random.floats(z(rows) * z(d.experts), 2.0f);
  if (ties) {
    for (float& l : logits) l = std::round(l);
    for (std::int32_t i = 0; i < d.experts; ++i) logits[z(i)] = 0.25f;  // row 0: all equal
  }
  const auto l = c.add("logits", logits, z(d.experts));
  const auto ids = c.out<std::int32_t>("ids", z(d.top_k));
  const auto weights = c.out<float>("weights", z(d.top_k));
  c.launch = [=](const Placed& p) {
    RouteArgs a{p.count(), p.at<float>(l), p.at<std::int32_t>(ids), p.at<float>(weights),
                d.experts, d.top_k,        normalise ? 1 : 0};
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
