#include "cpp/model/op_cost.h"

#include "cpp/base/errors.h"

#include <algorithm>

namespace flashnext {
namespace {

using U64 = std::uint64_t;
constexpr U64 kF = sizeof(float);

template <class... Factors>
U64 mul(Factors... factors) {
  return (U64{1} * ... * static_cast<U64>(factors));
}

template <class Args>
const Args& as(const void* args) {
  return *static_cast<const Args*>(args);
}

class Costs {
 public:
  Costs(const void* args, const StepSizes& sizes) : args_(args), s_(sizes) {}

  OpCost of(Op op) const;

 private:
  U64 count(const RowCount& c) const {
    const std::int32_t n = c.count == &s_.head->outputs ? s_.outputs : s_.rows;
    return mul(std::min(c.scale * n, c.max));
  }
  U64 rows() const { return mul(s_.rows); }
  U64 segments() const { return s_.segments.size(); }

  static OpCost moved(U64 other) { return {0, other, 0, 0}; }
  OpCost mix() const;
  OpCost exl3_linear() const;
  OpCost dense() const;
  OpCost conv() const;
  OpCost recur() const;
  OpCost index_select() const;
  OpCost attention() const;
  OpCost experts() const;

  const void* args_;
  const StepSizes& s_;
};

U64 trellis_bytes(std::int32_t in, std::int32_t out, std::int32_t words) {
  return mul(in / 16, out / 16, words, 2);
}

OpCost Costs::mix() const {
  const auto& a = as<MixArgs>(args_);
  const U64 n = count(a.rows), stack = mul(a.num_streams, a.dim);
  const U64 products = mul(2 * a.rank + (a.w.inject != nullptr ? a.num_streams : 0)) * stack;
  const U64 pending = a.pending_y != nullptr ? stack * kF + mul(a.dim) * kF : 0;
  return {stack * kF + products * 2, n * (stack * kF + pending + mul(a.dim) * kF), 0, n * products};
}

OpCost Costs::exl3_linear() const {
  const auto& a = as<Exl3LinearArgs>(args_);
  const U64 n = count(a.rows);
  OpCost cost = moved(n * mul(a.w[0].in) * kF);
  for (std::int32_t i = 0; i < a.n; ++i) {
    const Exl3Weight& w = a.w[i];
    cost.weight_bytes += trellis_bytes(w.in, w.out, w.words) + mul(w.in + w.out, 2);
    cost.other_bytes += n * mul(w.out) * kF;
    cost.exl3_macs += n * mul(w.in, w.out);
  }
  return cost;
}

OpCost Costs::dense() const {
  const auto& a = as<DenseArgs>(args_);
  const U64 n = count(a.rows);
  OpCost cost = moved(n * mul(a.w[0].in) * kF);
  for (std::int32_t i = 0; i < a.n; ++i) {
    cost.weight_bytes += mul(a.w[i].in, a.w[i].out, 2);
    cost.other_bytes += n * mul(a.w[i].out) * kF;
    cost.half_macs += n * mul(a.w[i].in, a.w[i].out);
  }
  return cost;
}

OpCost Costs::conv() const {
  const auto& a = as<GdnConvArgs>(args_);
  const U64 channels = mul(2 * a.dims.k_heads + a.dims.v_heads, a.dims.head_dim);
  const U64 gates = mul(a.a.in, a.a.out + a.b.out);
  const U64 row = 2 * channels + mul(a.a.in) + mul(2, a.dims.v_heads);
  return {channels * mul(a.dims.kernel) * kF + gates * 2,
          (rows() * row + segments() * 2 * mul(a.dims.kernel - 1) * channels) * kF, 0,
          rows() * gates};
}

OpCost Costs::recur() const {
  const auto& a = as<GdnRecurArgs>(args_);
  const U64 state = mul(a.dims.v_heads, a.dims.head_dim, a.dims.head_dim) * kF;
  const U64 row = mul(2 * a.dims.k_heads + 2 * a.dims.v_heads, a.dims.head_dim) * kF;
  return moved(segments() * 2 * state + rows() * row);
}

// Rows within the budget see every block and read no key.
OpCost Costs::index_select() const {
  const auto& a = as<IndexSelectArgs>(args_);
  OpCost cost = moved(rows() * mul(a.dims.index_heads, a.dims.index_dim) * kF);
  for (const Segment& segment : s_.segments) {
    const std::int32_t blocks = (segment.pos0 + segment.rows) / a.dims.block;
    if (blocks <= a.dims.max_blocks) continue;
    cost.other_bytes += mul(blocks, a.dims.index_dim) * kF;
  }
  return cost;
}

OpCost Costs::attention() const {
  const auto& a = as<AttentionArgs>(args_);
  OpCost cost = moved(rows() * mul(a.dims.heads, a.dims.head_dim, 4) * kF);
  for (const Segment& segment : s_.segments) {
    U64 seen = 0;  // tokens, summed over the rows
    for (std::int32_t p = segment.pos0; p < segment.pos0 + segment.rows; ++p) {
      const std::int32_t most = a.dims.max_blocks * a.dims.block + (p + 1) % a.dims.block;
      seen += mul(std::min(p + 1, std::max(most, 1)));
    }
    const U64 distinct = std::min(seen, mul(segment.pos0 + segment.rows));
    cost.other_bytes += distinct * mul(a.dims.kv_heads, a.dims.head_dim, 2, 2);
    cost.half_macs += seen * mul(a.dims.heads, a.dims.head_dim, 2);
  }
  return cost;
}

OpCost Costs::experts() const {
  const auto& a = as<ExpertsArgs>(args_);
  const U64 n = count(a.rows);
  const U64 one = trellis_bytes(a.dim, a.inner, a.words[0] + a.words[1]) +
                  trellis_bytes(a.inner, a.dim, a.words[2]) + mul(a.dim + a.inner, 3, 2);
  // Of a group, its bound: who belongs to it is known on the device.
  U64 pairs = n * mul(a.slots);
  if (a.max_pairs > 0) pairs = std::min(pairs, mul(a.max_pairs));
  const U64 read = std::min(pairs, a.ids == nullptr ? mul(a.slots) : mul(s_.experts));
  OpCost cost{read * one, (n + pairs) * mul(a.dim) * kF, pairs * mul(3, a.dim, a.inner), 0};
  if (a.shared != nullptr) {
    const ExpertsArgs alone = shared_alone(a);
    cost += Costs(&alone, s_).experts();
  }
  return cost;
}

OpCost Costs::of(Op op) const {
  switch (op) {
    case Op::kEmbed: {
      const auto& a = as<EmbedArgs>(args_);
      return moved(rows() * mul(a.dim) * (2 + mul(a.num_streams) * kF));
    }
    case Op::kResidual: {
      const auto& a = as<ResidualArgs>(args_);
      return moved(count(a.rows) * mul(a.dim, 2 * a.num_streams + 1) * kF);
    }
    case Op::kMix:
      return mix();
    case Op::kExl3Linear:
      return exl3_linear();
    case Op::kDense:
      return dense();
    case Op::kGdnConv:
      return conv();
    case Op::kGdnRecur:
      return recur();
    case Op::kGdnGate: {
      const auto& a = as<GdnGateArgs>(args_);
      return moved(count(a.rows) * mul(a.v_heads, 128, 3) * kF);
    }
    case Op::kWindowPush: {
      const auto& a = as<WindowPushArgs>(args_);
      return moved(segments() * mul(a.depth, a.channels, 2) * kF);
    }
    case Op::kAttnPrepare: {
      const auto& a = as<AttnPrepareArgs>(args_);
      // K and V are written as fp16, a pooled key a block; a window is read and written.
      const U64 floats = mul(2 * a.dims.heads + 3 * a.dims.kv_heads, a.dims.head_dim) +
                         mul(2 * a.dims.index_heads + 1, a.dims.index_dim);
      const U64 keys = rows() / mul(a.dims.block) + segments() * mul(2, a.dims.block - 1);
      return moved((rows() * floats + keys * mul(a.dims.index_dim)) * kF);
    }
    case Op::kIndexSelect:
      return index_select();
    case Op::kAttention:
      return attention();
    case Op::kRoute: {
      const auto& a = as<RouteArgs>(args_);
      const U64 n = count(a.rows), weights = mul(a.router.out + a.shared_gate.out, a.router.in);
      return {weights * 2, n * mul(a.router.in + 2 * a.top_k + 1) * kF, 0, n * weights};
    }
    case Op::kExperts:
      return experts();
    case Op::kCombine: {
      const auto& a = as<CombineArgs>(args_);
      return moved(count(a.rows) * mul(a.slots + 2, a.dim) * kF);
    }
    case Op::kNgramHash: {
      const auto& a = as<NgramHashArgs>(args_);
      return moved(rows() * mul(a.heads, 8));
    }
    case Op::kNgramGather: {
      const auto& a = as<NgramGatherArgs>(args_);
      return moved(count(a.rows) * mul(a.heads, a.row_bytes, 2));
    }
    case Op::kNgramDecode: {
      const auto& a = as<NgramDecodeArgs>(args_);
      return moved(count(a.rows) * mul(a.heads) * (mul(a.row_bytes) + mul(a.width) * kF));
    }
    case Op::kPleGate: {
      const auto& a = as<PleGateArgs>(args_);
      return moved(count(a.rows) * mul(a.dim, 3 * a.num_streams + 1) * kF);
    }
    case Op::kPleConv: {
      const auto& a = as<PleConvArgs>(args_);
      const U64 stack = mul(a.num_streams, a.dim);
      return moved(stack * kF * (rows() * 3 + segments() * mul(a.dilation, a.kernel - 1)));
    }
    case Op::kMtpNorm: {
      const auto& a = as<MtpNormArgs>(args_);
      return moved(rows() * mul(a.dim) * (2 + kF + 2 * mul(a.num_streams) * kF));
    }
    case Op::kMtpJoin: {
      const auto& a = as<MtpJoinArgs>(args_);
      return moved(count(a.rows) * mul(a.dim, 2 * a.num_streams + 1) * kF);
    }
    case Op::kSample: {
      const auto& a = as<SampleArgs>(args_);
      return moved(mul(s_.outputs, a.vocab) * kF);
    }
    // What they move depends on the cache: its counters tell.
    case Op::kResolve:
    case Op::kFetch:
    case Op::kCpuPost:
    case Op::kCpuJoin:
    case Op::kPace:
      return moved(0);
    case Op::kCount:
      break;
  }
  throw LogicError("op_cost: no such op");
}

}  // namespace

OpCost& OpCost::operator+=(const OpCost& other) noexcept {
  weight_bytes += other.weight_bytes;
  other_bytes += other.other_bytes;
  exl3_macs += other.exl3_macs;
  half_macs += other.half_macs;
  return *this;
}

OpCost op_cost(Op op, const void* args, const StepSizes& sizes) {
  return Costs(args, sizes).of(op);
}

std::string op_family(Op op, const void* args, std::int32_t vocab) {
  if (op == Op::kExl3Linear && as<Exl3LinearArgs>(args).w[0].out == vocab) return "head";
  return to_string(op);
}

}  // namespace flashnext
