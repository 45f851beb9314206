// Random valid cases of the ops on streams, products, experts' sums, n-grams and sampling.
#pragma once

#include "tests/cpp/conformance.h"

namespace flashnext::test {

struct Dims {
  const char* name;
  std::int32_t dim, streams, rank, experts, top_k, vocab, heads, width;
};
inline constexpr Dims kTiny = {"tiny", 256, 4, 128, 32, 4, 1536, 8, 160};
inline constexpr Dims kReal = {"real", 2560, 4, 320, 512, 10, 248320, 16, 160};

// fp16 products: hi + lo activations against fp32 on the host.
inline constexpr double kProductTolerance = 3e-6;
inline constexpr double kNormTolerance = 1e-6;

inline Case embed_case(const Dims& d, std::int32_t rows) {
  Random random(1);
  Case c;
  c.name = std::string("embed ") + d.name;
  c.rows = rows;
  const std::int32_t vocab = 500;
  std::vector<Row> step(z(rows));
  for (Row& r : step) r.token = random.below(vocab);
  const auto table = c.add("table", random.halves(z(vocab) * z(d.dim), 1.0f));
  const auto step_rows = c.add("rows", step, 1);
  const auto streams = c.out<float>("streams", z(d.streams) * z(d.dim));
  c.launch = [=](const Placed& p) {
    EmbedArgs a{};
    a.step.head = p.head;
    a.step.rows = p.at<Row>(step_rows);
    a.step.max_rows = p.max_rows;
    a.table = p.at<std::byte>(table);
    a.streams = p.at<float>(streams);
    a.num_streams = d.streams;
    a.dim = d.dim;
    enqueue(p, a);
  };
  return c;
}

inline Case residual_case(const Dims& d, std::int32_t rows) {
  Random random(2);
  Case c;
  c.name = std::string("residual ") + d.name;
  c.rows = rows;
  const auto stack = z(d.streams) * z(d.dim);
  const auto streams = c.add_output("streams", random.floats(z(rows) * stack), stack, 0);
  const auto inj = c.add("inj", random.floats(z(rows) * z(d.streams)), z(d.streams));
  const auto y = c.add("y", random.floats(z(rows) * z(d.dim)), z(d.dim));
  c.launch = [=](const Placed& p) {
    ResidualArgs a{p.count(), p.at<float>(streams), p.at<float>(inj), p.at<float>(y), d.streams,
                   d.dim};
    enqueue(p, a);
  };
  return c;
}

enum class MixKind { kPlain, kPending, kPicked };

inline Case mix_case(const Dims& d, std::int32_t rows, MixKind kind) {
  Random random(3);
  Case c;
  c.name = std::string("mix ") + d.name + " " + std::to_string(static_cast<int>(kind));
  c.rows = rows;
  const auto stack = z(d.streams) * z(d.dim);
  const bool picked = kind == MixKind::kPicked;
  const bool pending = kind == MixKind::kPending;
  // Streams of very different sizes, as trained ones are.
  std::vector<float> s = random.floats(z(rows) * stack, 3.0f);
  for (std::size_t i = 0; i < s.size(); i += 97) s[i] *= 40.0f;
  const auto streams = picked ? c.add("streams", s) : c.add_output("streams", s, stack, 0);
  std::vector<std::int32_t> order(z(rows));
  for (std::int32_t i = 0; i < rows; ++i) order[z(i)] = (7 * i + rows - 1) % rows;
  const auto pick = c.add("pick", order, 1);
  const auto pending_inj =
      c.add("pending_inj", random.floats(z(rows) * z(d.streams)), z(d.streams));
  const auto pending_y = c.add("pending_y", random.floats(z(rows) * z(d.dim)), z(d.dim));
  const auto norm = c.add("norm", random.floats(stack, 0.2f, 1.0f));
  const float scale = 1.0f / std::sqrt(static_cast<float>(stack));
  const auto down = c.add("down", random.halves(z(d.rank) * stack, 4.0f * scale));
  const auto up = c.add("up", random.halves(stack * z(d.rank), 0.1f));
  const auto inject = c.add("inject", random.halves(z(d.streams) * stack, 4.0f * scale));
  const auto x = c.out<float>("x", z(d.dim), kProductTolerance);
  const auto inj = picked ? 0 : c.out<float>("inj", z(d.streams), kProductTolerance);
  c.launch = [=](const Placed& p) {
    MixArgs a{};
    a.rows = p.count();
    a.pick = picked ? p.at<std::int32_t>(pick) : nullptr;
    a.streams = p.at<float>(streams);
    a.pending_inj = pending ? p.at<float>(pending_inj) : nullptr;
    a.pending_y = pending ? p.at<float>(pending_y) : nullptr;
    a.w = {p.at<float>(norm), p.at<std::uint16_t>(down), p.at<std::uint16_t>(up),
           picked ? nullptr : p.at<std::uint16_t>(inject)};
    a.x = p.at<float>(x);
    a.inj = picked ? nullptr : p.at<float>(inj);
    a.eps = 1e-6f;
    a.num_streams = d.streams;
    a.dim = d.dim;
    a.rank = d.rank;
    enqueue(p, a);
  };
  return c;
}

inline Case dense_case(const std::string& name, std::int32_t in, std::vector<std::int32_t> outs,
                       std::int32_t rows) {
  Random random(4);
  Case c;
  c.name = "dense " + name;
  c.rows = rows;
  const auto x = c.add("x", random.floats(z(rows) * z(in)), z(in));
  std::vector<std::size_t> w;
  std::vector<std::size_t> y;
  for (std::int32_t out : outs) {
    w.push_back(c.add("w", random.halves(z(out) * z(in), 0.05f)));
    y.push_back(c.out<float>("y", z(out), kProductTolerance));
  }
  c.launch = [=](const Placed& p) {
    DenseArgs a{};
    a.rows = p.count();
    a.x = p.at<float>(x);
    a.n = static_cast<std::int32_t>(outs.size());
    for (std::size_t i = 0; i < outs.size(); ++i) {
      a.w[i] = {p.at<std::uint16_t>(w[i]), in, outs[i]};
      a.y[i] = p.at<float>(y[i]);
    }
    enqueue(p, a);
  };
  return c;
}

inline Case route_case(const Dims& d, std::int32_t rows, bool normalise, bool ties) {
  Random random(5);
  Case c;
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

inline Case combine_case(const Dims& d, std::int32_t rows) {
  Random random(6);
  Case c;
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

inline Case ple_gate_case(const Dims& d, std::int32_t rows) {
  Random random(7);
  Case c;
  c.name = std::string("ple_gate ") + d.name;
  c.rows = rows;
  const auto stack = z(d.streams) * z(d.dim);
  const auto streams = c.add("streams", random.floats(z(rows) * stack, 2.0f), stack);
  const auto key = c.add("key", random.floats(z(rows) * stack), stack);
  const auto value = c.add("value", random.floats(z(rows) * z(d.dim)), z(d.dim));
  const auto nk = c.add("norm_key", random.floats(stack, 0.2f, 1.0f));
  const auto nq = c.add("norm_query", random.floats(stack, 0.2f, 1.0f));
  const auto nc = c.add("norm_conv", random.floats(stack, 0.2f, 1.0f));
  const auto gate = c.out<float>("gate", z(d.streams), 1e-5);  // a root of a small dot product
  const auto m = c.out<float>("m", stack, kNormTolerance);
  c.launch = [=](const Placed& p) {
    PleGateArgs a{p.count(),        p.at<float>(streams),
                  p.at<float>(key), p.at<float>(value),
                  p.at<float>(nk),  p.at<float>(nq),
                  p.at<float>(nc),  p.at<float>(gate),
                  p.at<float>(m),   1e-6f,
                  d.streams,        d.dim};
    enqueue(p, a);
  };
  return c;
}

inline Case mtp_norm_case(const Dims& d, std::int32_t rows, bool per_stream) {
  Random random(8);
  Case c;
  c.name = std::string("mtp_norm ") + d.name + (per_stream ? " stream" : " stack");
  c.rows = rows;
  const auto stack = z(d.streams) * z(d.dim);
  const std::int32_t vocab = 300;
  std::vector<Row> step(z(rows));
  for (Row& r : step) r.token = random.below(vocab);
  std::vector<std::uint16_t> table(z(vocab) * z(d.dim));
  for (std::uint16_t& t : table) {
    const float v = random.normal(0.02f);
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    t = static_cast<std::uint16_t>(bits >> 16);
  }
  const auto rows_at = c.add("rows", step, 1);
  const auto table_at = c.add("table", table);
  const auto hidden = c.add("hidden", random.floats(z(rows) * stack, 5.0f), stack);
  const auto ne = c.add("norm_embed", random.floats(z(d.dim), 0.2f, 1.0f));
  const auto nh = c.add("norm_hidden", random.floats(stack, 0.2f, 1.0f));
  const auto e = c.out<float>("e", z(d.dim), kNormTolerance);
  const auto h = c.out<float>("h", stack, kNormTolerance);
  c.launch = [=](const Placed& p) {
    MtpNormArgs a{};
    a.step.head = p.head;
    a.step.rows = p.at<Row>(rows_at);
    a.step.max_rows = p.max_rows;
    a.table = p.at<std::byte>(table_at);
    a.hidden = p.at<float>(hidden);
    a.norm_embed = p.at<float>(ne);
    a.norm_hidden = p.at<float>(nh);
    a.e = p.at<float>(e);
    a.h = p.at<float>(h);
    a.eps = 1e-6f;
    a.num_streams = d.streams;
    a.dim = d.dim;
    a.per_stream = per_stream ? 1 : 0;
    enqueue(p, a);
  };
  return c;
}

inline Case mtp_join_case(const Dims& d, std::int32_t rows) {
  Random random(9);
  Case c;
  c.name = std::string("mtp_join ") + d.name;
  c.rows = rows;
  const auto stack = z(d.streams) * z(d.dim);
  const auto fe = c.add("fe", random.floats(z(rows) * z(d.dim)), z(d.dim));
  const auto fh = c.add("fh", random.floats(z(rows) * stack), stack);
  const auto streams = c.out<float>("streams", stack);
  c.launch = [=](const Placed& p) {
    MtpJoinArgs a{p.count(), p.at<float>(fe), p.at<float>(fh), p.at<float>(streams), d.streams,
                  d.dim};
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::test
