// The integer linear for the rows of a decode step that the GEMV does not take: digit planes of
// exl3_transform.cu times weights that are decoded as in the GEMV.
//
// A tile has up to kGroups times 8 columns (a digit of a position each); a block, or a cluster of
// blocks with a range of k each, takes one strip of 128 outputs of one tile. Linears have one or
// two wide tiles. Experts have many narrow ones, mostly of one or two positions, and blocks that
// stay: the weights of a block's next strip travel while this one ends, and nobody but the warp
// that finishes a position waits for anything.
#include "cuda/check.h"
#include "cuda/exl3_cluster.cuh"
#include "cuda/exl3_finish.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_units.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kMaxSplits = 8;   // blocks of a cluster
constexpr int kMaxGroups = 4;   // of eight columns: more would not leave the registers
constexpr int kWideWarps = 12;  // of a multiprocessor, as many as those registers allow
constexpr int kNarrowWarps = 20;

constexpr int warps_of(int groups) { return groups == 1 ? kNarrowWarps : kWideWarps; }

// Rates without a kernel of their own share one.
__host__ __device__ constexpr int stages_of(int words) {
  return ring_stages(words == 48 || words == 64 || words == 80 ? words : 128);
}

// A strip of a tile.
struct Work {
  Strip strip;
  int first;  // position
  int count;
  bool is_shared;
};

// Strips of a wide tile stand apart, so that its tiles read weights that still lie in L2.
__device__ __forceinline__ Work find_work(const Jobs& jobs, int index, int tiles, int positions) {
  Work work;
  if (jobs.experts == nullptr) {
    const int tile = index % tiles;
    work.first = tile * jobs.tile_rows;
    work.count = min(jobs.tile_rows, positions - work.first);
    work.is_shared = false;
    work.strip = locate(jobs, index / tiles, nullptr);
    return work;
  }
  const int at = index / jobs.strips;
  const int expert = __ldcg(&jobs.tiles[at].expert);
  work.first = __ldcg(&jobs.tiles[at].first);
  work.count = __ldcg(&jobs.tiles[at].count);
  work.is_shared = expert == jobs.num_experts;
  const int strip = index - at * jobs.strips + (work.is_shared ? jobs.strips : 0);
  work.strip = locate(jobs, strip, work.is_shared ? jobs.shared : jobs.experts + expert);
  return work;
}

template <int kGroups, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, warps_of(kGroups) / kWarps)
    units_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ uint4 smem[];
  __shared__ std::uint64_t sum_barrier;
  __shared__ End ends[3];  // of the block's strips in turn
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int splits = static_cast<int>(gridDim.y);
  const int split = static_cast<int>(blockIdx.y);  // also the rank in the cluster
  const int all_blocks = jobs.in / 128;
  const int first_block = all_blocks * split / splits;
  const int blocks = all_blocks * (split + 1) / splits - first_block;
  const int max_columns = jobs.tile_rows * jobs.digits;
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  // After the rings: sums (columns, 128), twice.
  int* sums = reinterpret_cast<int*>(smem + jobs.ring_parts);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 2 * 128 * max_columns; i += 32 * kWarps) {
    sums[i] = 0;
  }
  if (splits > 1) {
    if (threadIdx.x == 0) {
      init_barrier(&sum_barrier);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __syncthreads();

  // The transform, which made the digits, let this kernel start when all before it was complete:
  // the number of rows, the tiles and the lines of experts may be read now.
  const int positions = min(jobs.rows.scale * __ldcg(jobs.rows.count), jobs.capacity);
  const int tiles = jobs.experts != nullptr ? __ldcg(jobs.num_tiles)
                                            : (positions + jobs.tile_rows - 1) / jobs.tile_rows;
  const int end = tiles * jobs.strips;
  int index = static_cast<int>(blockIdx.x);
  if (index >= end) {
    pdl_wait();
    if (splits > 1) await_cluster();
    return;
  }
  Work work = find_work(jobs, index, tiles, positions);
  // Rings are as long as the longest that a strip needs.
  const uint4* ring = smem + jobs.ring_parts / kWarps * warp;
  Stream<kWarps> stream(work.strip, ring, 2 * first_block, 2 * blocks, warp, lane);
  if (threadIdx.x == 0) ends[0] = end_of(work.strip);
#pragma unroll 1
  for (int s = 0; s < stages_of(work.strip.words) - 1; ++s) {
    stream.template fetch<0>(s, work.strip.words, lane);
  }
  pdl_wait();
  pdl_trigger();  // not before the wait: gdn_few.cu reads what is older than this kernel

  int slot = 0;  // of ends
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const int words = work.strip.words;
    const int plane = work.strip.plane;
    const int first = work.first;
    const int count = work.count;
    const bool is_shared = work.is_shared;
    const End& strip_end = ends[slot];
    slot = slot == 2 ? 0 : slot + 1;
    // The addresses of the next strip come while this one is multiplied. Its end takes the place of
    // one that everybody was done with at the last barrier.
    index += static_cast<int>(gridDim.x);
    const bool is_last = splits > 1 || index >= end;
    if (!is_last) {
      work = find_work(jobs, index, tiles, positions);
      if (threadIdx.x == 0) ends[slot] = end_of(work.strip);
    }

    const int column = lane >> 2;
    const int position = jobs.digits == 2 ? column >> 1 : column;
    Columns columns;
    columns.of_lane = jobs.planes +
                      (plane * jobs.digits + (jobs.digits == 2 ? column & 1 : 0)) * plane_bytes +
                      static_cast<std::int64_t>(first + position) * jobs.in + 128 * first_block +
                      64 * (warp >> 1) + 16 * (lane & 3);
    columns.group_step = static_cast<std::int64_t>(jobs.digits == 2 ? 4 : 8) * jobs.in;
    columns.count = count * jobs.digits;
    int* strip_sums = sums + turn * 128 * max_columns;
    const std::uint32_t* units = reinterpret_cast<const std::uint32_t*>(ring);
    switch (words) {
      case 48:
        multiply<48, kGroups>(stream, 48, units, columns, warp, lane, strip_sums);
        break;
      case 64:
        multiply<64, kGroups>(stream, 64, units, columns, warp, lane, strip_sums);
        break;
      case 80:
        multiply<80, kGroups>(stream, 80, units, columns, warp, lane, strip_sums);
        break;
      default:
        multiply<0, kGroups>(stream, words, units, columns, warp, lane, strip_sums);
        break;
    }
    if (!is_last) {
      const int next_words = work.strip.words;
      __syncwarp();  // all lanes have read the last unit
      stream = Stream<kWarps>(work.strip, ring, 2 * first_block, 2 * blocks, warp, lane);
#pragma unroll 1
      for (int s = 0; s < stages_of(next_words) - 1; ++s) {
        stream.template fetch<0>(s, next_words, lane);
      }
    }
    // One barrier a strip is enough: what follows shares nothing with the next strip, and behind
    // that one's barrier everybody is done with this one.
    __syncthreads();
    if (splits > 1) {
      await_cluster();
      if (!gather_sums(jobs, strip_sums, columns.count, count, split, splits, warp, lane, kWarps,
                       nullptr, &sum_barrier)) {
        return;
      }
    }
#pragma unroll 1
    for (int i = split + warp * splits; i < count; i += splits * kWarps) {
      const int at = first + i;
      int row = at;
      if (jobs.scatter != 0) row = jobs.order[at] - (is_shared ? jobs.shared_first : 0);
      const RowScale scale = jobs.scales[static_cast<std::int64_t>(plane) * jobs.capacity + at];
      finish_position(strip_sums + i * jobs.digits * 128, jobs.digits, scale, row, lane, strip_end);
    }
    if (is_last) return;
  }
}

struct Shape {
  int splits;
  int warps;
};

int ring_bytes(const Jobs& jobs, int warps) {
  int ring = 0;
  for (int p = 0; p < jobs.n + jobs.shared_n; ++p) {
    const int words = jobs.projection[p].words;
    ring = std::max(ring, warps * stages_of(words) * slot_bytes(words));
  }
  return ring;
}

int smem_bytes(const Jobs& jobs, int warps) {
  return ring_bytes(jobs, warps) + 2 * 512 * jobs.tile_rows * jobs.digits;
}

// A multiprocessor wants all the warps that its registers hold; a block costs about a unit of its
// own, and more the more blocks a cluster has.
Shape choose_shape(const Jobs& jobs, int strips, int most_warps) {
  const int blocks = jobs.in / 128;
  const int processors = multiprocessors();
  Shape best{1, 4};
  int best_cost = 0;
  for (const int warps : {4, 8}) {
    for (int splits = 1; splits <= std::min(kMaxSplits, blocks); ++splits) {
      // Clusters of an odd size leave gaps: nearly full, they would need a second wave.
      const int slots = processors * (most_warps / warps);
      if ((splits & (splits - 1)) != 0 && 10 * strips * splits > 9 * slots) continue;
      const int resident = std::max(most_warps, warps * ceil_div(strips * splits, processors));
      const int share = ceil_div(4 * ceil_div(blocks, splits), warps);
      const int cost = resident * (4 * share + 4 + splits / 2);
      if (best_cost == 0 || cost < best_cost) {
        best = {splits, warps};
        best_cost = cost;
      }
    }
  }
  return best;
}

template <int kGroups, int kWarps>
void launch_units(cudaStream_t stream, Jobs jobs, int strips, int splits) {
  auto* kernel = units_kernel<kGroups, kWarps>;
  jobs.ring_parts = ring_bytes(jobs, kWarps) / 16;
  const int smem = smem_bytes(jobs, kWarps);
  allow_smem(kernel, smem);
  if (splits == 1) {
    int resident = 0;
    FN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * kWarps,
                                                          static_cast<std::size_t>(smem)));
    check(resident > 0, "exl3: a block of the units kernel does not fit");
    strips = std::min(strips, resident * multiprocessors());
  }
  launch_pdl_cluster(stream, kernel,
                     dim3(static_cast<unsigned>(strips), static_cast<unsigned>(splits)),
                     dim3(32 * kWarps), static_cast<std::size_t>(smem),
                     dim3(1, static_cast<unsigned>(splits)), jobs);
}

template <int kGroups>
void launch_shape(cudaStream_t stream, const Jobs& jobs, int strips, Shape shape) {
  if (shape.warps == 4) return launch_units<kGroups, 4>(stream, jobs, strips, shape.splits);
  return launch_units<kGroups, 8>(stream, jobs, strips, shape.splits);
}

}  // namespace

void exl3_units(cudaStream_t stream, const Jobs& of, int tiles) {
  Jobs jobs = of;
  if (jobs.experts != nullptr) {
    jobs.tile_rows = unit_tile_rows(jobs.digits);
    return launch_units<1, 4>(stream, jobs, tiles * jobs.strips, 1);
  }
  const int groups = ceil_div(jobs.capacity * jobs.digits, kGroupColumns);
  tiles = ceil_div(groups, kMaxGroups);
  const int tile_groups = ceil_div(groups, tiles);
  jobs.tile_rows = tile_groups * kGroupColumns / jobs.digits;
  const int strips = tiles * jobs.strips;
  const Shape shape = choose_shape(jobs, strips, warps_of(tile_groups));
  switch (tile_groups) {
    case 1:
      return launch_shape<1>(stream, jobs, strips, shape);
    case 2:
      return launch_shape<2>(stream, jobs, strips, shape);
    case 3:
      return launch_shape<3>(stream, jobs, strips, shape);
    default:
      return launch_shape<4>(stream, jobs, strips, shape);
  }
}

}  // namespace flashnext::cuda
