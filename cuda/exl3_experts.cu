// The op kExperts: gate and up, then down with silu(gate) * up as its input. Few rows: two GEMVs
// over pairs in their own order. More rows of a decode step: products in units of pairs sorted by
// expert. Both take the shared expert of the rows along. Many rows: grouped GEMMs over chunks of
// sorted pairs, which bounds the scratch.
#include "cuda/check.h"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_trellis.cuh"
#include "cuda/exl3_workspace.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kChunkPairs = 8192;

struct Parts {
  std::int32_t capacity;  // pairs of a chunk
  std::int32_t chunks;
  std::int32_t inner_rows;  // capacity, and for the GEMV the rows of a shared expert beside it
  float* inner;             // (gate and up, inner_rows, inner)
  // Units, GEMM
  std::int32_t tiles_per_chunk;
  std::int8_t* x_planes;     // (gate and up, digits, capacity, dim)
  RowScale* x_scales;        // (2, capacity)
  std::int8_t* h_planes;     // (digits, capacity, inner)
  RowScale* h_scales;        // (capacity)
  std::int32_t* order;       // (pairs of the group)
  ExpertTile* tiles;         // (chunks, tiles_per_chunk)
  std::int32_t* num_tiles;   // (chunks)
  std::int32_t* num_sorted;  // (1)
  std::int32_t* unit_parts;  // (kUnitParts), units alone
  std::int32_t* arrived;     // (kUnitBlocks), units alone
};

int digits_of(std::int32_t levels) { return levels > 127 ? 2 : 1; }

enum class Form { kGemv, kUnits, kGemm };

Form form_of(const ExpertsArgs& args) {
  if (args.rows.max * digits_of(args.levels) <= kGroupColumns) return Form::kGemv;
  const bool is_decode = args.rows.max <= kDecodeRows && args.rows.max * args.slots <= kMaxPairs;
  return is_decode ? Form::kUnits : Form::kGemm;
}
bool is_gemv(const ExpertsArgs& args) { return form_of(args) == Form::kGemv; }
bool is_units(const ExpertsArgs& args) { return form_of(args) == Form::kUnits; }
bool is_gemm(const ExpertsArgs& args) { return form_of(args) == Form::kGemm; }

// The shared expert goes along with the routed ones.
bool is_joint(const ExpertsArgs& args) {
  return args.shared != nullptr && !is_gemm(args) && args.shared_inner == args.inner;
}

Parts place(const ExpertsArgs& args, Scratch& scratch) {
  // Only a GEMM is made for a group: few rows have room for all pairs, in the group or not.
  std::int32_t pairs = is_gemm(args) ? max_pairs(args) : args.rows.max * args.slots;
  if (is_units(args) && is_joint(args)) pairs += args.rows.max;
  const std::int32_t digits = digits_of(args.levels);
  Parts p{};
  p.capacity = is_gemm(args) ? std::min(pairs, kChunkPairs) : pairs;
  p.chunks = p.capacity == 0 ? 0 : ceil_div(pairs, p.capacity);
  const std::size_t capacity = static_cast<std::size_t>(p.capacity);
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t inner = static_cast<std::size_t>(args.inner);
  p.inner_rows = p.capacity + (is_gemv(args) && is_joint(args) ? args.rows.max : 0);
  p.inner = scratch.take<float>(2 * static_cast<std::size_t>(p.inner_rows) * inner);
  if (is_gemv(args)) return p;
  p.x_planes = scratch.take<std::int8_t>(2 * static_cast<std::size_t>(digits) * capacity * dim);
  p.x_scales = scratch.take<RowScale>(2 * capacity);
  p.h_planes = scratch.take<std::int8_t>(static_cast<std::size_t>(digits) * capacity * inner);
  p.h_scales = scratch.take<RowScale>(capacity);
  // Of units any pair may be a tile of its own.
  p.tiles_per_chunk =
      is_units(args) ? p.capacity : p.capacity / kTileRows + std::min(args.num_experts, p.capacity);
  p.order = scratch.take<std::int32_t>(static_cast<std::size_t>(pairs));
  p.tiles = scratch.take<ExpertTile>(static_cast<std::size_t>(p.chunks) *
                                     static_cast<std::size_t>(p.tiles_per_chunk));
  p.num_tiles = scratch.take<std::int32_t>(static_cast<std::size_t>(p.chunks));
  p.num_sorted = scratch.take<std::int32_t>(1);
  if (is_units(args)) {
    p.unit_parts = scratch.take<std::int32_t>(kUnitParts);
    p.arrived = scratch.take<std::int32_t>(kUnitBlocks);
  }
  return p;
}

bool valid(const ExpertsArgs& args) {
  return args.rows.max >= 0 && args.slots > 0 && args.num_experts > 0 && args.dim % 128 == 0 &&
         args.inner % 128 == 0 && (args.levels == 32258 || args.levels == 127);
}

Jobs jobs_of(const ExpertsArgs& args, const Parts& parts, int first, bool is_down) {
  Jobs jobs{};
  jobs.rows = args.rows;
  jobs.slots = args.slots;
  jobs.first = first;
  jobs.capacity = parts.capacity;
  jobs.in = is_down ? args.inner : args.dim;
  jobs.levels = args.levels;
  jobs.digits = digits_of(args.levels);
  jobs.experts = args.experts;
  jobs.x = is_down ? parts.inner : args.x;
  if (is_down) jobs.up = parts.inner + static_cast<std::int64_t>(parts.inner_rows) * args.inner;
  jobs.ids = args.ids;
  jobs.num_experts = args.num_experts;
  jobs.group = args.group;
  jobs.only = args.only;
  if (is_gemv(args)) return jobs;
  const int chunk = first / parts.capacity;
  jobs.shared_first = args.rows.max * args.slots;
  jobs.parts = parts.unit_parts;
  jobs.arrived = parts.arrived;
  jobs.scatter = is_down ? 1 : 0;
  jobs.planes = is_down ? parts.h_planes : parts.x_planes;
  jobs.scales = is_down ? parts.h_scales : parts.x_scales;
  jobs.tiles = parts.tiles + static_cast<std::int64_t>(chunk) * parts.tiles_per_chunk;
  jobs.num_tiles = parts.num_tiles + chunk;
  jobs.order = parts.order;
  return jobs;
}

void add(const ExpertsArgs& args, const Parts& parts, int member, Jobs& jobs) {
  const bool is_down = member == 2;
  Projection& p = jobs.projection[jobs.n++];
  p.member = member;
  p.words = args.words[member];
  p.out = is_down ? args.dim : args.inner;
  p.plane = is_down ? 0 : member;
  p.y = is_down ? args.y
                : parts.inner + static_cast<std::int64_t>(member) * parts.inner_rows * args.inner;
  p.strip0 = jobs.strips;
  jobs.strips += p.out / 128;
}

// After every routed projection of the launch.
void add_shared(const ExpertsArgs& args, const Parts& parts, int member, Jobs& jobs) {
  const bool is_down = member == 2;
  Projection& p = jobs.projection[jobs.n + jobs.shared_n++];
  p.member = member;
  p.words = args.shared_words[member];
  p.out = is_down ? args.dim : args.inner;
  std::int64_t first = static_cast<std::int64_t>(member) * parts.inner_rows;
  if (is_gemv(args))
    first += parts.capacity;  // else the shared expert's positions follow the others
  p.y = is_down ? args.shared_y : parts.inner + first * args.inner;
  p.plane = is_down ? 0 : member;
  p.strip0 = jobs.strips + jobs.shared_strips;
  jobs.shared_strips += p.out / 128;
  jobs.shared = args.shared;
}

// Gate and up, or down, of one chunk; GEMMs of equal rate together.
void multiply(cudaStream_t stream, const ExpertsArgs& args, const Parts& parts, int first,
              bool is_down) {
  const Jobs empty = jobs_of(args, parts, first, is_down);
  Jobs jobs = empty;
  add(args, parts, is_down ? 2 : 0, jobs);
  if (!is_down && is_gemm(args) && args.words[0] != args.words[1]) {
    exl3_gemm(stream, jobs, parts.tiles_per_chunk);
    jobs = empty;
  }
  if (!is_down) add(args, parts, 1, jobs);
  if (is_joint(args)) {
    add_shared(args, parts, is_down ? 2 : 0, jobs);
    if (!is_down) add_shared(args, parts, 1, jobs);
  }
  switch (form_of(args)) {
    case Form::kGemv:
      return exl3_gemv(stream, jobs, parts.capacity);
    case Form::kUnits:
      return exl3_units(stream, jobs, parts.tiles_per_chunk);
    case Form::kGemm:
      return exl3_gemm(stream, jobs, parts.tiles_per_chunk);
  }
}

}  // namespace

std::size_t workspace_bytes(const ExpertsArgs& args) {
  Scratch scratch(nullptr);
  place(args, scratch);
  if (args.shared == nullptr || is_joint(args)) return scratch.used();
  return std::max(scratch.used(), workspace_bytes(shared_alone(args)));
}

void experts(cudaStream_t stream, const ExpertsArgs& args) {
  check(valid(args), "experts: shapes or levels");
  if (args.rows.max == 0) return;
  if (args.shared != nullptr && !is_joint(args)) {
    experts(stream, shared_alone(args));
    ExpertsArgs routed = args;
    routed.shared = nullptr;
    return experts(stream, routed);
  }
  Scratch scratch(args.workspace.data);
  const Parts parts = place(args, scratch);
  check(scratch.used() <= args.workspace.bytes, "experts: workspace");

  if (is_gemv(args)) {
    multiply(stream, args, parts, 0, false);
    multiply(stream, args, parts, 0, true);
    return;
  }
  PlanJobs plan{};
  plan.rows = args.rows;
  plan.slots = args.slots;
  plan.num_experts = args.num_experts;
  plan.chunk = parts.capacity;
  plan.tiles_per_chunk = parts.tiles_per_chunk;
  plan.chunks = parts.chunks;
  plan.ids = args.ids;
  plan.group = args.group;
  plan.only = args.only;
  plan.max_pairs = max_pairs(args);
  plan.order = parts.order;
  plan.tiles = parts.tiles;
  plan.num_tiles = parts.num_tiles;
  plan.num_sorted = parts.num_sorted;
  if (is_units(args)) {
    plan.shared_first = is_joint(args) ? args.rows.max * args.slots : 0;
    plan.tile_rows = unit_tile_rows(digits_of(args.levels));
    plan.max_pairs = parts.capacity;  // one chunk
    exl3_plan_units(stream, plan);
  } else {
    exl3_plan(stream, plan);
  }

  TransformJobs base{};
  base.rows = args.rows;
  base.slots = args.slots;
  base.capacity = parts.capacity;
  base.levels = args.levels;
  base.experts = args.experts;
  base.ids = args.ids;
  base.order = parts.order;
  base.num_sorted = parts.num_sorted;
  base.arrived = parts.arrived;
  base.shared = is_joint(args) ? args.shared : nullptr;
  base.shared_first = args.rows.max * args.slots;
  for (int first = 0; first < plan.max_pairs; first += parts.capacity) {
    TransformJobs in = base;
    in.first = first;
    in.in = args.dim;
    in.n = 2;
    in.x = args.x;
    in.member[0] = 0;
    in.member[1] = 1;
    in.planes = parts.x_planes;
    in.scales = parts.x_scales;
    exl3_transform(stream, in);
    multiply(stream, args, parts, first, false);

    TransformJobs activation = base;
    activation.first = first;
    activation.in = args.inner;
    activation.n = 1;
    activation.x = parts.inner;
    activation.up = parts.inner + static_cast<std::int64_t>(parts.capacity) * args.inner;
    activation.member[0] = 2;
    activation.planes = parts.h_planes;
    activation.scales = parts.h_scales;
    exl3_transform(stream, activation);
    multiply(stream, args, parts, first, true);
  }
}

}  // namespace flashnext::cuda
