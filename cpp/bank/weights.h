// Weights: typed views of every tensor of a checkpoint where a device can read it, and the memory
// behind them. Owns: one arena on the device, filled by a count pass and a place pass of the same
// code (weights.cpp), and the token embedding where that stays in pinned memory. On the host device
// EXL3 members, the token embedding and the n-gram table stay in place in the mapped files, so a 46
// GB bank needs no second copy. The Checkpoint must outlive the Weights.
#pragma once

#include "cpp/checkpoint/checkpoint.h"
#include "cpp/device/device.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace flashnext {

struct GdnWeights {
  Exl3Weight qkv, z, out;
  DenseWeight a, b;
  const float* conv;     // (channels, kernel)
  const float* rate;     // (v_heads): exp(A_log)
  const float* dt_bias;  // (v_heads)
  const float* norm;     // (128)
};

struct AttnWeights {
  Exl3Weight q, k, v, index, o;
  const float* q_norm;   // (head_dim), 1 + w
  const float* k_norm;   // (head_dim), 1 + w
  const float* iq_norm;  // (index_dim), 1 + w
  const float* ik_norm;  // (index_dim), 1 + w
};

struct MoeWeights {
  DenseWeight router;
  DenseWeight shared_gate;
  const ExpertRef* experts;  // device table (num_experts), or null: they are in a Bank
  const ExpertRef* shared;   // device table (1)
  std::int32_t words[3];     // of gate, up, down
  std::int32_t shared_words[3];
};

struct LayerWeights {
  LayerKind kind;
  MixWeight attn_mix, mlp_mix;
  GdnWeights gdn;    // kDeltaNet
  AttnWeights attn;  // kAttention
  MoeWeights moe;
};

struct PleWeights {
  DenseWeight key, value;
  const float* conv;               // (streams * hidden, kernel)
  const float* norm_key;           // (streams * hidden), 1 + w
  const float* norm_query;         // (streams * hidden), 1 + w
  const float* norm_conv;          // (streams * hidden), 1 + w
  const std::uint16_t* bias;       // fp16 (heads, width) or null
  const std::byte* const* shards;  // table of shard addresses that the device can read
  bool host_gather;                // the device cannot read the table: the host gathers rows
};

struct MtpWeights {
  Exl3Weight fc_embedding, fc_hidden;
  const float* norm_embed;   // (hidden), 1 + w
  const float* norm_hidden;  // (streams * hidden), 1 + w
  LayerWeights block;
  MixWeight mixer;
};

struct WeightOptions {
  std::int32_t rope_positions = 0;  // rows of the rotation table: the window
  // An n-gram table up to this size is copied to the device; a larger one is gathered by the host
  // from the mapping.
  std::uint64_t ngram_device_bytes = std::uint64_t{1} << 30;
  // False: the routed experts stay in a Bank, and MoeWeights.experts is null.
  bool experts = true;
  // False: the token embedding stays in pinned host memory, where the device reads its rows.
  bool embedding = true;
  bool mtp = false;  // the MTP head too, when the checkpoint has one
};

class Weights {
 public:
  // Throws OutOfMemory, or CheckpointError when a value does not fit its place. `progress` hears
  // stages "embedding" and "weights" in bytes.
  static Weights load(const Checkpoint& checkpoint, Device& device, const WeightOptions& options,
                      const Progress& progress = {});
  // The same views without memory behind them, for planning: shapes are right, addresses of placed
  // parts are null. Allocates what load() would from `plan`.
  static Weights plan(const Checkpoint& checkpoint, Device& plan, const WeightOptions& options);

  const std::byte* embedding = nullptr;  // bf16 (vocab, hidden)
  std::vector<LayerWeights> layers;
  MixWeight mixer{};
  Exl3Weight head{};
  std::optional<PleWeights> ple;
  std::optional<MtpWeights> mtp;  // none when it is not wanted
  const float* rope = nullptr;    // (positions, rotary): cosines, then sines

 private:
  Block arena_;
  Block embedding_;  // where it is not in the arena
};

}  // namespace flashnext
