#include "cpp/model/layer_graph.h"

#include "cpp/model/layer_parts.h"

#include <algorithm>
#include <optional>

namespace flashnext {

namespace {

// Gated DeltaNet: buffers and ops of one layer.
class GdnPart {
 public:
  GdnPart(LayerParts& parts, const GraphContext& context) : p_(parts), c_(context) {
    const ModelShape& s = p_.shape();
    const std::int64_t r = p_.step().max_rows;
    GraphBuilder& b = p_.builder();
    p_.begin_sublayer();
    if (!keeps_all()) kept_ = take_kept();
    z_ = b.take<float>(r * s.gdn_value());
    o_ = b.take<float>(r * s.gdn_value());
    gated_ = b.take<float>(r * s.gdn_value());
    b.reuse_nothing();
  }

  void add(const GdnWeights& w, const SlotLayout::Gdn& slot, const float* x, float* y,
           TrunkBuffers& out) {
    const ModelShape& s = p_.shape();
    GraphBuilder& b = p_.builder();
    if (keeps_all()) kept_ = take_kept();
    const StatePool& pool = c_.state;
    const GdnDims dims{s.gdn_k_heads, s.gdn_v_heads, s.gdn_head_dim, s.gdn_kernel,
                       pool.layout().floats};
    // The convolution comes right behind the projections: it may read x, which the mix before them
    // wrote, while they run.
    p_.linear(Lane::kMain, p_.rows(), x, {w.qkv, w.z}, {kept_.u, z_});
    GdnConvArgs conv{};
    conv.step = p_.step();
    conv.dims = dims;
    conv.u = kept_.u;
    conv.x = x;
    conv.a = w.a;
    conv.b = w.b;
    conv.conv = w.conv;
    conv.rate = w.rate;
    conv.dt_bias = w.dt_bias;
    conv.window = pool.slots() + slot.window;
    conv.qkv = kept_.qkv;
    conv.decay = kept_.decay;
    conv.beta = kept_.beta;
    b.add(Lane::kMain, conv);
    const GdnRecurArgs recur{
        p_.step(), dims, kept_.qkv, kept_.decay, kept_.beta, pool.slots() + slot.state, o_};
    b.add(Lane::kMain, recur);
    out.recurrences.push_back(recur);
    out.pushes.push_back({p_.step(), kept_.u, s.gdn_channels(), conv.window, dims.slot_stride,
                          s.gdn_kernel - 1, s.gdn_channels()});
    b.add(Lane::kMain, GdnGateArgs{p_.rows(), o_, z_, w.norm, gated_, s.eps, s.gdn_v_heads,
                                   s.gdn_silu_gate ? 1 : 0});
    p_.linear(Lane::kMain, p_.rows(), gated_, {w.out}, {y});
  }

 private:
  // What a rewind replays: every layer has its own in a step that may be rewound.
  struct Kept {
    float* u;      // (rows, channels)
    float* qkv;    // (rows, channels)
    float* decay;  // (rows, v_heads)
    float* beta;   // (rows, v_heads)
  };
  Kept take_kept() {
    const ModelShape& s = p_.shape();
    const std::int64_t r = p_.step().max_rows;
    GraphBuilder& b = p_.builder();
    return {b.take<float>(r * s.gdn_channels()), b.take<float>(r * s.gdn_channels()),
            b.take<float>(r * s.gdn_v_heads), b.take<float>(r * s.gdn_v_heads)};
  }

  LayerParts& p_;
  const GraphContext& c_;
  bool keeps_all() const { return p_.phase() == Phase::kDecode; }
  Kept kept_{};
  float *z_, *o_, *gated_;
};

// The n-gram layer. Its rows depend on token ids alone, so hash, gather and projections run beside
// the layers before it.
class PlePart {
 public:
  PlePart(LayerParts& parts, const GraphContext& context, const std::byte* packed_host)
      : p_(parts), c_(context), packed_host_(packed_host) {
    const ModelShape& s = p_.shape();
    const std::int64_t r = p_.step().max_rows;
    GraphBuilder& b = p_.builder();
    const std::int32_t heads = s.ngram_heads();
    ids_ = b.take<std::int64_t>(r * heads);
    packed_ = b.take<std::byte>(r * heads * c_.checkpoint.ngram().row_bytes);
    e_ = b.take<float>(r * heads * s.ngram_width);
    key_ = b.take<float>(r * s.stack());
    value_ = b.take<float>(r * s.hidden);
    gate_ = b.take<float>(r * s.streams);
    m_ = b.take<float>(r * s.stack());
  }

  // The host gathers the rows, so it must be given time: the program is cut before begin().
  bool host_gathers() const { return packed_host_ != nullptr; }

  // From here on the rows are fetched and projected, beside what follows.
  void begin() {
    const ModelShape& s = p_.shape();
    const std::int64_t r = p_.step().max_rows;
    GraphBuilder& b = p_.builder();
    const NgramTable& table = c_.checkpoint.ngram();
    const std::int32_t heads = s.ngram_heads();
    if (host_gathers()) b.program().cut({});
    b.program().fork(Lane::kTable);
    const PleWeights& w = *c_.weights.ple;
    if (host_gathers()) {
      b.program().copy(Lane::kTable, packed_, packed_host_,
                       static_cast<std::size_t>(r * heads * table.row_bytes));
    } else {
      NgramHashArgs hash = ngram_hash_args(s, table, p_.step());
      hash.ids = ids_;
      b.add(Lane::kTable, hash);
      b.add(Lane::kTable, NgramGatherArgs{p_.rows(), ids_, w.shards, packed_, table.shard_rows,
                                          table.rows, heads, table.row_bytes});
    }
    b.add(Lane::kTable, NgramDecodeArgs{p_.rows(), packed_, w.bias, e_, heads, s.ngram_width,
                                        table.bits, table.row_bytes});
    p_.dense(Lane::kTable, e_, {w.key, w.value}, {key_, value_});
  }

  // S += PLE(S); joins the table stream.
  WindowPushArgs add(float* streams) {
    const ModelShape& s = p_.shape();
    GraphBuilder& b = p_.builder();
    const PleWeights& w = *c_.weights.ple;
    float* window = c_.state.slots() + c_.state.layout().ple_window;
    const std::int64_t stride = c_.state.layout().floats;
    b.program().join(Lane::kTable);
    b.add(Lane::kMain, PleGateArgs{p_.rows(), streams, key_, value_, w.norm_key, w.norm_query,
                                   w.norm_conv, gate_, m_, s.eps, s.streams, s.hidden});
    b.add(Lane::kMain, PleConvArgs{p_.step(), streams, gate_, value_, m_, w.conv, window, stride,
                                   s.streams, s.hidden, s.ple_kernel, s.ngram_size});
    const WindowPushArgs push{
        p_.step(), m_, s.stack(), window, stride, s.ngram_size * (s.ple_kernel - 1), s.stack()};
    b.add(Lane::kMain, push);
    return push;
  }

 private:
  LayerParts& p_;
  const GraphContext& c_;
  const std::byte* packed_host_;
  std::int64_t* ids_;
  std::byte* packed_;
  float *e_, *key_, *value_, *gate_, *m_;
};

}  // namespace

NgramHashArgs ngram_hash_args(const ModelShape& shape, const NgramTable& table,
                              const StepView& step) {
  NgramHashArgs a{};
  a.step = step;
  std::copy(table.multipliers.begin(), table.multipliers.end(), a.multipliers);
  std::copy(table.sizes.begin(), table.sizes.end(), a.sizes);
  std::copy(table.offsets.begin(), table.offsets.end(), a.offsets);
  a.heads = shape.ngram_heads();
  a.separator = shape.separator;
  return a;
}

TrunkBuffers build_trunk(GraphBuilder& builder, const GraphContext& context, const StepView& step,
                         const TrunkOptions& options) {
  const ModelShape& s = context.checkpoint.shape();
  const Weights& w = context.weights;
  TrunkBuffers out{};
  out.streams = builder.take<float>(std::int64_t{step.max_rows} * s.stack());
  out.scratch = builder.mark();
  LayerParts parts(builder, context, step, options.phase, options.phase == Phase::kPrefill);
  const Scratch& t = parts.scratch();
  GdnPart gdn(parts, context);

  std::optional<PlePart> ple;
  if (w.ple) ple.emplace(parts, context, options.packed_host);
  // Rows that the device gathers are under way from the start; those that the host gathers while
  // the layer before theirs mixes its tokens.
  const std::int32_t gather_layer = ple && ple->host_gathers() ? s.ple_layer - 1 : -1;
  if (ple && gather_layer < 0) ple->begin();
  builder.add(Lane::kMain, EmbedArgs{step, w.embedding, out.streams, s.streams, s.hidden});

  const float* pending_inj = nullptr;
  const float* pending_y = nullptr;
  std::size_t attention_index = 0;
  for (std::size_t l = 0; l < w.layers.size(); ++l) {
    const LayerWeights& layer = w.layers[l];
    if (static_cast<std::int32_t>(l) == s.ple_layer) {
      if (pending_y != nullptr) parts.residual(out.streams, pending_inj, pending_y);
      pending_inj = pending_y = nullptr;
      out.pushes.push_back(ple->add(out.streams));
    }
    parts.mix(out.streams, layer.attn_mix, pending_inj, pending_y, t.x, t.inj);
    if (layer.kind == LayerKind::kDeltaNet) {
      gdn.add(layer.gdn, context.state.layout().gdn[l], t.x, t.y, out);
    } else {
      out.pushes.push_back(parts.attention(layer.attn, attention_index++, t.x, t.y));
    }
    if (static_cast<std::int32_t>(l) == gather_layer) ple->begin();
    parts.mix(out.streams, layer.mlp_mix, t.inj, t.y, t.mlp_x, t.mlp_inj);
    parts.moe(layer.moe, l, t.mlp_x, t.mlp_y);
    pending_inj = t.mlp_inj;
    pending_y = t.mlp_y;
    if (options.taps != nullptr) {
      parts.residual(out.streams, pending_inj, pending_y);
      pending_inj = pending_y = nullptr;
      const std::int64_t row_floats = s.stack();
      const std::int64_t floats = step.max_rows * row_floats;
      builder.program().copy(Lane::kMain, options.taps + static_cast<std::int64_t>(l) * floats,
                             out.streams, static_cast<std::size_t>(floats) * sizeof(float));
    }
  }
  if (pending_y != nullptr) parts.residual(out.streams, pending_inj, pending_y);
  out.tokens = options.tokens;
  parts.head(out.streams, w.mixer, &out.logits, &out.tokens);
  return out;
}

void build_rewind(GraphBuilder& builder, const TrunkBuffers& trunk, const StepView& step) {
  for (GdnRecurArgs recur : trunk.recurrences) {
    recur.step = step;
    builder.add(Lane::kMain, recur);
  }
  for (WindowPushArgs push : trunk.pushes) {
    push.step = step;
    builder.add(Lane::kMain, push);
  }
}

MtpBuffers build_mtp(GraphBuilder& builder, const GraphContext& context, const StepView& step,
                     Phase phase) {
  LayerParts parts(builder, context, step, phase, true);
  const ModelShape& s = parts.shape();
  const MtpWeights& w = *context.weights.mtp;
  const Scratch& t = parts.scratch();
  const std::int64_t r = step.max_rows;
  MtpBuffers out{};
  out.hidden = builder.take<float>(r * s.stack());
  out.streams = builder.take<float>(r * s.stack());
  auto* e = builder.take<float>(r * s.hidden);
  auto* h = builder.take<float>(r * s.stack());
  auto* fe = builder.take<float>(r * s.hidden);
  auto* fh = builder.take<float>(r * s.stack());

  builder.add(Lane::kMain,
              MtpNormArgs{step, context.weights.embedding, out.hidden, w.norm_embed, w.norm_hidden,
                          e, h, s.eps, s.streams, s.hidden, s.mtp_per_stream ? 1 : 0});
  parts.linear(Lane::kMain, parts.rows(), e, {w.fc_embedding}, {fe});
  parts.linear(Lane::kMain, parts.rows(s.streams), h, {w.fc_hidden}, {fh});
  builder.add(Lane::kMain, MtpJoinArgs{parts.rows(), fe, fh, out.streams, s.streams, s.hidden});

  parts.mix(out.streams, w.block.attn_mix, nullptr, nullptr, t.x, t.inj);
  parts.attention(w.block.attn, context.state.layout().index_windows.size() - 1, t.x, t.y);
  parts.mix(out.streams, w.block.mlp_mix, t.inj, t.y, t.mlp_x, t.mlp_inj);
  parts.moe(w.block.moe, context.weights.layers.size(), t.mlp_x, t.mlp_y);
  parts.residual(out.streams, t.mlp_inj, t.mlp_y);
  parts.head(out.streams, w.mixer, &out.logits, &out.tokens);
  return out;
}

}  // namespace flashnext
