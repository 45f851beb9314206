// config.json of a synthetic checkpoint: what parse_config reads back into the same shape.
#include "cpp/checkpoint/synthetic.h"

#include <cstdio>

namespace flashnext {
namespace {

class Object {
 public:
  explicit Object(int indent) : indent_(static_cast<std::size_t>(indent), ' ') {}
  Object& raw(const char* key, const std::string& json) {
    text_ += (text_.empty() ? "{\n" : ",\n") + indent_ + "  \"" + key + "\": " + json;
    return *this;
  }
  Object& text(const char* key, const std::string& value) { return raw(key, "\"" + value + "\""); }
  Object& number(const char* key, std::int64_t value) { return raw(key, std::to_string(value)); }
  Object& boolean(const char* key, bool value) { return raw(key, value ? "true" : "false"); }
  std::string close() const { return text_ + "\n" + indent_ + "}"; }

 private:
  std::string indent_;
  std::string text_;
};

// The shortest decimal that reads back as the same number.
std::string decimal(double value, int digits) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

std::string layer_types(const ModelShape& s) {
  std::string list;
  for (const LayerKind kind : s.layer_kinds) {
    list += list.empty() ? "[" : ", ";
    list += kind == LayerKind::kAttention ? "\"full_attention\"" : "\"linear_attention\"";
  }
  return list + "]";
}

std::string text_config(const ModelShape& s) {
  Object o(2);
  o.text("model_type", "qwen4_exp_text");
  o.number("vocab_size", s.vocab).number("hidden_size", s.hidden);
  o.number("num_hidden_layers", s.layers).raw("layer_types", layer_types(s));
  o.number("num_attention_heads", s.heads).number("num_key_value_heads", s.kv_heads);
  o.number("head_dim", s.head_dim).text("hidden_act", "silu");
  o.number("max_position_embeddings", s.max_positions);
  o.raw("rms_norm_eps", decimal(static_cast<double>(s.eps), 9)).boolean("attention_bias", false);
  o.number("linear_num_key_heads", s.gdn_k_heads).number("linear_num_value_heads", s.gdn_v_heads);
  o.number("linear_key_head_dim", s.gdn_head_dim).number("linear_value_head_dim", s.gdn_head_dim);
  o.number("linear_conv_kernel_dim", s.gdn_kernel);
  o.text("output_gate_type", s.gdn_silu_gate ? "silu" : "sigmoid");
  o.number("num_experts", s.experts).number("num_experts_per_tok", s.top_k);
  o.number("moe_intermediate_size", s.expert_inner);
  o.number("shared_expert_intermediate_size", s.shared_inner)
      .boolean("norm_topk_prob", s.norm_topk);
  o.number("hc_count", s.streams).number("hc_lowrank", s.rank);
  if (s.ple_layer >= 0) {
    o.raw("ple_layer_ids", "[" + std::to_string(s.ple_layer + 1) + "]");
    o.number("ple_embed_dim", s.ple_dim).number("ple_conv_kernel_size", s.ple_kernel);
    o.number("ngram_size", s.ngram_size).number("heads_per_ngram", s.heads_per_ngram);
    o.number("ngram_vocab_size_base", s.ngram_vocab_base);
    o.number("make_ngram_vocab_size_divisible_by", s.ngram_divisor).number("seed", s.ngram_seed);
  } else {
    o.raw("ple_layer_ids", "[]");
  }
  o.number("indexer_n_heads", s.index_heads).number("indexer_kv_heads", 1);
  o.number("indexer_head_dim", s.index_dim).number("indexer_budget", s.index_budget);
  o.number("indexer_compress_ratio", s.index_block);
  Object rope(4);
  rope.text("rope_type", "default").raw("rope_theta", decimal(s.rope_theta, 17));
  rope.raw("partial_rotary_factor", decimal(double{1} * s.rotary / s.head_dim, 17));
  o.raw("rope_parameters", rope.close());
  o.number("eos_token_id", s.separator).boolean("tie_word_embeddings", false);
  o.number("mtp_num_hidden_layers", s.mtp_layers);
  o.text("mtp_hidden_norm", s.mtp_per_stream ? "stream" : "stack");
  return o.close();
}

}  // namespace

std::string synthetic_config(const ModelShape& shape) {
  Object quantization(2);
  quantization.text("quant_method", "exl3").raw("bits", "3.05").number("head_bits", 5);
  quantization.text("codebook", "mul1");
  Object o(0);
  o.raw("architectures", "[\"Qwen4ExpForConditionalGeneration\"]").text("model_type", "qwen4_exp");
  o.boolean("tie_word_embeddings", false).raw("text_config", text_config(shape));
  o.raw("quantization_config", quantization.close());
  return o.close() + "\n";
}

}  // namespace flashnext
