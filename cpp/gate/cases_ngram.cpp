// Cases of the n-gram layer and of the windows of its convolution.
#include "cpp/base/half.h"
#include "cpp/gate/cases.h"

namespace flashnext::gate {

Case ngram_hash_case(std::int32_t rows) {
  Random random(11);
  Case c;
  c.op = Op::kNgramHash;
  c.name = "ngram_hash";
  c.rows = rows;
  constexpr std::int32_t kSeparator = 248044;
  std::vector<Row> step(z(rows));
  for (Row& r : step) {
    r.token = random.below(248320);
    r.prev1 = random.below(5) == 0 ? kSeparator : random.below(248320);
    r.prev2 = random.below(5) == 0 ? kSeparator : random.below(248320);
  }
  step.front() = {248319, 248319, 248319, 0, 0, 0};  // the largest products
  const auto rows_at = c.add("rows", step, 1);
  const auto ids = c.out<std::int64_t>("ids", 16);
  c.launch = [=](const Placed& p) {
    NgramHashArgs a{};
    a.step.head = p.head;
    a.step.rows = p.at<Row>(rows_at);
    a.step.max_rows = p.max_rows;
    a.ids = p.at<std::int64_t>(ids);
    a.multipliers[0] = 23703573157769;
    a.multipliers[1] = 20109073645365;
    a.multipliers[2] = 8052911324071;
    for (int h = 0; h < 16; ++h) {
      a.sizes[h] = 20000003 + 11 * h;
      a.offsets[h] = 20000100LL * h;
    }
    a.heads = 16;
    a.separator = kSeparator;
    enqueue(p, a);
  };
  return c;
}

Case ngram_gather_case(std::int32_t rows, std::int32_t row_bytes, std::size_t shift) {
  Random random(21);
  Case c;
  c.op = Op::kNgramGather;
  c.name = "ngram_gather rows of " + std::to_string(row_bytes) + " bytes, shift " +
           std::to_string(shift);
  c.rows = rows;
  constexpr std::int64_t kShardRows = 50;
  constexpr std::int32_t kShards = 3;
  constexpr std::int32_t kHeads = 16;
  std::vector<std::int64_t> ids(z(rows) * z(kHeads));
  for (std::int64_t& id : ids) id = random.below(static_cast<std::int32_t>(kShards * kShardRows));
  const auto ids_at = c.add("ids", ids, z(kHeads));
  const auto table = c.add("table", random.bytes(z(kShards * kShardRows * row_bytes) + shift));
  const auto shards = c.add("shards", std::vector<const std::byte*>(z(kShards)));
  c.buffers[shards].link = [=](const std::vector<void*>& before, std::vector<std::byte>& data) {
    for (std::int64_t s = 0; s < kShards; ++s) {
      const std::byte* at =
          static_cast<const std::byte*>(before[table]) + shift + z(s * kShardRows * row_bytes);
      std::memcpy(data.data() + z(s) * sizeof at, &at, sizeof at);
    }
  };
  const auto packed = c.out<std::uint8_t>("packed", z(kHeads) * z(row_bytes));
  c.launch = [=](const Placed& p) {
    NgramGatherArgs a{p.count(),
                      p.at<std::int64_t>(ids_at),
                      p.at<const std::byte*>(shards),
                      p.at<std::byte>(packed),
                      kShardRows,
                      kShards * kShardRows,
                      kHeads,
                      row_bytes};
    enqueue(p, a);
  };
  return c;
}

Case ngram_decode_case(std::int32_t rows, std::int32_t bits, bool bias) {
  Random random(12);
  Case c;
  c.op = Op::kNgramDecode;
  c.name = "ngram_decode K = " + std::to_string(bits) + (bias ? " biased" : "");
  c.rows = rows;
  constexpr std::int32_t kHeads = 16;
  constexpr std::int32_t kWidth = 160;
  const std::int32_t row_bytes = bits > 0 ? 2 + kWidth * bits / 8 : 2 * kWidth;
  std::vector<std::byte> packed = random.bytes(z(rows) * z(kHeads) * z(row_bytes));
  for (std::size_t r = 0; r < z(rows) * z(kHeads); ++r) {
    const int values = bits > 0 ? 1 : kWidth;  // scales, or plain values: finite ones
    for (int i = 0; i < values; ++i) {
      const std::uint16_t h = f32_to_f16(random.normal(0.05f));
      std::memcpy(packed.data() + r * z(row_bytes) + z(2 * i), &h, 2);
    }
  }
  const auto packed_at = c.add("packed", packed, z(kHeads) * z(row_bytes));
  const auto bias_at = c.add("bias", random.halves(z(kHeads) * z(kWidth), 0.1f));
  const auto e = c.out<float>("e", z(kHeads) * z(kWidth));
  c.launch = [=](const Placed& p) {
    NgramDecodeArgs a{p.count(),
                      p.at<std::byte>(packed_at),
                      bias ? p.at<std::uint16_t>(bias_at) : nullptr,
                      p.at<float>(e),
                      kHeads,
                      kWidth,
                      bits,
                      row_bytes};
    enqueue(p, a);
  };
  return c;
}

Segmented make_segments(const std::vector<std::int32_t>& lengths) {
  Segmented s;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const auto id = static_cast<std::int32_t>(i);
    const std::int32_t pos0 = i % 3 == 0 ? 0 : 100 + id;
    const std::int32_t out = i % 3 == 1 ? 2 * id : 2 * id + 1;
    s.segments.push_back(
        {static_cast<std::int32_t>(s.rows.size()), lengths[i], pos0, id, 2 * id, out});
    for (std::int32_t r = 0; r < lengths[i]; ++r) s.rows.push_back({1, 0, 0, pos0 + r, id, id});
  }
  return s;
}

Case window_push_case(const Dims& d, std::int32_t depth, const std::vector<std::int32_t>& lengths) {
  Random random(13);
  Case c;
  c.op = Op::kWindowPush;
  const Segmented s = make_segments(lengths);
  c.name = std::string("window_push ") + d.name;
  c.rows = static_cast<std::int32_t>(s.rows.size());
  c.segments = static_cast<std::int32_t>(s.segments.size());
  const std::int32_t channels = d.streams * d.dim;
  const std::int64_t stride = std::int64_t{depth} * channels + 32;
  const std::int64_t x_stride = channels + 8;
  const auto x = c.add("x", random.floats(z(c.rows) * z(x_stride)));
  const auto segments = c.add("segments", s.segments);
  const auto window = c.add_output("window", random.floats(z(2 * c.segments) * z(stride)), 0, 0);
  const std::int32_t max_segments = c.segments + 2;
  c.launch = [=](const Placed& p) {
    WindowPushArgs a{};
    a.step.head = p.head;
    a.step.segments = p.at<Segment>(segments);
    a.step.max_segments = max_segments;
    a.step.max_rows = p.max_rows;
    a.x = p.at<float>(x);
    a.x_stride = x_stride;
    a.window = p.at<float>(window);
    a.slot_stride = stride;
    a.depth = depth;
    a.channels = channels;
    enqueue(p, a);
  };
  return c;
}

Case ple_conv_case(const Dims& d, const std::vector<std::int32_t>& lengths) {
  Random random(14);
  Case c;
  c.op = Op::kPleConv;
  const Segmented s = make_segments(lengths);
  c.name = std::string("ple_conv ") + d.name;
  c.rows = static_cast<std::int32_t>(s.rows.size());
  c.segments = static_cast<std::int32_t>(s.segments.size());
  const std::int32_t stack = d.streams * d.dim;
  const std::int64_t stride = 9LL * stack + 64;
  const auto rows_at = c.add("rows", s.rows);
  const auto segments = c.add("segments", s.segments);
  const auto streams = c.add_output("streams", random.floats(z(c.rows) * z(stack)), 0, 0);
  const auto gate = c.add("gate", random.floats(z(c.rows) * z(d.streams)));
  const auto value = c.add("value", random.floats(z(c.rows) * z(d.dim)));
  const auto m = c.add("m", random.floats(z(c.rows) * z(stack)));
  const auto conv = c.add("conv", random.floats(z(stack) * 4));
  const auto window = c.add("window", random.floats(z(2 * c.segments) * z(stride)));
  const std::int32_t max_segments = c.segments;
  c.launch = [=](const Placed& p) {
    PleConvArgs a{};
    a.step.head = p.head;
    a.step.rows = p.at<Row>(rows_at);
    a.step.segments = p.at<Segment>(segments);
    a.step.max_rows = p.max_rows;
    a.step.max_segments = max_segments;
    a.streams = p.at<float>(streams);
    a.gate = p.at<float>(gate);
    a.value = p.at<float>(value);
    a.m = p.at<float>(m);
    a.conv = p.at<float>(conv);
    a.window = p.at<float>(window);
    a.slot_stride = stride;
    a.num_streams = d.streams;
    a.dim = d.dim;
    a.kernel = 4;
    a.dilation = 3;
    enqueue(p, a);
  };
  return c;
}

Case ple_gate_case(const Dims& d, std::int32_t rows) {
  Random random(7);
  Case c;
  c.op = Op::kPleGate;
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

}  // namespace flashnext::gate
