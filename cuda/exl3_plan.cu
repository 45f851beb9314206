// Sorts (row, slot) pairs of a group of experts by expert and cuts every chunk of sorted positions
// into tiles of one expert, balanced and at most kTileRows long; for units, experts come in the
// order of their first pairs, and tiles are shorter. One block; the order of pairs within an expert
// is free, since no result depends on it.
#include "cuda/check.h"
#include "cuda/exl3_jobs.h"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 1024;

// Adds one to counter[id] for every active lane that calls; returns this lane's place. Lanes of one
// id share an atomic.
__device__ __forceinline__ int take_place(std::int32_t* counter, int id) {
  const unsigned active = __activemask();
  const unsigned peers = __match_any_sync(active, id);
  const unsigned lane = threadIdx.x & 31u;
  const int leader = __ffs(static_cast<int>(peers)) - 1;
  const int before = __popc(peers & ((1u << lane) - 1u));
  int first = 0;
  if (before == 0) first = atomicAdd(counter + id, __popc(peers));
  return __shfl_sync(peers, first, leader) + before;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanJobs jobs) {
  extern __shared__ std::int32_t memory[];
  std::int32_t* start = memory;                         // (num_experts + 1)
  std::int32_t* cursor = start + jobs.num_experts + 1;  // (num_experts)
  std::int32_t* tiles = cursor + jobs.num_experts;      // (chunks)
  pdl_wait();
  pdl_trigger();
  const int thread = static_cast<int>(threadIdx.x);
  const int pairs = jobs.rows.scale * *jobs.rows.count * jobs.slots;
  for (int e = thread; e < jobs.num_experts; e += kThreads) cursor[e] = 0;
  for (int c = thread; c < jobs.chunks; c += kThreads) tiles[c] = 0;
  __syncthreads();
  const auto expert_of = [&](int p) { return jobs.ids != nullptr ? jobs.ids[p] : p % jobs.slots; };
  const auto is_in_group = [&](int expert) {
    return jobs.group == nullptr || jobs.group[expert] == jobs.only;
  };
  for (int p = thread; p < pairs; p += kThreads) {
    const int expert = expert_of(p);
    if (is_in_group(expert)) take_place(cursor, expert);
  }
  __syncthreads();
  if (thread < 32) {
    int total = 0;
    for (int base = 0; base < jobs.num_experts; base += 32) {
      const int e = base + thread;
      const int count = e < jobs.num_experts ? cursor[e] : 0;
      int sum = count;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        if (thread >= step) sum += other;
      }
      if (e < jobs.num_experts) start[e] = total + sum - count;
      total += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (thread == 0) {
      start[jobs.num_experts] = total;
      *jobs.num_sorted = total;
      if (total > jobs.max_pairs) __trap();  // before anything is written past its end
    }
  }
  __syncthreads();
  for (int e = thread; e < jobs.num_experts; e += kThreads) {
    cursor[e] = start[e];
    for (int first = start[e]; first < start[e + 1];) {
      const int chunk = first / jobs.chunk;
      const int end = min(start[e + 1], (chunk + 1) * jobs.chunk);
      const int count = (end - first + kTileRows - 1) / kTileRows;
      const int rows = ((end - first + count - 1) / count + 7) / 8 * 8;
      while (first < end) {
        const int at = atomicAdd(tiles + chunk, 1);
        jobs.tiles[static_cast<std::int64_t>(chunk) * jobs.tiles_per_chunk + at] = {
            e, first - chunk * jobs.chunk, min(rows, end - first)};
        first = min(first + rows, end);
      }
    }
  }
  __syncthreads();
  for (int p = thread; p < pairs; p += kThreads) {
    const int expert = expert_of(p);
    if (is_in_group(expert)) jobs.order[take_place(cursor, expert)] = p;
  }
  for (int c = thread; c < jobs.chunks; c += kThreads) jobs.num_tiles[c] = tiles[c];
}

// A thread a pair.
__global__ void __launch_bounds__(kMaxPairs)
    plan_units_kernel(const __grid_constant__ PlanJobs jobs) {
  extern __shared__ std::int32_t memory[];
  __shared__ int warp_sums[kMaxPairs / 32];
  std::int32_t* first = memory;                    // (num_experts) its first pair, then position
  std::int32_t* count = first + jobs.num_experts;  // (num_experts)
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  const int warp = thread >> 5;
  for (int e = thread; e < jobs.num_experts; e += kMaxPairs) {
    first[e] = kMaxPairs;
    count[e] = 0;
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const int rows = jobs.rows.scale * __ldcg(jobs.rows.count);
  const bool is_pair = thread < rows * jobs.slots;
  int expert = -1;
  if (is_pair) expert = jobs.ids != nullptr ? __ldcg(jobs.ids + thread) : thread % jobs.slots;
  const bool is_in = is_pair && (jobs.group == nullptr || __ldcg(jobs.group + expert) == jobs.only);
  int rank = 0;
  if (is_in) {
    atomicMin(&first[expert], thread);
    rank = atomicAdd(&count[expert], 1);
  }
  __syncthreads();
  const int mine = is_in && first[expert] == thread ? count[expert] : 0;
  // Positions and tiles before this thread's, in one sum.
  const int tiles = (mine + jobs.tile_rows - 1) / jobs.tile_rows;
  int sum = mine | tiles << 16;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  int all = 0;
#pragma unroll
  for (int w = 0; w < kMaxPairs / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    all += warp_sums[w];
  }
  before += sum - (mine | tiles << 16);
  const int start = before & 0xFFFF;
  if (mine > 0) first[expert] = start;
  for (int t = 0; t < tiles; ++t) {
    const int at = t * jobs.tile_rows;
    jobs.tiles[(before >> 16) + t] = {expert, start + at, min(jobs.tile_rows, mine - at)};
  }
  __syncthreads();
  if (is_in) jobs.order[first[expert] + rank] = thread;
  const int sorted = all & 0xFFFF;
  const int shared = jobs.shared_first != 0 ? rows : 0;
  const int shared_tiles = (shared + jobs.tile_rows - 1) / jobs.tile_rows;
  if (thread < shared) jobs.order[sorted + thread] = jobs.shared_first + thread;
  if (thread < shared_tiles) {
    const int at = thread * jobs.tile_rows;
    jobs.tiles[(all >> 16) + thread] = {jobs.num_experts, sorted + at,
                                        min(jobs.tile_rows, shared - at)};
  }
  if (thread == 0) {
    *jobs.num_sorted = sorted + shared;
    *jobs.num_tiles = (all >> 16) + shared_tiles;
  }
}

}  // namespace

void exl3_plan_units(cudaStream_t stream, const PlanJobs& jobs) {
  check(jobs.rows.max * jobs.slots <= kMaxPairs, "experts: pairs of a decode step");
  const int smem = 8 * jobs.num_experts;
  check(smem <= 40 * 1024, "experts: too many experts to sort");
  launch_pdl(stream, plan_units_kernel, dim3(1), dim3(kMaxPairs), static_cast<std::size_t>(smem),
             jobs);
}

void exl3_plan(cudaStream_t stream, const PlanJobs& jobs) {
  const int smem = 4 * (2 * jobs.num_experts + 1 + jobs.chunks);
  check(smem <= 48 * 1024, "experts: too many experts or rows to sort");
  launch_pdl(stream, plan_kernel, dim3(1), dim3(kThreads), static_cast<std::size_t>(smem), jobs);
}

}  // namespace flashnext::cuda
