// Dimensions of the models that synthetic checkpoints imitate.
#include "cpp/checkpoint/synthetic.h"

namespace flashnext {
namespace {

constexpr std::int32_t kMostLayers = 512;

// What both models have in common.
ModelShape common_shape(std::int32_t layers) {
  if (layers < 1 || layers > kMostLayers) {
    throw InputError("layers = " + std::to_string(layers) + ": a synthetic model may have 1 to " +
                     std::to_string(kMostLayers));
  }
  ModelShape s;
  s.layers = layers;
  for (std::int32_t l = 0; l < layers; ++l) {
    s.layer_kinds.push_back((l + 1) % 4 == 0 ? LayerKind::kAttention : LayerKind::kDeltaNet);
  }
  s.eps = 1e-6f;
  s.head_dim = 256;
  s.kv_heads = 2;
  s.rotary = 64;
  s.rope_theta = 1e7;
  s.streams = 4;
  s.ple_layer = layers > 1 ? 1 : -1;
  s.index_heads = 4;
  s.index_dim = 128;
  s.index_block = 4;
  s.mtp_layers = 1;
  return s;
}

}  // namespace

ModelShape flash_next_shape(std::int32_t layers) {
  ModelShape s = common_shape(layers);
  s.hidden = 2560;
  s.vocab = 248320;
  s.max_positions = 262144;
  s.heads = 24;
  s.gdn_k_heads = 16;
  s.gdn_v_heads = 48;
  s.experts = 512;
  s.top_k = 10;
  s.expert_inner = 640;
  s.shared_inner = 640;
  s.rank = 320;
  s.separator = 248044;
  s.index_budget = 2048;
  if (s.ple_layer >= 0) s.ple_dim = s.ngram_heads() * s.ngram_width;
  return s;
}

ModelShape tiny_shape(std::int32_t layers) {
  ModelShape s = common_shape(layers);
  s.hidden = 256;
  s.vocab = 1536;
  s.max_positions = 4096;
  s.heads = 4;
  s.gdn_k_heads = 2;
  s.gdn_v_heads = 6;
  s.experts = 32;
  s.top_k = 4;
  s.expert_inner = 128;
  s.shared_inner = 128;
  s.rank = 128;
  s.separator = 1493;
  s.index_budget = 64;
  s.mtp_per_stream = true;
  if (s.ple_layer >= 0) {
    s.heads_per_ngram = 4;
    s.ngram_vocab_base = 2000;
    s.ple_dim = s.ngram_heads() * s.ngram_width;
  }
  return s;
}

ModelShape synthetic_shape(std::string_view like, std::int32_t layers) {
  if (like == "flash-next") return flash_next_shape(layers == 0 ? 48 : layers);
  if (like == "tiny") return tiny_shape(layers == 0 ? 8 : layers);
  throw InputError("like = \"" + std::string(like) + "\": choose flash-next or tiny");
}

}  // namespace flashnext
