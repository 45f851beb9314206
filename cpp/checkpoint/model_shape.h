// ModelShape: the frozen truth about a model, read once from config.json (spec/model.md 1).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flashnext {

enum class LayerKind : std::uint8_t { kDeltaNet, kAttention };

struct ModelShape {
  std::int32_t hidden = 0;  // D
  std::int32_t layers = 0;
  std::int32_t vocab = 0;  // rows of the head, padding included
  std::vector<LayerKind> layer_kinds;
  float eps = 1e-6f;
  std::int32_t max_positions = 0;

  std::int32_t heads = 0, kv_heads = 0, head_dim = 0, rotary = 0;
  double rope_theta = 0;

  std::int32_t gdn_k_heads = 0, gdn_v_heads = 0, gdn_head_dim = 128, gdn_kernel = 4;
  bool gdn_silu_gate = false;  // output gate: false = sigmoid, true = silu

  std::int32_t experts = 0, top_k = 0, expert_inner = 0, shared_inner = 0;
  bool norm_topk = true;

  std::int32_t streams = 4, rank = 320;

  std::int32_t ple_layer =
      -1;  // zero-based layer before whose mix the n-gram layer is added; -1: none
  std::int32_t ple_dim = 0, ple_kernel = 4;
  std::int32_t ngram_size = 3, heads_per_ngram = 8, ngram_width = 160;
  std::int64_t ngram_vocab_base = 20000000;
  std::int32_t ngram_divisor = 128;
  std::int64_t ngram_seed = 1234;
  std::int32_t separator = -1;  // eos_token_id (first entry): the n-gram separator

  std::int32_t index_heads = 0, index_dim = 0, index_budget = 0, index_block = 0;

  std::int32_t mtp_layers = 0;  // 0 or 1
  bool mtp_per_stream = false;  // mtp_hidden_norm: "stream" / "stack"

  std::int32_t stack() const { return streams * hidden; }
  std::int32_t gdn_channels() const { return (2 * gdn_k_heads + gdn_v_heads) * gdn_head_dim; }
  std::int32_t gdn_value() const { return gdn_v_heads * gdn_head_dim; }
  std::int32_t q_dim() const { return heads * head_dim; }
  std::int32_t kv_dim() const { return kv_heads * head_dim; }
  std::int32_t ngram_heads() const { return (ngram_size - 1) * heads_per_ngram; }
  std::int32_t max_blocks() const { return index_budget / index_block; }
};

// Throws CheckpointError naming the key, its value and what is expected. `source` is the file's
// name, for messages.
ModelShape parse_config(std::string_view json, const std::string& source);

}  // namespace flashnext
