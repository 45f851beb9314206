// Every text tensor of a model of this shape (spec/model.md 8), in load order.
#include "cpp/checkpoint/checkpoint.h"
#include "cpp/checkpoint/ngram_hash.h"

#include <string>
#include <utility>

namespace flashnext {
namespace {

class TableBuilder {
 public:
  explicit TableBuilder(const ModelShape& shape) : s_(shape) {}

  std::vector<TensorRule> run() {
    const std::string p = "model.language_model.";
    plain(p + "embed_tokens.weight", {s_.vocab, s_.hidden}, "embedding");
    for (std::int32_t l = 0; l < s_.layers; ++l) {
      const std::string layer = p + "layers." + std::to_string(l) + ".";
      if (l == s_.ple_layer) ple(layer + "ple.");
      mixer(layer + "attn_hyper_connection.", "mixers", true);
      if (s_.layer_kinds[static_cast<std::size_t>(l)] == LayerKind::kDeltaNet) {
        delta_net(layer + "linear_attn.");
      } else {
        attention(layer + "self_attn.", "attention");
      }
      mixer(layer + "mlp_hyper_connection.", "mixers", true);
      experts(layer + "mlp.", "router", "shared", "experts");
    }
    mixer(p + "hyper_connection_mixer.", "mixers", false);
    exl3("lm_head", s_.vocab, s_.hidden, "head");
    if (s_.mtp_layers > 0) mtp();
    return std::move(rules_);
  }

 private:
  void plain(std::string name, std::vector<std::int64_t> shape, const char* family) {
    rules_.push_back({std::move(name), Role::kPlain, std::move(shape), family});
  }
  void exl3(std::string prefix, std::int64_t out, std::int64_t in, const char* family) {
    rules_.push_back({std::move(prefix), Role::kExl3, {out, in}, family});
  }

  void mixer(const std::string& p, const char* family, bool inject) {
    const std::int64_t stack = s_.stack();
    plain(p + "hc_norm.weight", {stack}, family);
    plain(p + "input_mix_weight_down.weight", {s_.rank, stack}, family);
    plain(p + "input_mix_weight_up.weight", {stack, s_.rank}, family);
    if (inject) plain(p + "block_inject_weight.weight", {s_.streams, stack}, family);
  }

  void delta_net(const std::string& p) {
    const std::int64_t value = s_.gdn_value();
    exl3(p + "in_proj_qkv", s_.gdn_channels(), s_.hidden, "gdn");
    exl3(p + "in_proj_z", value, s_.hidden, "gdn");
    plain(p + "in_proj_b.weight", {s_.gdn_v_heads, s_.hidden}, "gdn");
    plain(p + "in_proj_a.weight", {s_.gdn_v_heads, s_.hidden}, "gdn");
    plain(p + "conv1d.weight", {s_.gdn_channels(), 1, s_.gdn_kernel}, "gdn");
    plain(p + "A_log", {s_.gdn_v_heads}, "gdn");
    plain(p + "dt_bias", {s_.gdn_v_heads}, "gdn");
    plain(p + "norm.weight", {s_.gdn_head_dim}, "gdn");
    exl3(p + "out_proj", s_.hidden, value, "gdn");
  }

  void attention(const std::string& p, const char* family) {
    exl3(p + "q_proj", 2 * s_.q_dim(), s_.hidden, family);
    exl3(p + "k_proj", s_.kv_dim(), s_.hidden, family);
    exl3(p + "v_proj", s_.kv_dim(), s_.hidden, family);
    exl3(p + "indexer.index_qk_proj", (s_.index_heads + 1) * s_.index_dim, s_.hidden, family);
    plain(p + "q_norm.weight", {s_.head_dim}, family);
    plain(p + "k_norm.weight", {s_.head_dim}, family);
    plain(p + "indexer.q_layernorm.weight", {s_.index_dim}, family);
    plain(p + "indexer.k_layernorm.weight", {s_.index_dim}, family);
    exl3(p + "o_proj", s_.hidden, s_.q_dim(), family);
  }

  void experts(const std::string& p, const char* router, const char* shared, const char* routed) {
    plain(p + "gate.weight", {s_.experts, s_.hidden}, router);
    plain(p + "shared_expert_gate.weight", {1, s_.hidden}, router);
    mlp(p + "shared_expert.", s_.shared_inner, shared);
    for (std::int32_t e = 0; e < s_.experts; ++e) {
      mlp(p + "experts." + std::to_string(e) + ".", s_.expert_inner, routed);
    }
  }

  void mlp(const std::string& p, std::int64_t inner, const char* family) {
    exl3(p + "gate_proj", inner, s_.hidden, family);
    exl3(p + "up_proj", inner, s_.hidden, family);
    exl3(p + "down_proj", s_.hidden, inner, family);
  }

  void ple(const std::string& p) {
    const std::int64_t stack = s_.stack();
    rules_.push_back({p + "ple_embedding.ngram_embedding",
                      Role::kNgramTable,
                      {derive_ngram_hash(s_).rows, s_.ngram_width},
                      "ngram"});
    plain(p + "key_proj.weight", {stack, s_.ple_dim}, "ple");
    plain(p + "value_proj.weight", {s_.hidden, s_.ple_dim}, "ple");
    plain(p + "conv1d.weight", {stack, 1, s_.ple_kernel}, "ple");
    plain(p + "norm_key.weight", {stack}, "ple");
    plain(p + "norm_query.weight", {stack}, "ple");
    plain(p + "norm_conv.weight", {stack}, "ple");
  }

  void mtp() {
    exl3("mtp.fc_embedding", s_.hidden, s_.hidden, "mtp");
    exl3("mtp.fc_hidden", s_.hidden, s_.hidden, "mtp");
    plain("mtp.pre_fc_norm_embedding.weight", {s_.hidden}, "mtp");
    plain("mtp.pre_fc_norm_hidden.weight", {s_.stack()}, "mtp");
    mixer("mtp.layers.0.attn_hyper_connection.", "mtp", true);
    attention("mtp.layers.0.self_attn.", "mtp");
    mixer("mtp.layers.0.mlp_hyper_connection.", "mtp", true);
    experts("mtp.layers.0.mlp.", "mtp", "mtp", "mtp_experts");
    mixer("mtp.hyper_connection_mixer.", "mtp", false);
  }

  const ModelShape& s_;
  std::vector<TensorRule> rules_;
};

}  // namespace

std::vector<TensorRule> tensor_table(const ModelShape& shape) { return TableBuilder(shape).run(); }

}  // namespace flashnext
