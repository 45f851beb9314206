// Parts of a decoder layer that trunk and MTP head share. Internal to the model room.
#pragma once

#include "cpp/model/layer_graph.h"

namespace flashnext {

// Buffers that one layer after another reuses.
struct Scratch {
  float* x;        // (rows, D): input of a sublayer
  float* inj;      // (rows, S)
  float* y;        // (rows, D): output of a sublayer
  float* mlp_x;    // (rows, D)
  float* mlp_inj;  // (rows, S)
  float* mlp_y;    // (rows, D)
};

class LayerParts {
 public:
  // With `overlaid`, what a sublayer needs for itself shares memory with what others need: nothing
  // of it outlives the sublayer.
  LayerParts(GraphBuilder& builder, const GraphContext& context, const StepView& step, Phase phase,
             bool overlaid);

  // A part of its own of that memory begins here; to be followed by reuse_nothing() of the builder.
  void begin_sublayer() {
    if (overlaid_) b_.reuse(sublayer_);
  }

  RowCount rows(std::int32_t scale = 1) const {
    return {&step_.head->rows, scale, step_.max_rows * scale};
  }
  RowCount outputs() const { return {&step_.head->outputs, 1, step_.max_outputs}; }
  const Scratch& scratch() const { return scratch_; }

  // x, inj = Mix(S); the residual of the sublayer before, if any, is applied first.
  void mix(float* streams, const MixWeight& w, const float* pending_inj, const float* pending_y,
           float* x, float* inj);
  void linear(Lane lane, RowCount rows, const float* x, std::initializer_list<Exl3Weight> w,
              std::initializer_list<float*> y);
  void dense(Lane lane, const float* x, std::initializer_list<DenseWeight> w,
             std::initializer_list<float*> y);
  void residual(float* streams, const float* inj, const float* y);

  // y = attention(x); `index` counts the attention layers, the MTP head's comes last. Returns the
  // push of the raw index keys, for a rewind.
  WindowPushArgs attention(const AttnWeights& w, std::size_t index, const float* x, float* y);
  // y = mixture of experts (x); `layer` counts the layers with experts, the MTP head's comes last.
  void moe(const MoeWeights& w, std::size_t layer, const float* x, float* y);
  // Final mix over the rows whose logits are wanted, head, sampler. Takes *tokens when null.
  void head(float* streams, const MixWeight& mixer, float** logits, std::int32_t** tokens);

  const ModelShape& shape() const { return s_; }
  GraphBuilder& builder() { return b_; }
  const StepView& step() const { return step_; }
  Phase phase() const { return phase_; }

 private:
  // What every mix of the model has in common.
  MixArgs mix_args(RowCount count, float* streams, const MixWeight& w, float* x) const;
  float* take_index();  // (rows, index_heads + 1, index_dim)
  // The routed experts of a decode step, those with a line while the others are fetched or computed
  // by the processor; `e` is for all pairs.
  void cached_experts(ExpertsArgs e, std::size_t layer);

  GraphBuilder& b_;
  const GraphContext& c_;
  const ModelShape& s_;
  const StepView step_;
  const Phase phase_;
  const bool overlaid_;
  std::size_t sublayer_ = 0;  // where the memory of sublayers begins
  AttnDims attn_{};
  Scratch scratch_{};
  struct {
    float *qg, *k, *v, *index, *q, *iq, *o;
    std::int32_t *blocks, *count;
  } at_{};
  struct {
    float *shared_gate, *weights, *slot_y, *shared_y;
    std::int32_t* ids;
  } moe_{};
};

}  // namespace flashnext
