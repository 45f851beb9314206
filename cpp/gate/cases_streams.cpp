// Cases of the residual streams, the fp16 products and the draft head's norms.
#include "cpp/gate/cases.h"

#include <cmath>

namespace flashnext::gate {

Case embed_case(const Dims& d, std::int32_t rows) {
  Random random(1);
  Case c;
  c.op = Op::kEmbed;
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

Case residual_case(const Dims& d, std::int32_t rows) {
  Random random(2);
  Case c;
  c.op = Op::kResidual;
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

Case mix_case(const Dims& d, std::int32_t rows, MixKind kind) {
  Random random(3);
  Case c;
  c.op = Op::kMix;
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

Case dense_case(const std::string& name, std::int32_t in, std::vector<std::int32_t> outs,
                std::int32_t rows) {
  Random random(4);
  Case c;
  c.op = Op::kDense;
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

Case mtp_norm_case(const Dims& d, std::int32_t rows, bool per_stream) {
  Random random(8);
  Case c;
  c.op = Op::kMtpNorm;
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

Case mtp_join_case(const Dims& d, std::int32_t rows) {
  Random random(9);
  Case c;
  c.op = Op::kMtpJoin;
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

}  // namespace flashnext::gate
