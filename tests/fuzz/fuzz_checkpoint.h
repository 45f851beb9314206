// A small valid checkpoint in memory, as material for mutation.
#pragma once

#include "cpp/checkpoint/checkpoint.h"
#include "cpp/checkpoint/ngram_hash.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace flashnext::fuzzing {

inline std::map<std::string, std::string> tiny_config() {
  return {
      {"architectures", R"(["Qwen4ExpForConditionalGeneration"])"},
      {"model_type", R"("qwen4_exp")"},
      {"vocab_size", "128"},
      {"hidden_size", "128"},
      {"num_hidden_layers", "2"},
      {"layer_types", R"(["linear_attention", "full_attention"])"},
      {"num_attention_heads", "1"},
      {"num_key_value_heads", "1"},
      {"head_dim", "128"},
      {"max_position_embeddings", "64"},
      {"linear_num_key_heads", "1"},
      {"linear_num_value_heads", "1"},
      {"num_experts", "1"},
      {"num_experts_per_tok", "1"},
      {"moe_intermediate_size", "128"},
      {"shared_expert_intermediate_size", "128"},
      {"hc_count", "1"},
      {"hc_lowrank", "1"},
      {"ple_layer_ids", "[1]"},
      {"ple_embed_dim", "320"},
      {"heads_per_ngram", "1"},
      {"ngram_vocab_size_base", "2"},
      {"make_ngram_vocab_size_divisible_by", "4"},
      {"indexer_n_heads", "1"},
      {"indexer_kv_heads", "1"},
      {"indexer_head_dim", "128"},
      {"indexer_budget", "4"},
      {"indexer_compress_ratio", "4"},
      {"rope_theta", "1e7"},
      {"partial_rotary_factor", "0.25"},
      {"eos_token_id", "7"},
  };
}

inline std::string join(const std::map<std::string, std::string>& members) {
  std::string out;
  for (const auto& [key, value] : members) {
    out += (out.empty() ? "{\"" : ",\"") + key + "\":" + value;
  }
  return out + "}";
}

struct Entry {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

inline Entry entry(const std::string& name, const std::string& dtype,
                   std::vector<std::int64_t> shape, std::string bytes = "") {
  if (bytes.empty()) {
    std::size_t n = dtype == "I64" ? 8 : dtype == "I32" ? 4 : 2;
    for (const std::int64_t dim : shape) n *= static_cast<std::size_t>(dim);
    bytes.assign(n, '\x11');
  }
  return {name, dtype, std::move(shape), std::move(bytes)};
}

inline std::vector<Entry> tiny_tensors(const ModelShape& shape) {
  std::vector<Entry> out;
  const auto raw = [](const std::vector<std::int64_t>& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * 8);
  };
  for (const TensorRule& rule : tensor_table(shape)) {
    const std::string& n = rule.name;
    if (rule.role == Role::kExl3) {
      const std::int64_t in = rule.shape[1], rows = rule.shape[0];
      out.push_back(entry(n + ".trellis", "I16", {in / 16, rows / 16, 16}));
      out.push_back(entry(n + ".suh", "F16", {in}));
      out.push_back(entry(n + ".svh", "F16", {rows}));
      out.push_back(entry(n + ".mul1", "I32", {}, "\x2D\xD1\xDC\x83"));
    } else if (rule.role == Role::kPlain) {
      out.push_back(entry(n, "BF16", rule.shape));
    } else {
      const NgramHash hash = derive_ngram_hash(shape);
      out.push_back(entry(n + ".shard_0.trellis", "I16", {hash.rows / 2, 11}));
      out.push_back(entry(n + ".shard_1.trellis", "I16", {hash.rows - hash.rows / 2, 11}));
      out.push_back(entry(n + ".head_bias", "F16", {shape.ngram_heads(), 160}));
      out.push_back(entry(n + ".head_offsets", "I64", {shape.ngram_heads()}, raw(hash.offsets)));
      out.push_back(entry(n + ".head_vocab_sizes", "I64", {shape.ngram_heads()}, raw(hash.sizes)));
      out.push_back(entry(n + ".layer_multipliers", "I64", {3}, raw(hash.multipliers)));
    }
  }
  return out;
}

}  // namespace flashnext::fuzzing
