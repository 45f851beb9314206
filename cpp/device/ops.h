// The op table: one plain argument struct an op, shared by every device. Shapes stand behind every
// pointer; all pointers are device memory unless the comment says otherwise; fp32 unless said
// otherwise; row-major.
//
// A step processes `rows` tokens. Rows of one sequence are contiguous and form a segment; a program
// is built for a maximum of rows, and the step's real numbers are read from StepView when the op
// runs, so that one captured graph serves every step of its bucket. The result for a row never
// depends on the number of rows (spec/numerics.md).
//
// This file is long because it is the whole table: one struct an op.
#pragma once

#include "cpp/device/mailbox.h"
#include "cpp/device/rows.h"
#include "cpp/exl3/weight.h"

#include <cstddef>
#include <cstdint>

namespace flashnext {

enum class Op : std::uint8_t {
  kEmbed,
  kResidual,
  kMix,
  kExl3Linear,
  kDense,
  kGdnConv,
  kGdnRecur,
  kGdnGate,
  kWindowPush,
  kAttnPrepare,
  kIndexSelect,
  kAttention,
  kRoute,
  kExperts,
  kCombine,
  kNgramHash,
  kNgramGather,
  kNgramDecode,
  kPleGate,
  kPleConv,
  kMtpNorm,
  kMtpJoin,
  kSample,
  kResolve,
  kFetch,
  kCpuPost,
  kCpuJoin,
  kPace,
  kCount
};
inline constexpr int kNumOps = static_cast<int>(Op::kCount);
const char* to_string(Op op) noexcept;

inline constexpr int kPageTokens = 64;  // tokens of one KV page; also the tile of attention
inline constexpr int kMaxLinears = 4;   // products of one input that one op may evaluate
inline constexpr int kMaxNgramHeads = 64;

// ---- the step
// ---------------------------------------------------------------------------------------------------

struct Row {
  std::int32_t token;  // token id
  std::int32_t
      prev1;  // id one position earlier in the sequence; the n-gram separator before its start
  std::int32_t prev2;  // id two positions earlier; likewise
  std::int32_t pos;    // absolute position, from 0
  std::int32_t lane;   // row of the page table
  std::int32_t segment;
};

// Rows [row0, row0 + rows) continue one sequence at position pos0. With pos0 = 0 the old recurrent
// state is taken as zero whatever state_in holds. state_in may equal state_out.
struct Segment {
  std::int32_t row0;
  std::int32_t rows;
  std::int32_t pos0;
  std::int32_t lane;
  std::int32_t state_in;   // slot of the recurrent state that is read
  std::int32_t state_out;  // slot that receives the state after the last row
};

struct StepHead {
  std::int32_t rows;
  std::int32_t segments;
  std::int32_t outputs;   // rows whose logits are wanted
  std::int32_t sequence;  // of steps whose experts may miss: 1, 2, ..; the clock of recency
};

struct SampleParams {
  std::uint64_t seed = 0;
  float temperature = 0;   // 0 = argmax
  float top_p = 1;         // 1 = off
  float min_p = 0;         // 0 = off
  std::int32_t top_k = 0;  // 0 = off
  std::int32_t position =
      0;  // absolute position of the token that is drawn: the counter of the generator
  std::int32_t reserved = 0;
};

struct StepView {
  const StepHead* head;          // one
  const Row* rows;               // (rows)
  const Segment* segments;       // (segments)
  const std::int32_t* outputs;   // (outputs) row indices, ascending
  const SampleParams* sampling;  // (outputs)
  const std::int32_t* pages;     // (lanes, max_pages) page ids of a lane, in position order
  std::int32_t max_pages;
  std::int32_t max_rows;  // the bucket: rows <= max_rows
  std::int32_t max_segments;
  std::int32_t max_outputs;
};

// A number of rows that is known when the op runs: scale * *count, at most max.
struct RowCount {
  const std::int32_t* count;  // e.g. &head->rows
  std::int32_t scale;
  std::int32_t max;
};

struct Workspace {
  void* data;
  std::size_t bytes;
};

// ---- weights
// ----------------------------------------------------------------------------------------------------

// One product of fp16 weights.
struct DenseWeight {
  const std::uint16_t* w;  // fp16 (out, in), 16-byte aligned
  std::int32_t in;
  std::int32_t out;
};

// Where the members of one expert lie. A table of these, indexed by expert id, is what the expert
// op reads, so that a cache may move lines without touching the graph.
struct ExpertRef {
  const std::byte* trellis[3];  // gate, up: u16 (D/16, E/16, words); down: (E/16, D/16, words)
  const std::byte* suh[3];      // fp16 (D), (D), (E)
  const std::byte* svh[3];      // fp16 (E), (E), (D)
};

// One site of the gated residual (spec/model.md 2).
struct MixWeight {
  const float* norm;            // (streams * D), already 1 + w
  const std::uint16_t* down;    // fp16 (rank, streams * D)
  const std::uint16_t* up;      // fp16 (streams * D, rank)
  const std::uint16_t* inject;  // fp16 (streams, streams * D), or null at a mixer without injection
};

// ---- streams
// ----------------------------------------------------------------------------------------------------

// S[r, h] = E[token of row r] for every stream h.
struct EmbedArgs {
  static constexpr Op kOp = Op::kEmbed;
  StepView step;
  const std::byte* table;  // bf16 (vocab, D); may be unaligned on the host
  float* streams;          // out (rows, S, D)
  std::int32_t num_streams;
  std::int32_t dim;
};

// S[r, h] += inj[r, h] * y[r].
struct ResidualArgs {
  static constexpr Op kOp = Op::kResidual;
  RowCount rows;
  float* streams;    // in/out (rows, S, D)
  const float* inj;  // (rows, S)
  const float* y;    // (rows, D)
  std::int32_t num_streams;
  std::int32_t dim;
};

// The gated mix of one site, per output row i: with r = pick ? pick[i] : i,
// first S[r, h] += pending_inj[r, h] * pending_y[r] when pending_y is given (never together with
// pick), then x[i], inj[i].
struct MixArgs {
  static constexpr Op kOp = Op::kMix;
  RowCount rows;
  const std::int32_t* pick;  // (rows) input row of output row i, or null
  float* streams;            // in/out (input rows, S, D)
  const float* pending_inj;  // (rows, S) or null
  const float* pending_y;    // (rows, D) or null
  MixWeight w;
  float* x;    // out (rows, D)
  float* inj;  // out (rows, S); null when w.inject is null
  float eps;
  std::int32_t num_streams;
  std::int32_t dim;
  std::int32_t rank;
  Workspace workspace;
};

// ---- products
// ---------------------------------------------------------------------------------------------------

// y[i] = the integer linear w[i] (spec/numerics.md 1) of the same x, for i < n.
struct Exl3LinearArgs {
  static constexpr Op kOp = Op::kExl3Linear;
  RowCount rows;
  const float* x;             // (rows, in)
  Exl3Weight w[kMaxLinears];  // equal `in`
  float* y[kMaxLinears];      // out (rows, w[i].out)
  std::int32_t n;
  std::int32_t levels;  // 32258 or 127
  Workspace workspace;
};

// y[i] = w[i] x in fp32, k-order independent of the number of rows, for i < n.
struct DenseArgs {
  static constexpr Op kOp = Op::kDense;
  RowCount rows;
  const float* x;              // (rows, in)
  DenseWeight w[kMaxLinears];  // equal `in`
  float* y[kMaxLinears];       // out (rows, w[i].out)
  std::int32_t n;
  Workspace workspace;
};

// ---- Gated DeltaNet (spec/model.md 3)
// ---------------------------------------------------------------------------

struct GdnDims {
  std::int32_t k_heads;
  std::int32_t v_heads;
  std::int32_t head_dim;     // 128 for keys and values
  std::int32_t kernel;       // taps of the convolution, 4
  std::int64_t slot_stride;  // floats between the states of two slots
};

// What stands between the projections of a layer and its recurrence: the depthwise causal
// convolution of u with SiLU and l2 norms; the products a x and b x, with the arithmetic of kDense,
// and the gates that come of them; then the push of u, as kWindowPush does it: window of state_out
// = the last kernel - 1 rows of (window of state_in, then u).
//
// NOTE: x and the window of state_in must be complete before the op that precedes this one in its
// stream starts (in a step that op is the projection to u): a device may read both while that op
// still runs.
struct GdnConvArgs {
  static constexpr Op kOp = Op::kGdnConv;
  StepView step;
  GdnDims dims;
  const float* u;        // (rows, C), C = 2 k_heads * 128 + v_heads * 128
  const float* x;        // (rows, a.in): input of the layer
  DenseWeight a;         // v_heads outputs
  DenseWeight b;         // v_heads outputs, `in` of a
  const float* conv;     // (C, kernel)
  const float* rate;     // (v_heads): exp(A_log)
  const float* dt_bias;  // (v_heads)
  float* window;         // in/out state: (slots; kernel - 1, C), oldest first
  float* qkv;            // out (rows, C): q normed and scaled by 128^-0.5, k normed, v
  float* decay;          // out (rows, v_heads): exp(g)
  float* beta;           // out (rows, v_heads)
  Workspace workspace;
};

// The token recurrence. M of state_in -> o of every row, M of state_out.
struct GdnRecurArgs {
  static constexpr Op kOp = Op::kGdnRecur;
  StepView step;
  GdnDims dims;
  const float* qkv;    // (rows, C)
  const float* decay;  // (rows, v_heads)
  const float* beta;   // (rows, v_heads)
  float* state;        // (slots; v_heads, 128 key, 128 value)
  float* o;            // out (rows, v_heads, 128)
};

// y = o / rms(o) * w * gate(z), per head of 128.
struct GdnGateArgs {
  static constexpr Op kOp = Op::kGdnGate;
  RowCount rows;
  const float* o;  // (rows, v_heads, 128)
  const float* z;  // (rows, v_heads, 128)
  const float* w;  // (128), plain
  float* y;        // out (rows, v_heads, 128)
  float eps;
  std::int32_t v_heads;
  std::int32_t silu_gate;  // 0: sigmoid(z), 1: silu(z)
};

// For every segment: window of state_out = the last `depth` rows of (window of state_in, then x).
// Zero history at pos0 = 0.
struct WindowPushArgs {
  static constexpr Op kOp = Op::kWindowPush;
  StepView step;
  const float* x;  // (rows, channels), rows x_stride floats apart
  std::int64_t x_stride;
  float* window;             // state: (slots; depth, channels), oldest first
  std::int64_t slot_stride;  // floats
  std::int32_t depth;
  std::int32_t channels;
};

// ---- sparse attention (spec/model.md 4)
// -------------------------------------------------------------------------

struct AttnDims {
  std::int32_t heads;
  std::int32_t kv_heads;
  std::int32_t head_dim;     // 256
  std::int32_t rotary;       // rotated dims of a head, also of an index head: 64
  std::int32_t index_heads;  // 4
  std::int32_t index_dim;    // 128
  std::int32_t block;        // tokens of a selection block: 4
  std::int32_t max_blocks;   // budget / block: 512
  float eps;
};

// Planes of one layer in the page pool; a page holds kPageTokens tokens.
struct KvPlanes {
  std::uint16_t* k;     // fp16 (pages, kv_heads, 64, head_dim), roped
  std::uint16_t* v;     // fp16 (pages, kv_heads, 64, head_dim)
  float* index_pooled;  // (pages, 64 / block, index_dim), normed and roped at the block start
};

// Norms, RoPE and cache writes: K and V of every row, and the pooled key of each block that a row
// completes, of raw index keys that are rows of this step or stand in the window of state_in; then
// the push of the raw keys, as kWindowPush does it: window of state_out = the last block - 1 of
// (window of state_in, then those of the rows).
//
// NOTE: the window of state_in must be complete before the op that precedes this one in its stream
// starts: a device may read it while that op still runs.
struct AttnPrepareArgs {
  static constexpr Op kOp = Op::kAttnPrepare;
  StepView step;
  AttnDims dims;
  const float* qg;       // (rows, heads, 2 * head_dim): [query | gate] a head
  const float* k;        // (rows, kv_heads, head_dim)
  const float* v;        // (rows, kv_heads, head_dim)
  const float* index;    // (rows, index_heads + 1, index_dim): query heads, then the raw key
  const float* q_norm;   // (head_dim), 1 + w
  const float* k_norm;   // (head_dim), 1 + w
  const float* iq_norm;  // (index_dim), 1 + w
  const float* ik_norm;  // (index_dim), 1 + w
  const float* rope;     // (positions, rotary): rotary/2 cosines, then rotary/2 sines
  KvPlanes planes;
  float* window;             // in/out state: (slots; block - 1, index_dim) raw keys, oldest first
  std::int64_t slot_stride;  // floats
  float* q;                  // out (rows, heads, head_dim), normed, roped
  float* iq;                 // out (rows, index_heads, index_dim), normed, roped
};

// The raw index keys of the rows, as what is pushed onto their window.
inline WindowPushArgs index_push(const AttnPrepareArgs& args) {
  const AttnDims& d = args.dims;
  return {args.step,
          args.index + std::int64_t{d.index_heads} * d.index_dim,
          std::int64_t{d.index_heads + 1} * d.index_dim,
          args.window,
          args.slot_stride,
          d.block - 1,
          d.index_dim};
}

// Which blocks a row may see. count = -1: all of its past (dense, while complete blocks <=
// max_blocks). Else the max_blocks best complete blocks, ascending by block index; the tail 4 nb ..
// p is always allowed.
struct IndexSelectArgs {
  static constexpr Op kOp = Op::kIndexSelect;
  StepView step;
  AttnDims dims;
  const float* iq;  // (rows, index_heads, index_dim)
  KvPlanes planes;
  std::int32_t* blocks;      // out (rows, max_blocks)
  std::int32_t* count;       // out (rows)
  std::int32_t max_context;  // most positions a lane may hold: bounds the scores
  Workspace workspace;
};

// o = softmax(q k / sqrt(head_dim)) v over the allowed set, times sigmoid(gate).
struct AttentionArgs {
  static constexpr Op kOp = Op::kAttention;
  StepView step;
  AttnDims dims;
  const float* q;              // (rows, heads, head_dim)
  const float* qg;             // (rows, heads, 2 * head_dim), for the gate
  const std::int32_t* blocks;  // (rows, max_blocks)
  const std::int32_t* count;   // (rows)
  KvPlanes planes;
  float* y;  // out (rows, heads, head_dim)
  std::int32_t max_context;
  Workspace workspace;
};

// ---- mixture of experts (spec/model.md 5)
// -----------------------------------------------------------------------

// Per row: softmax of router x, and its top_k best. The products add up along k as those of `dense`
// do.
struct RouteArgs {
  static constexpr Op kOp = Op::kRoute;
  RowCount rows;
  const float* x;           // (rows, dim)
  DenseWeight router;       // (experts, dim)
  DenseWeight shared_gate;  // (1, dim)
  // (rows, top_k) expert ids that replace the choice (replayed routing traces), or null. A row
  // whose first id is negative chooses for itself; the others' ids are all those of experts.
  const std::int32_t* forced;
  std::int32_t* ids;  // out (rows, top_k), best first, the lower id first on ties; or forced
  float* weights;     // out (rows, top_k)
  float* gate;        // out (rows): shared_gate x
  std::int32_t top_k;
  std::int32_t normalise;  // 1: weights of a row sum to one; 0: plain softmax probabilities
  std::int32_t* ticket;    // (1) zero before the first launch; the op leaves it zero
  Workspace workspace;
};

// y[r, s] = expert ids[r, s] of x[r] (spec/numerics.md 2). ids = null: every slot is its own expert
// (slot s -> s). With a group only pairs (r, s) whose expert has group[id] = only are computed and
// only their experts' lines read; y of the others stays as it is. The shared expert has no group.
struct ExpertsArgs {
  static constexpr Op kOp = Op::kExperts;
  RowCount rows;
  const float* x;            // (rows, dim)
  const std::int32_t* ids;   // (rows, slots) or null
  const ExpertRef* experts;  // (num_experts)
  float* y;                  // out (rows, slots, dim)
  std::int32_t num_experts;
  std::int32_t slots;
  std::int32_t dim;       // D
  std::int32_t inner;     // E
  std::int32_t words[3];  // u16 words a tile of gate, up, down
  std::int32_t levels;
  // The shared expert of the same rows, or null: shared_y[r] = *shared of x[r].
  const ExpertRef* shared;  // (1)
  float* shared_y;          // out (rows, dim)
  std::int32_t shared_inner;
  std::int32_t shared_words[3];
  const std::int32_t* group;  // (num_experts) or null: every pair
  std::int32_t only;
  std::int32_t max_pairs;  // most pairs of the group, 0: rows.max * slots
  Workspace workspace;
};

// The most pairs that a launch computes.
inline std::int32_t max_pairs(const ExpertsArgs& args) {
  const std::int32_t all = args.rows.max * args.slots;
  return args.max_pairs > 0 && args.max_pairs < all ? args.max_pairs : all;
}

// The shared expert as an op of its own: one slot, every row.
inline ExpertsArgs shared_alone(const ExpertsArgs& args) {
  ExpertsArgs s = args;
  s.ids = nullptr;
  s.experts = args.shared;
  s.y = args.shared_y;
  s.num_experts = 1;
  s.slots = 1;
  s.inner = args.shared_inner;
  for (int i = 0; i < 3; ++i) s.words[i] = args.shared_words[i];
  s.shared = nullptr;
  s.group = nullptr;
  s.max_pairs = 0;
  return s;
}

// y[r] = sum over slots in order of weights[r, s] * slots_y[r, s] (fma), then
// fma(sigmoid(shared_gate[r]), shared_y[r]).
struct CombineArgs {
  static constexpr Op kOp = Op::kCombine;
  RowCount rows;
  const float* slot_y;       // (rows, slots, dim)
  const float* weights;      // (rows, slots)
  const float* shared_y;     // (rows, dim)
  const float* shared_gate;  // (rows)
  float* y;                  // out (rows, dim)
  std::int32_t slots;
  std::int32_t dim;
};

// ---- n-gram layer (spec/model.md 6)
// -----------------------------------------------------------------------------

// Row ids of the hashed 2..n-grams that end at each row.
struct NgramHashArgs {
  static constexpr Op kOp = Op::kNgramHash;
  StepView step;
  std::int64_t* ids;  // out (rows, heads)
  std::int64_t multipliers[3];
  std::int64_t sizes[kMaxNgramHeads];    // modulus of a head
  std::int64_t offsets[kMaxNgramHeads];  // first table row of a head
  std::int32_t heads;                    // heads of 2-grams, then as many of 3-grams
  std::int32_t separator;                // eos id: nothing before it is seen
};

// packed[r, h] = table row ids[r, h], copied as it lies.
struct NgramGatherArgs {
  static constexpr Op kOp = Op::kNgramGather;
  RowCount rows;
  const std::int64_t* ids;         // (rows, heads)
  const std::byte* const* shards;  // (num_shards) host or mapped memory, any alignment
  std::byte* packed;               // out (rows, heads, row_bytes)
  std::int64_t shard_rows;
  std::int64_t table_rows;
  std::int32_t heads;
  std::int32_t row_bytes;
};

// e[r, h] = decoded row (spec/exl3.md 5), rounded to fp16 and widened.
struct NgramDecodeArgs {
  static constexpr Op kOp = Op::kNgramDecode;
  RowCount rows;
  const std::byte* packed;    // (rows, heads, row_bytes)
  const std::uint16_t* bias;  // fp16 (heads, width) or null
  float* e;                   // out (rows, heads, width)
  std::int32_t heads;
  std::int32_t width;  // 160
  std::int32_t bits;   // K 1..8; 0: rows are plain fp16 (an unquantised table)
  std::int32_t row_bytes;
};

// Gate of the layer per stream, and the normed gated value, which is what the convolution sees.
struct PleGateArgs {
  static constexpr Op kOp = Op::kPleGate;
  RowCount rows;
  const float* streams;     // (rows, S, D)
  const float* key;         // (rows, S, D): key_proj e
  const float* value;       // (rows, D): value_proj e
  const float* norm_key;    // (S * D), 1 + w
  const float* norm_query;  // (S * D), 1 + w
  const float* norm_conv;   // (S * D), 1 + w
  float* gate;              // out (rows, S): sigma(t_h)
  float* m;                 // out (rows, S, D)
  float eps;
  std::int32_t num_streams;
  std::int32_t dim;
};

// S[r, h] += gate[r, h] * value[r] + silu(conv(m)). Taps at t - dilation * (kernel - 1 - i). Reads
// the window of state_in.
struct PleConvArgs {
  static constexpr Op kOp = Op::kPleConv;
  StepView step;
  float* streams;            // in/out (rows, S, D)
  const float* gate;         // (rows, S)
  const float* value;        // (rows, D)
  const float* m;            // (rows, S, D)
  const float* conv;         // (S * D, kernel)
  const float* window;       // state: (slots; dilation * (kernel - 1), S * D), oldest first
  std::int64_t slot_stride;  // floats
  std::int32_t num_streams;
  std::int32_t dim;
  std::int32_t kernel;
  std::int32_t dilation;
};

// ---- MTP head (spec/model.md 7)
// ---------------------------------------------------------------------------------

// e = rms(E[token]), h = rms(hidden): one statistic a stream or one over the stack.
struct MtpNormArgs {
  static constexpr Op kOp = Op::kMtpNorm;
  StepView step;
  const std::byte* table;    // bf16 (vocab, D)
  const float* hidden;       // (rows, S, D): the trunk's streams at the row's position
  const float* norm_embed;   // (D), 1 + w
  const float* norm_hidden;  // (S * D), 1 + w
  float* e;                  // out (rows, D)
  float* h;                  // out (rows, S, D)
  float eps;
  std::int32_t num_streams;
  std::int32_t dim;
  std::int32_t per_stream;  // 1: "stream", 0: "stack"
};

// S[r, h] = fh[r, h] + fe[r].
struct MtpJoinArgs {
  static constexpr Op kOp = Op::kMtpJoin;
  RowCount rows;
  const float* fe;  // (rows, D)
  const float* fh;  // (rows, S, D)
  float* streams;   // out (rows, S, D)
  std::int32_t num_streams;
  std::int32_t dim;
};

// ---- sampling (spec/numerics.md 4)
// ------------------------------------------------------------------------------

struct SampleArgs {
  static constexpr Op kOp = Op::kSample;
  StepView step;
  const float* logits;   // (outputs, vocab)
  std::int32_t* tokens;  // out (outputs); may be pinned memory: each is written once, never read
  std::int32_t vocab;    // row length of logits
  std::int32_t limit;    // ids >= limit are padding and never drawn
  Workspace workspace;
};

// ---- experts in host memory (design.md 4)
// ------------------------------------------------------------------------------
//
// A layer keeps `lines` of its experts on the device; the others lie in the bank. In a decode
// step kResolve decides for every distinct expert of the step, in the order of first appearance
// (row by row, slot by slot), where it is computed, and kFetch, kCpuPost and kCpuJoin follow:
//   group 0 (kGroupHit)     it has a line;
//   group 1 (kGroupFetched) it is copied from the bank into a line (installed) or into staging;
//   group 2 (kGroupCpu)     the processor computes it (mailbox.h).
// cpp/device/resolve.h is the rule itself, shared by the host op, the mirror of the cache and the
// replay of traces.

inline constexpr std::int32_t kGroupHit = 0;
inline constexpr std::int32_t kGroupFetched = 1;
inline constexpr std::int32_t kGroupCpu = 2;
inline constexpr std::int32_t kFreeLine = -1;     // expert_of: holds nothing
inline constexpr std::int32_t kFillingLine = -2;  // expert_of: a copy is under way; not to be used
inline constexpr std::int32_t kUnordered = 0x7fffffff;  // CacheTables::order: after all others

// How an expert lies in a line of the bank or of the device: byte offsets of its members, each a
// multiple of 256.
struct LineLayout {
  std::int64_t trellis[3];  // gate, up, down
  std::int64_t suh[3];
  std::int64_t svh[3];
  std::int64_t bytes;  // of a line, a multiple of 256: also the distance of two lines
};

// What is known about the lines of one layer, in memory of the device that resolves.
struct CacheTables {
  std::int32_t* line_of;       // (experts) line that holds it, or -1
  std::int32_t* expert_of;     // (lines) expert, kFreeLine or kFillingLine
  std::int32_t* stamp;         // (lines) sequence of the step that used the line last; 0: none yet
  std::int32_t* seen;          // (experts) sequence of the step that chose it last, with a line or
                               // without; 0: none yet, never negative
  const std::int32_t* order;   // (experts) place in the policy's order of eviction, lower goes
                               // first; kUnordered: after those, the longest unused first
  const std::int32_t* rule;    // (1) 1: a miss is installed in a line; 0: it passes through staging
  const std::int32_t* cpu_of;  // (max misses + 1) of so many misses the processor takes this many;
                               // null: none
  const std::int32_t* reachable;  // (experts) 0: not in pinned memory, the processor must take it;
                                  // null: all are
  std::int32_t experts;
  std::int32_t lines;
};

// One line to copy.
struct Fetch {
  std::byte* to;
  std::int32_t expert;
  std::int32_t reserved;
};

// Of one layer and one step.
struct CacheCounters {
  std::int32_t hits, fetched, installed, on_cpu;  // distinct experts; fetched counts installed ones
  std::int64_t fetch_ns;     // from the end of the resolution to the last byte fetched
  std::int64_t wait_ns;      // from the posting until the processor's rows were there
  std::int64_t resolved_at;  // the device's clock in ns
};

struct ResolveArgs {
  static constexpr Op kOp = Op::kResolve;
  RowCount rows;            // at most kDecodeRows
  const StepHead* head;     // for the sequence
  const std::int32_t* ids;  // (rows, slots)
  CacheTables tables;       // in/out
  LineLayout layout;
  std::byte* pool;            // (lines) lines
  std::byte* staging;         // (rows.max * slots) lines, those that are not installed
  ExpertRef* experts;         // out (num_experts): of this step's groups 0 and 1, nothing else
  std::int32_t* group;        // out (num_experts): of this step's experts, nothing else
  Fetch* fetches;             // out (rows.max * slots), in order of appearance
  std::int32_t* num_fetches;  // out (1)
  std::int32_t* cpu;          // out (rows.max * slots) experts of group 2 in order of appearance
  std::int32_t* num_cpu;      // out (1)
  CacheCounters* counters;    // out (1), all of it
  std::int32_t slots;
};

// Copies the lines of `fetches` from the bank. Each is read once.
struct FetchArgs {
  static constexpr Op kOp = Op::kFetch;
  const Fetch* fetches;       // (max_fetches)
  const std::int32_t* count;  // (1)
  const std::byte* bank;      // pinned: line of expert e at bank + e * line_bytes
  CacheCounters* counters;    // in/out (1): fetch_ns
  std::int64_t line_bytes;
  std::int64_t ns_per_line;  // 0, or a slower link is played: line i is not there before
                             // resolved_at + (i + 1) * ns_per_line
  std::int32_t max_fetches;
};

// Hands the pairs of the experts in `cpu` to the processor: fills and posts the mailbox. Does
// nothing when there are none.
struct CpuPostArgs {
  static constexpr Op kOp = Op::kCpuPost;
  RowCount rows;
  const float* x;               // (rows, dim)
  const std::int32_t* ids;      // (rows, slots)
  const std::int32_t* cpu;      // (max pairs)
  const std::int32_t* num_cpu;  // (1)
  MailSequence* sequence;       // in/out (1)
  MailView mail;
  std::int32_t layer;  // for the workers, and for whoever reads a diagnosis
  std::int32_t slots;
  std::int32_t dim;
};

// Waits until the mailbox's posting is done, then y[pair] = its slot row for every pair that was
// posted; other rows of y may be written meanwhile. After the deadline it marks the mailbox as
// stalled and gives up: y is then undefined. It waits for nothing once the mailbox is stalled.
struct CpuJoinArgs {
  static constexpr Op kOp = Op::kCpuJoin;
  const std::int32_t* num_cpu;  // (1): 0 means that nothing was posted
  MailSequence* sequence;       // in/out (1)
  MailView mail;
  float* y;                 // in/out (rows, slots, dim)
  CacheCounters* counters;  // in/out (1): wait_ns
  std::int64_t deadline_ns;
  std::int32_t layer;
  std::int32_t dim;
};

// Plays a slower link for copies of a stream (benches): with ns = 0 notes the time in *start, else
// returns not before *start + ns.
struct PaceArgs {
  static constexpr Op kOp = Op::kPace;
  std::int64_t* start;  // (1)
  std::int64_t ns;
};

}  // namespace flashnext
