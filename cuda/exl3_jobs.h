// How the EXL3 ops talk to their kernels. An op is: transform rows into digit planes, multiply, and
// for experts once more for the down projection. Which kernels that are depends on the rows alone,
// and changes no bit:
//   up to kGroupColumns digits   a GEMV that transforms its rows itself
//   up to kDecodeRows            the transform, then units: weights decoded as in the GEMV
//   more                         the transform, then a grouped GEMM
//
// "Positions" are the rows of a launch: rows of x for a linear; for experts (row, slot) pairs, in
// their own order for the GEMV and sorted by expert for the others. V = 256 d0 + d1 with d1 in
// -128..127 (one digit: V = d0); the result is exact, so any digits will do.
#pragma once

#include "cpp/device/ops.h"
#include "cuda/rows.h"

#include <cstddef>
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

namespace flashnext::cuda {

struct RowScale;

inline constexpr int kTileRows = 64;     // positions of a GEMM tile
inline constexpr int kMaxIn = 16384;     // |sum of digit * (B + 2)| stays below 2^31
inline constexpr int kGroupColumns = 8;  // columns of one tensor core product

// Of a block, with what is static below what any card has.
inline constexpr int kMaxSmem = 98 * 1024;

// Positions [first, first + count) of a launch belong to one expert.
struct ExpertTile {
  std::int32_t expert;
  std::int32_t first;
  std::int32_t count;
};

// One weight matrix of a launch; for experts the pointers of the weight come from the expert table.
struct Projection {
  const std::byte* trellis;
  const __half* suh;
  const __half* svh;
  const float* bias;
  float* y;  // (positions, out)
  std::int32_t out;
  std::int32_t words;
  std::int32_t member;  // experts: 0 gate, 1 up, 2 down
  std::int32_t plane;   // units, GEMM: index of its digit planes and scales
  std::int32_t strip0;  // strips of 128 outputs before it in the launch, shared ones after all
};

struct Jobs {
  RowCount rows;          // of the op
  std::int32_t slots;     // positions a row: 1 for linears
  std::int32_t first;     // position 0 of this launch
  std::int32_t capacity;  // the most positions of this launch
  std::int32_t in;
  std::int32_t levels;
  std::int32_t digits;  // 1 or 2
  std::int32_t n;       // projections; GEMM: of equal words
  std::int32_t strips;  // of all projections, in 128 outputs
  Projection projection[kMaxLinears];
  const ExpertRef* experts;  // null: linears
  // GEMV
  const float* x;           // (rows, in); for the down projection gate (positions, in)
  const float* up;          // not null: inputs are silu(x) * up, by position
  const std::int32_t* ids;  // (rows, slots) or null: the slot's number
  std::int32_t num_experts;
  const std::int32_t* group;  // (num_experts) or null; pairs whose expert's is not `only` are left
  std::int32_t only;
  std::int32_t ring_parts;  // set by the launcher, also of the units
  std::int32_t keep;        // set by the launcher
  std::int32_t stride;      // set by the launcher: strips from one of a block to its next, 0: one
  // GEMV: the shared expert of every row, in blocks of its own before all others. Its projections
  // come after the n; its positions are rows, those of x for the down projection (capacity + row).
  const ExpertRef* shared;     // null: none
  std::int32_t shared_n;       // projections
  std::int32_t shared_strips;  // of all of them
  std::int32_t shared_blocks;  // set by the launcher: as many
  // Units: the shared expert has the id num_experts and as many strips as the routed ones; its
  // pairs are shared_first + row.
  std::int32_t shared_first;
  std::int32_t tile_rows;  // set by the launcher: positions of a tile
  std::int32_t* parts;     // experts: (kUnitParts) sums of items that several blocks share
  std::int32_t* arrived;   // experts: (kUnitBlocks) zero; units of them that have come
  // Units, GEMM
  std::int32_t scatter;       // 1: y rows are order[first + position]
  const std::int8_t* planes;  // (plane, digit, capacity, in)
  const RowScale* scales;     // (plane, capacity)
  const ExpertTile* tiles;
  const std::int32_t* num_tiles;
  const std::int32_t* order;  // (positions of the op) pair of a sorted position
};

// x -> planes and scales, for `n` planes. Source rows: x row of a position is (pair / slots), of a
// pair of the shared expert its row.
struct TransformJobs {
  RowCount rows;
  std::int32_t slots;
  std::int32_t first;
  std::int32_t capacity;
  std::int32_t in;
  std::int32_t levels;
  std::int32_t n;
  const float* x;   // (rows, in); for the down projection gate (capacity, in)
  const float* up;  // not null: the row is silu(x) * up by position
  const __half* suh[kMaxLinears];
  std::int32_t member[kMaxLinears];
  const ExpertRef* experts;  // not null: suh is that of the pair's expert
  const ExpertRef* shared;   // of pairs from shared_first on, or null: there are none
  std::int32_t shared_first;
  const std::int32_t* ids;         // (rows, slots) or null: the slot's number
  const std::int32_t* order;       // pair of a sorted position, or null: itself
  const std::int32_t* num_sorted;  // (1) sorted positions, or null: all
  std::int8_t* planes;
  RowScale* scales;
  std::int32_t* arrived;  // of units: (kUnitBlocks) becomes zero; else null
};

// (row, slot) pairs of the group sorted by expert, and the tiles of each chunk of `chunk` sorted
// positions.
struct PlanJobs {
  RowCount rows;
  std::int32_t slots;
  std::int32_t num_experts;
  std::int32_t chunk;
  std::int32_t tiles_per_chunk;  // room
  std::int32_t chunks;
  std::int32_t shared_first;  // not 0: of units, with pairs of the shared expert behind all others
  std::int32_t tile_rows;     // of units: most positions of a tile
  const std::int32_t* ids;    // (rows, slots) or null
  const std::int32_t* group;  // (num_experts) or null: every pair
  std::int32_t only;
  std::int32_t max_pairs;    // of the group; more are an error of the caller
  std::int32_t* order;       // out (max_pairs)
  ExpertTile* tiles;         // out (chunks, tiles_per_chunk)
  std::int32_t* num_tiles;   // out (chunks)
  std::int32_t* num_sorted;  // out (1)
};

void exl3_transform(cudaStream_t stream, const TransformJobs& jobs);
void exl3_plan(cudaStream_t stream, const PlanJobs& jobs);
// The same for units: one chunk, at most kMaxPairs pairs.
void exl3_plan_units(cudaStream_t stream, const PlanJobs& jobs);
// `groups`: one for linears, the most pairs for experts, each of which may be a group's first.
void exl3_gemv(cudaStream_t stream, const Jobs& jobs, int groups);
// Blocks of a launch for experts, at most.
inline constexpr int kUnitBlocks = 1024;
inline constexpr int kUnitParts = 2 * kUnitBlocks * 128 * kGroupColumns;
// Most positions of an expert's tile.
constexpr int unit_tile_rows(int digits) { return kGroupColumns / digits; }
// `tiles`: the most tiles of experts.
void exl3_units(cudaStream_t stream, const Jobs& jobs, int tiles);
// `tiles`: the most tiles of positions.
void exl3_gemm(cudaStream_t stream, const Jobs& jobs, int tiles);

int multiprocessors();

}  // namespace flashnext::cuda
