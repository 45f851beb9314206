// The layer graph: ModelShape and weights -> the ordered op list of a step (spec/model.md 2 to 7).
#pragma once

#include "cpp/bank/weights.h"
#include "cpp/cache/expert_cache.h"
#include "cpp/model/program.h"
#include "cpp/model/state.h"
#include "cpp/model/step_buffer.h"

#include <cstdint>
#include <vector>

namespace flashnext {

struct Bucket {
  Phase phase;
  std::int32_t rows;
  std::int32_t segments;
  std::int32_t outputs;
};

struct GraphContext {
  const Checkpoint& checkpoint;
  const Weights& weights;
  const StatePool& state;
  std::int32_t levels;
  std::int32_t window;              // most positions of a lane
  std::int32_t token_limit;         // ids >= it are never sampled
  std::int32_t* ticket;             // (1) zero when a step begins: RouteArgs
  const cache::ExpertCache* cache;  // routed experts in host memory; null: all are on the device
  const std::int32_t* forced;  // (layers with experts, decode rows, top_k) replayed choices or null
};

// What a trunk program leaves behind, at device addresses that stay valid until the next program
// runs.
struct TrunkBuffers {
  float* streams;        // (rows, S, D): after the last layer
  std::size_t scratch;   // mark of the builder: where the trunk's other buffers begin
  float* logits;         // (outputs, vocab)
  std::int32_t* tokens;  // (outputs): what the sampler drew
  // What a rewind replays: recurrences on what their convolutions gave them, and the push of every
  // window. Their inputs are kept apart a layer in a decode step.
  std::vector<GdnRecurArgs> recurrences;
  std::vector<WindowPushArgs> pushes;
};

struct TrunkOptions {
  Phase phase = Phase::kPrefill;  // a decode step may be rewound: what that replays is kept a layer
  // Pinned (outputs): the sampler writes there, so that a token needs no copy. Null: device memory.
  std::int32_t* tokens = nullptr;
  float* taps = nullptr;  // (layers, rows, S * D): streams after every layer, or null
  std::byte* packed_host =
      nullptr;  // pinned (rows, heads, row_bytes): n-gram rows that the host gathered, or null
};

// The hash of a model's n-grams for the rows of `step`; ids is left for the caller.
NgramHashArgs ngram_hash_args(const ModelShape& shape, const NgramTable& table,
                              const StepView& step);

// Adds the trunk to `builder`; `step` is the device view of the bucket.
TrunkBuffers build_trunk(GraphBuilder& builder, const GraphContext& context, const StepView& step,
                         const TrunkOptions& options);

// Adds the replay of every recurrence and window, with the segments of `step`.
void build_rewind(GraphBuilder& builder, const TrunkBuffers& trunk, const StepView& step);

struct MtpBuffers {
  float* hidden;         // in (rows, S, D): the trunk's streams at the row's position
  float* streams;        // out (rows, S, D): after the block
  float* logits;         // (outputs, vocab)
  std::int32_t* tokens;  // (outputs)
};
// Row: token = id at the next position, pos = slot.
MtpBuffers build_mtp(GraphBuilder& builder, const GraphContext& context, const StepView& step,
                     Phase phase);

}  // namespace flashnext
