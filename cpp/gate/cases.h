// Random valid cases of every op: what the gate and the device tests run. Arguments give the
// shape; the values come from a fixed seed a case.
#pragma once

#include "cpp/gate/case.h"

#include <utility>
#include <vector>

namespace flashnext::gate {

struct Dims {
  const char* name;
  std::int32_t dim, streams, rank, experts, top_k, vocab, heads, width;
};
inline constexpr Dims kTiny = {"tiny", 256, 4, 128, 32, 4, 1536, 8, 160};
inline constexpr Dims kReal = {"real", 2560, 4, 320, 512, 10, 248320, 16, 160};

// fp16 products: two half activations a value (cuda/half_product.cuh) against fp32 on the host.
inline constexpr double kProductTolerance = 3e-6;
inline constexpr double kNormTolerance = 1e-6;

enum class MixKind { kPlain, kPending, kPicked };

// ---- streams and products: cases_streams.cpp
Case embed_case(const Dims& d, std::int32_t rows);
Case residual_case(const Dims& d, std::int32_t rows);
Case mix_case(const Dims& d, std::int32_t rows, MixKind kind);
Case dense_case(const std::string& name, std::int32_t in, std::vector<std::int32_t> outs,
                std::int32_t rows);
Case mtp_norm_case(const Dims& d, std::int32_t rows, bool per_stream);
Case mtp_join_case(const Dims& d, std::int32_t rows);

// ---- router, expert sum, sampler: cases_choice.cpp
// Sparse weights and short activations: the logits are exact in any order, so that the choice must
// be the host's. dim is a multiple of 64. Buffers: x, router, shared_gate, forced, then the outputs
// ids, weights, gate and ticket.
enum class RouteKind { kFine, kTies, kForced };
Case route_case(const Dims& d, std::int32_t rows, bool normalise, RouteKind kind);
Case combine_case(const Dims& d, std::int32_t rows);
// Rows with every combination of filters, ties, and refused logits.
Case sample_case(const Dims& d, std::int32_t rows, std::int32_t limit, bool coarse);

// ---- n-gram layer: cases_ngram.cpp
Case ngram_hash_case(std::int32_t rows);
// Three shards whose first rows lie `shift` bytes into their memory.
Case ngram_gather_case(std::int32_t rows, std::int32_t row_bytes, std::size_t shift);
Case ngram_decode_case(std::int32_t rows, std::int32_t bits, bool bias);
Case ple_gate_case(const Dims& d, std::int32_t rows);
Case ple_conv_case(const Dims& d, const std::vector<std::int32_t>& lengths);
Case window_push_case(const Dims& d, std::int32_t depth, const std::vector<std::int32_t>& lengths);

// Segments of various lengths over states 0 and up, one slot in place, one moved, one fresh.
struct Segmented {
  std::vector<Row> rows;
  std::vector<Segment> segments;
};
Segmented make_segments(const std::vector<std::int32_t>& lengths);

// ---- EXL3: cases_exl3.cpp
inline constexpr std::int32_t kAllWords[] = {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128};
// Products of one input; a bias at every other one.
Case exl3_case(std::int32_t in, const std::vector<std::pair<std::int32_t, std::int32_t>>& out_words,
               std::int32_t rows, std::int32_t levels);
// `distinct` sets of weights under `experts` ids; ids = null when !picked (every slot its own).
// With a shared expert unless shared_inner is 0; of one of `groups` groups of experts unless that
// is 0, with exactly its pairs as max_pairs.
struct ExpertsShape {
  std::int32_t experts, distinct, dim, inner, words[3], slots;
  std::int32_t shared_inner = 0;
  std::int32_t shared_words[3] = {};
  std::int32_t groups = 0;
};
Case experts_case(const ExpertsShape& s, std::int32_t rows, std::int32_t levels, bool picked);

// ---- Gated DeltaNet: cases_gdn.cpp
// `in`: inputs of the gates' products. In place: every segment writes the slot that it reads.
Case gdn_conv_case(std::int32_t k_heads, std::int32_t v_heads, std::int32_t in,
                   const std::vector<std::int32_t>& lengths, bool in_place);
Case gdn_recur_case(std::int32_t k_heads, std::int32_t v_heads,
                    const std::vector<std::int32_t>& lengths);
Case gdn_gate_case(std::int32_t v_heads, std::int32_t rows, bool silu);

// ---- sparse attention: cases_attention.cpp
struct AttnShape {
  std::int32_t heads, kv_heads, max_blocks;
};
inline constexpr AttnShape kTinyAttention = {4, 2, 16};
inline constexpr AttnShape kRealAttention = {24, 2, 512};
// Rows [pos0, pos0 + rows) of two lanes each, over caches that hold the past.
Case attn_prepare_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows);
// Small integers, so that scores are exact and full of ties: the choice must be the host's.
Case index_select_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows);
Case attention_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows);

// ---- elementary functions through ops, over all exponents: cases_functions.cpp
// combine with one shared expert of ones: y = sigmoid(gate).
Case sigmoid_case();
// gdn_conv with one tap of one: values are silu(u), decays exp(-softplus(a)), betas sigmoid(b).
Case silu_exp_softplus_case();

}  // namespace flashnext::gate
