#include "cpp/model/layer_parts.h"

#include <algorithm>

namespace flashnext {

LayerParts::LayerParts(GraphBuilder& builder, const GraphContext& context, const StepView& step,
                       Phase phase, bool overlaid)
    : b_(builder),
      c_(context),
      s_(context.checkpoint.shape()),
      step_(step),
      phase_(phase),
      overlaid_(overlaid) {
  attn_ = {s_.heads,     s_.kv_heads,    s_.head_dim,     s_.rotary, s_.index_heads,
           s_.index_dim, s_.index_block, s_.max_blocks(), s_.eps};
  const std::int64_t r = step.max_rows;
  scratch_.x = b_.take<float>(r * s_.hidden);
  scratch_.inj = b_.take<float>(r * s_.streams);
  scratch_.y = b_.take<float>(r * s_.hidden);
  scratch_.mlp_x = b_.take<float>(r * s_.hidden);
  scratch_.mlp_inj = b_.take<float>(r * s_.streams);
  scratch_.mlp_y = b_.take<float>(r * s_.hidden);
  sublayer_ = b_.mark();
  at_.qg = b_.take<float>(r * 2 * s_.q_dim());
  at_.k = b_.take<float>(r * s_.kv_dim());
  at_.v = b_.take<float>(r * s_.kv_dim());
  if (overlaid_) at_.index = take_index();
  at_.q = b_.take<float>(r * s_.q_dim());
  at_.iq = b_.take<float>(r * s_.index_heads * s_.index_dim);
  at_.o = b_.take<float>(r * s_.q_dim());
  at_.blocks = b_.take<std::int32_t>(r * s_.max_blocks());
  at_.count = b_.take<std::int32_t>(r);
  begin_sublayer();
  moe_.shared_gate = b_.take<float>(r);
  moe_.ids = b_.take<std::int32_t>(r * s_.top_k);
  moe_.weights = b_.take<float>(r * s_.top_k);
  moe_.slot_y = b_.take<float>(r * s_.top_k * s_.hidden);
  moe_.shared_y = b_.take<float>(r * s_.hidden);
  b_.reuse_nothing();
}

float* LayerParts::take_index() {
  return b_.take<float>(std::int64_t{step_.max_rows} * (s_.index_heads + 1) * s_.index_dim);
}

MixArgs LayerParts::mix_args(RowCount count, float* streams, const MixWeight& w, float* x) const {
  MixArgs a{};
  a.rows = count;
  a.streams = streams;
  a.w = w;
  a.x = x;
  a.eps = s_.eps;
  a.num_streams = s_.streams;
  a.dim = s_.hidden;
  a.rank = s_.rank;
  return a;
}

void LayerParts::mix(float* streams, const MixWeight& w, const float* pending_inj,
                     const float* pending_y, float* x, float* inj) {
  MixArgs a = mix_args(rows(), streams, w, x);
  a.pending_inj = pending_inj;
  a.pending_y = pending_y;
  a.inj = inj;
  b_.add(Lane::kMain, a);
}

void LayerParts::linear(Lane lane, RowCount rows, const float* x,
                        std::initializer_list<Exl3Weight> w, std::initializer_list<float*> y) {
  Exl3LinearArgs a{};
  a.rows = rows;
  a.x = x;
  std::copy(w.begin(), w.end(), a.w);
  std::copy(y.begin(), y.end(), a.y);
  a.n = static_cast<std::int32_t>(w.size());
  a.levels = c_.levels;
  b_.add(lane, a);
}

void LayerParts::dense(Lane lane, const float* x, std::initializer_list<DenseWeight> w,
                       std::initializer_list<float*> y) {
  DenseArgs a{};
  a.rows = rows();
  a.x = x;
  std::copy(w.begin(), w.end(), a.w);
  std::copy(y.begin(), y.end(), a.y);
  a.n = static_cast<std::int32_t>(w.size());
  b_.add(lane, a);
}

void LayerParts::residual(float* streams, const float* inj, const float* y) {
  b_.add(Lane::kMain, ResidualArgs{rows(), streams, inj, y, s_.streams, s_.hidden});
}

WindowPushArgs LayerParts::attention(const AttnWeights& w, std::size_t index, const float* x,
                                     float* y) {
  const KvPlanes& planes = c_.state.planes(index);
  if (!overlaid_) at_.index = take_index();  // a rewind pushes its raw keys again
  linear(Lane::kMain, rows(), x, {w.q, w.k, w.v, w.index}, {at_.qg, at_.k, at_.v, at_.index});
  AttnPrepareArgs prepare{};
  prepare.step = step_;
  prepare.dims = attn_;
  prepare.qg = at_.qg;
  prepare.k = at_.k;
  prepare.v = at_.v;
  prepare.index = at_.index;
  prepare.q_norm = w.q_norm;
  prepare.k_norm = w.k_norm;
  prepare.iq_norm = w.iq_norm;
  prepare.ik_norm = w.ik_norm;
  prepare.rope = c_.weights.rope;
  prepare.planes = planes;
  prepare.window = c_.state.slots() + c_.state.layout().index_windows.at(index);
  prepare.slot_stride = c_.state.layout().floats;
  prepare.q = at_.q;
  prepare.iq = at_.iq;
  b_.add(Lane::kMain, prepare);

  IndexSelectArgs select{};
  select.step = step_;
  select.dims = attn_;
  select.iq = at_.iq;
  select.planes = planes;
  select.blocks = at_.blocks;
  select.count = at_.count;
  select.max_context = c_.window;
  b_.add(Lane::kMain, select);

  AttentionArgs attend{};
  attend.step = step_;
  attend.dims = attn_;
  attend.q = at_.q;
  attend.qg = at_.qg;
  attend.blocks = at_.blocks;
  attend.count = at_.count;
  attend.planes = planes;
  attend.y = at_.o;
  attend.max_context = c_.window;
  b_.add(Lane::kMain, attend);
  linear(Lane::kMain, rows(), at_.o, {w.o}, {y});
  return index_push(prepare);
}

void LayerParts::moe(const MoeWeights& w, std::size_t layer, const float* x, float* y) {
  const bool cached = c_.cache != nullptr;
  // Decode finds its experts within the graph; for a prompt the host streams them.
  const bool resolves = cached && phase_ == Phase::kDecode;
  RouteArgs route{};
  route.rows = rows();
  route.x = x;
  route.router = w.router;
  route.shared_gate = w.shared_gate;
  route.ids = resolves ? c_.cache->layer(layer).ids : moe_.ids;
  route.weights = moe_.weights;
  route.gate = moe_.shared_gate;
  route.top_k = s_.top_k;
  route.normalise = s_.norm_topk ? 1 : 0;
  route.ticket = c_.ticket;
  if (resolves && c_.forced != nullptr) {
    route.forced =
        c_.forced + static_cast<std::int64_t>(layer) * c_.cache->options().decode_rows * s_.top_k;
  }
  b_.add(Lane::kMain, route);

  ExpertsArgs e{};
  e.rows = rows();
  e.x = x;
  e.dim = s_.hidden;
  e.levels = c_.levels;
  e.shared = w.shared;
  e.shared_y = moe_.shared_y;
  e.shared_inner = s_.shared_inner;
  std::copy_n(w.shared_words, 3, e.shared_words);
  e.ids = route.ids;
  e.experts = w.experts;
  e.y = moe_.slot_y;
  e.num_experts = s_.experts;
  e.slots = s_.top_k;
  e.inner = s_.expert_inner;
  std::copy_n(w.words, 3, e.words);
  if (!cached) {
    b_.add(Lane::kMain, e);
  } else if (resolves) {
    cached_experts(e, layer);
  } else {
    b_.give_workspace(Lane::kMain, e);
    b_.program().cut(cache::StreamedExperts{e, static_cast<std::int32_t>(layer)});
  }
  b_.add(Lane::kMain, CombineArgs{rows(), moe_.slot_y, moe_.weights, moe_.shared_y,
                                  moe_.shared_gate, y, s_.top_k, s_.hidden});
}

void LayerParts::cached_experts(ExpertsArgs e, std::size_t layer) {
  const cache::LayerCache& c = c_.cache->layer(layer);
  const cache::StepCache& t = c_.cache->step();
  const cache::CacheOptions& options = c_.cache->options();
  const std::int32_t pairs = step_.max_rows * s_.top_k;

  ResolveArgs resolve{};
  resolve.rows = rows();
  resolve.head = step_.head;
  resolve.ids = e.ids;
  resolve.tables = c.tables;
  resolve.layout = c.layout;
  resolve.pool = c.pool;
  resolve.staging = t.staging;
  resolve.experts = c.experts;
  resolve.group = c.group;
  resolve.fetches = t.fetches;
  resolve.num_fetches = t.num_fetches;
  resolve.cpu = t.cpu;
  resolve.num_cpu = t.num_cpu;
  resolve.counters = c.counters;
  resolve.slots = s_.top_k;
  b_.add(Lane::kMain, resolve);

  // The misses are asked for first, of the processor and then over the link: launched behind the
  // experts that have a line, which run beside them, they would wait for places on the card. The
  // processor's answer has a branch of its own, since one look at host memory takes as long as a
  // small product.
  e.experts = c.experts;
  e.group = c.group;
  b_.program().fork(Lane::kSide);
  if (options.cpu) {
    CpuPostArgs post{};
    post.rows = rows();
    post.x = e.x;
    post.ids = e.ids;
    post.cpu = t.cpu;
    post.num_cpu = t.num_cpu;
    post.sequence = t.sequence;
    post.mail = t.mail;
    post.layer = static_cast<std::int32_t>(layer);
    post.slots = s_.top_k;
    post.dim = s_.hidden;
    b_.add(Lane::kMain, post);
    CpuJoinArgs join{};
    join.num_cpu = t.num_cpu;
    join.sequence = t.sequence;
    join.mail = t.mail;
    join.y = e.y;
    join.counters = c.counters;
    join.deadline_ns = options.cpu_deadline_ns;
    join.layer = static_cast<std::int32_t>(layer);
    join.dim = s_.hidden;
    b_.program().fork(Lane::kCpu);
    b_.add(Lane::kCpu, join);
  }
  FetchArgs fetch{};
  fetch.fetches = t.fetches;
  fetch.count = t.num_fetches;
  fetch.bank = c.bank;
  fetch.counters = c.counters;
  fetch.line_bytes = c.layout.bytes;
  fetch.ns_per_line = c_.cache->link_ns(c.layout.bytes);
  fetch.max_fetches = pairs;
  b_.add(Lane::kMain, fetch);

  e.only = kGroupHit;
  b_.add(Lane::kSide, e);
  e.shared = nullptr;
  e.only = kGroupFetched;
  b_.add(Lane::kMain, e);
  b_.program().join(Lane::kSide);
  b_.program().join(Lane::kCpu);
}

void LayerParts::head(float* streams, const MixWeight& mixer, float** logits,
                      std::int32_t** tokens) {
  const std::int64_t n = step_.max_outputs;
  float* x = b_.take<float>(n * s_.hidden);
  *logits = b_.take<float>(n * c_.weights.head.out);
  if (*tokens == nullptr) *tokens = b_.take<std::int32_t>(n);
  MixArgs a = mix_args(outputs(), streams, mixer, x);
  a.pick = step_.outputs;
  b_.add(Lane::kMain, a);
  linear(Lane::kMain, outputs(), x, {c_.weights.head}, {*logits});
  SampleArgs sample{};
  sample.step = step_;
  sample.logits = *logits;
  sample.tokens = *tokens;
  sample.vocab = c_.weights.head.out;
  sample.limit = c_.token_limit;
  b_.add(Lane::kMain, sample);
}

}  // namespace flashnext
