// The op kExperts. Few rows: pairs in their own order, grouped by expert for a GEMV. Many rows:
// pairs sorted by expert, then grouped GEMMs over chunks of sorted pairs, which bounds the scratch.
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
  std::int32_t tiles_per_chunk;
  std::int8_t* x_planes;  // (gate and up, digits, capacity, dim)
  RowScale* x_scales;     // (2, capacity)
  float* inner;           // (gate and up, capacity, inner)
  std::int8_t* h_planes;  // (digits, capacity, inner)
  RowScale* h_scales;     // (capacity)
  // GEMV
  ExpertGroup* groups;  // (capacity)
  std::int32_t* num_groups;
  std::int32_t* zero[2];  // sums and arrivals of gate and up; of down
  std::int32_t zero_words[2];
  // GEMM
  std::int32_t* order;      // (pairs)
  ExpertTile* tiles;        // (chunks, tiles_per_chunk)
  std::int32_t* num_tiles;  // (chunks)
};

int digits_of(std::int32_t levels) { return levels > 127 ? 2 : 1; }

bool is_gemv(const RowCount& rows) { return rows.max <= kGemvRows; }

Parts place(const ExpertsArgs& args, Scratch& scratch) {
  const std::int32_t pairs = args.rows.max * args.slots;
  const std::int32_t digits = digits_of(args.levels);
  Parts p{};
  p.capacity = is_gemv(args.rows) ? pairs : std::min(pairs, kChunkPairs);
  p.chunks = p.capacity == 0 ? 0 : ceil_div(pairs, p.capacity);
  const std::size_t capacity = static_cast<std::size_t>(p.capacity);
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t inner = static_cast<std::size_t>(args.inner);
  p.x_planes = scratch.take<std::int8_t>(2 * static_cast<std::size_t>(digits) * capacity * dim);
  p.x_scales = scratch.take<RowScale>(2 * capacity);
  p.inner = scratch.take<float>(2 * capacity * inner);
  p.h_planes = scratch.take<std::int8_t>(static_cast<std::size_t>(digits) * capacity * inner);
  p.h_scales = scratch.take<RowScale>(capacity);
  if (is_gemv(args.rows)) {
    p.groups = scratch.take<ExpertGroup>(capacity);
    p.num_groups = scratch.take<std::int32_t>(1);
    p.zero_words[0] = p.capacity * (2 * args.inner * digits + 2 * args.inner / 128);
    p.zero_words[1] = p.capacity * (args.dim * digits + args.dim / 128);
    for (int i = 0; i < 2; ++i) {
      p.zero[i] = scratch.take<std::int32_t>(static_cast<std::size_t>(p.zero_words[i]));
    }
  } else {
    p.tiles_per_chunk = p.capacity / kTileRows + std::min(args.num_experts, p.capacity);
    p.order = scratch.take<std::int32_t>(static_cast<std::size_t>(pairs));
    p.tiles = scratch.take<ExpertTile>(static_cast<std::size_t>(p.chunks) *
                                       static_cast<std::size_t>(p.tiles_per_chunk));
    p.num_tiles = scratch.take<std::int32_t>(static_cast<std::size_t>(p.chunks));
  }
  return p;
}

bool valid(const ExpertsArgs& args) {
  return args.rows.max >= 0 && args.slots > 0 && args.num_experts > 0 && args.dim % 128 == 0 &&
         args.inner % 128 == 0 && (args.levels == 32258 || args.levels == 127);
}

// Gate and up (members 0, 1) or down (member 2) of one chunk, launches of equal rate together.
void multiply(cudaStream_t stream, const ExpertsArgs& args, const Parts& parts, int first,
              bool is_down) {
  Jobs base{};
  base.rows = args.rows;
  base.slots = args.slots;
  base.first = first;
  base.capacity = parts.capacity;
  base.in = is_down ? args.inner : args.dim;
  base.digits = digits_of(args.levels);
  base.planes = is_down ? parts.h_planes : parts.x_planes;
  base.scales = is_down ? parts.h_scales : parts.x_scales;
  base.experts = args.experts;
  base.groups = parts.groups;
  base.num_groups = parts.num_groups;
  base.order = parts.order;
  const int chunk = first / parts.capacity;
  if (!is_gemv(args.rows)) {
    base.tiles = parts.tiles + static_cast<std::int64_t>(chunk) * parts.tiles_per_chunk;
    base.num_tiles = parts.num_tiles + chunk;
    base.scatter = is_down ? 1 : 0;
  }
  std::int32_t* zeroed = parts.zero[is_down ? 1 : 0];
  const auto run = [&](int member, int count) {
    Jobs jobs = base;
    jobs.words = args.words[member];
    for (; jobs.n < count; ++jobs.n) {
      Projection& p = jobs.projection[jobs.n];
      p.member = member + jobs.n;
      p.out = is_down ? args.dim : args.inner;
      p.plane = is_down ? 0 : p.member;
      p.y = is_down
                ? args.y
                : parts.inner + static_cast<std::int64_t>(p.member) * parts.capacity * args.inner;
      p.strip0 = jobs.strips;
      jobs.strips += p.out / 128;
    }
    if (is_gemv(args.rows)) {
      jobs.sums = zeroed;
      jobs.arrivals = zeroed + parts.capacity * jobs.digits * 128 * jobs.strips;
      zeroed = jobs.arrivals + parts.capacity * jobs.strips;
      const int columns = std::min(parts.capacity * jobs.digits, kGroupColumns);
      exl3_gemv(stream, jobs, parts.capacity, columns);
    } else {
      exl3_gemm(stream, jobs, parts.tiles_per_chunk);
    }
  };
  if (is_down) {
    run(2, 1);
  } else if (args.words[0] == args.words[1]) {
    run(0, 2);
  } else {
    run(0, 1);
    run(1, 1);
  }
}

}  // namespace

std::size_t workspace_bytes(const ExpertsArgs& args) {
  Scratch scratch(nullptr);
  place(args, scratch);
  return scratch.used();
}

void experts(cudaStream_t stream, const ExpertsArgs& args) {
  check(valid(args), "experts: shapes or levels");
  if (args.rows.max == 0) return;
  Scratch scratch(args.workspace.data);
  const Parts parts = place(args, scratch);
  check(scratch.used() <= args.workspace.bytes, "experts: workspace");

  if (!is_gemv(args.rows)) {
    PlanJobs plan{};
    plan.rows = args.rows;
    plan.slots = args.slots;
    plan.num_experts = args.num_experts;
    plan.chunk = parts.capacity;
    plan.tiles_per_chunk = parts.tiles_per_chunk;
    plan.chunks = parts.chunks;
    plan.ids = args.ids;
    plan.order = parts.order;
    plan.tiles = parts.tiles;
    plan.num_tiles = parts.num_tiles;
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
  for (int first = 0; first < args.rows.max * args.slots; first += parts.capacity) {
    TransformJobs in = base;
    in.first = first;
    in.in = args.dim;
    in.n = 2;
    in.x = args.x;
    in.member[0] = 0;
    in.member[1] = 1;
    in.planes = parts.x_planes;
    in.scales = parts.x_scales;
    in.zero = parts.zero[0];
    in.zero_words = parts.zero_words[0];
    in.groups = parts.groups;
    in.num_groups = parts.num_groups;
    in.group_size = kGroupColumns / digits_of(args.levels);
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
    activation.zero = parts.zero[1];
    activation.zero_words = parts.zero_words[1];
    exl3_transform(stream, activation);
    multiply(stream, args, parts, first, true);
  }
}

}  // namespace flashnext::cuda
