// The integer linear for the rows of a decode step that the GEMV does not take: digit planes of
// exl3_transform.cu times weights that are decoded as in the GEMV.
//
// A tile has up to kGroups times 8 columns (a digit of a position each); an item is one strip of
// 128 outputs of one tile. Linears have one or two wide tiles, and a cluster of blocks an item,
// with a range of k each. Experts have many narrow tiles, mostly of one or two positions, and
// blocks that stay: all units of all items are dealt out evenly, so that no block waits for a last
// item of others. Where a block's run ends within an item, its part of the sums goes through memory
// to the block that comes last. The weights of the next item travel while one ends.
#include "cuda/check.h"
#include "cuda/exl3_cluster.cuh"
#include "cuda/exl3_finish.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_units.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kMaxSplits = 8;    // blocks of a cluster
constexpr int kMaxGroups = 4;    // of eight columns: more would not leave the registers
constexpr int kUnit = 64;        // inputs
constexpr int kLeastUnits = 10;  // of a block: it costs about one itself

// Warps of a multiprocessor that the registers are shared out to. sm_120 has shared memory for the
// rings of eight.
constexpr int warps_of(int groups) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return groups == 1 ? 12 : 8;
#else
  return groups == 1 ? 20 : groups == 2 ? 16 : 12;
#endif
}

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

// Tiles of a strip of linears stand side by side, so that they read weights that still lie in L2.
__device__ __forceinline__ Work find_work(const Jobs& jobs, int item, int tiles, int positions) {
  Work work;
  if (jobs.experts == nullptr) {
    const int tile = item % tiles;
    work.first = tile * jobs.tile_rows;
    work.count = min(jobs.tile_rows, positions - work.first);
    work.is_shared = false;
    work.strip = locate(jobs, item / tiles, nullptr);
    return work;
  }
  const int at = item / jobs.strips;
  const int expert = __ldcg(&jobs.tiles[at].expert);
  work.first = __ldcg(&jobs.tiles[at].first);
  work.count = __ldcg(&jobs.tiles[at].count);
  work.is_shared = expert == jobs.num_experts;
  const int strip = item - at * jobs.strips + (work.is_shared ? jobs.strips : 0);
  work.strip = locate(jobs, strip, work.is_shared ? jobs.shared : jobs.experts + expert);
  return work;
}

// How the units of all items are dealt out to the blocks that stay: each gets a run of them, all
// equally long but for one unit.
struct Deal {
  int blocks;
  long long units;

  __device__ int begin(int block) const { return static_cast<int>(units * block / blocks); }
  // Whose run has the unit.
  __device__ int block_of(int unit) const {
    return static_cast<int>(((unit + 1LL) * blocks - 1) / units);
  }
};

// Brings together the parts that several blocks have of an item's sums, in the last one to come;
// true there. Every block leaves its part at a place of its own, so that only the counter of the
// item's first block must be zero before.
template <int kWarps>
__device__ __forceinline__ bool join_parts(const Jobs& jobs, const Deal& deal, int item_begin,
                                           int item_units, bool begins, int units, int columns,
                                           int* sums, int& arrived) {
  const int size = 128 * columns;
  const int first = deal.block_of(item_begin);
  const int last = deal.block_of(item_begin + item_units - 1);
  // A run may end with the begin of an item, and begin with the rest of another.
  const auto part_of = [&](int block, bool is_begin) {
    return jobs.parts + (2 * block + (is_begin ? 1 : 0)) * (128 * kGroupColumns);
  };
  int* mine = part_of(static_cast<int>(blockIdx.x), begins);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += 32 * kWarps) {
    mine[i] = sums[i];
    sums[i] = 0;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicAdd(jobs.arrived + first, units) + units;
  __syncthreads();
  if (arrived != item_units) return false;
  __threadfence();
  for (int i = static_cast<int>(threadIdx.x); i < size; i += 32 * kWarps) {
    int sum = __ldcg(part_of(first, true) + i);
    for (int block = first + 1; block <= last; ++block) sum += __ldcg(part_of(block, false) + i);
    sums[i] = sum;
  }
  __syncthreads();
  return true;
}

template <int kGroups, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, warps_of(kGroups) / kWarps)
    units_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ uint4 smem[];
  __shared__ std::uint64_t sum_barrier;
  __shared__ int arrived;
  __shared__ End ends[3];  // of the block's items in turn
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int splits = static_cast<int>(gridDim.y);
  const int split = static_cast<int>(blockIdx.y);  // also the rank in the cluster
  const int max_columns = jobs.tile_rows * jobs.digits;
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  // The transform, which made the digits, let this kernel start when all before it was complete:
  // the number of rows, the tiles and the lines of experts may be read now.
  const int positions = min(jobs.rows.scale * __ldcg(jobs.rows.count), jobs.capacity);
  const int tiles = jobs.experts != nullptr ? __ldcg(jobs.num_tiles)
                                            : (positions + jobs.tile_rows - 1) / jobs.tile_rows;
  const int items = tiles * jobs.strips;
  const int item_units = jobs.in / kUnit;
  // The block's units [at, end) of all, items one behind the other; of a cluster's one item its
  // blocks have a part each.
  Deal deal{static_cast<int>(gridDim.x), items};
  int at = 0;
  int end = 0;
  if (splits > 1) {
    if (static_cast<int>(blockIdx.x) < items) {
      const int begin = static_cast<int>(blockIdx.x) * item_units;
      at = begin + item_units * split / splits;
      end = begin + item_units * (split + 1) / splits;
    }
  } else if (jobs.parts == nullptr) {
    at = deal.begin(static_cast<int>(blockIdx.x)) * item_units;
    end = deal.begin(static_cast<int>(blockIdx.x) + 1) * item_units;
  } else {
    deal.units *= item_units;
    deal.blocks = static_cast<int>(
        min(static_cast<long long>(deal.blocks), (deal.units + kLeastUnits - 1) / kLeastUnits));
    if (static_cast<int>(blockIdx.x) < deal.blocks) {
      at = deal.begin(static_cast<int>(blockIdx.x));
      end = deal.begin(static_cast<int>(blockIdx.x) + 1);
    }
  }
  if (at >= end) return pdl_wait();  // all blocks of a cluster
  int item = at / item_units;
  int first_unit = at - item * item_units;
  Work work = find_work(jobs, item, tiles, positions);
  // Rings are as long as the longest that an item needs.
  const uint4* ring = smem + jobs.ring_parts / kWarps * warp;
  Stream<kWarps> stream(work.strip, ring, first_unit, min(item_units - first_unit, end - at), warp,
                        lane);
  if (threadIdx.x == 0) ends[0] = end_of(work.strip);
#pragma unroll 1
  for (int s = 0; s < stages_of(work.strip.words) - 1; ++s) {
    stream.template fetch<0>(s, work.strip.words, lane);
  }
  // After the rings: sums (columns, 128), twice if there are more items to come.
  int* sums = reinterpret_cast<int*>(smem + jobs.ring_parts);
  const int all_sums = (stream.units < end - at ? 2 : 1) * 128 * max_columns;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < all_sums; i += 32 * kWarps) sums[i] = 0;
  if (splits > 1) {
    if (threadIdx.x == 0) {
      init_barrier(&sum_barrier);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  __syncthreads();
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
    const int units = stream.units;
    const End& item_end = ends[slot];
    slot = slot == 2 ? 0 : slot + 1;
    // The addresses of the next item come while this one is multiplied. Its end takes the place of
    // one that everybody was done with at the last barrier.
    const bool is_last = at + units >= end;
    if (!is_last) {
      work = find_work(jobs, item + 1, tiles, positions);
      if (threadIdx.x == 0) ends[slot] = end_of(work.strip);
    }

    const int column = lane >> 2;
    const int position = jobs.digits == 2 ? column >> 1 : column;
    Columns columns;
    columns.of_lane = jobs.planes +
                      (plane * jobs.digits + (jobs.digits == 2 ? column & 1 : 0)) * plane_bytes +
                      static_cast<std::int64_t>(first + position) * jobs.in +
                      kUnit * (first_unit + (warp >> 1)) + 16 * (lane & 3);
    columns.group_step = static_cast<std::int64_t>(jobs.digits == 2 ? 4 : 8) * jobs.in;
    columns.count = count * jobs.digits;
    int* item_sums = sums + turn * 128 * max_columns;
    const std::uint32_t* weights = reinterpret_cast<const std::uint32_t*>(ring);
    switch (words) {
      case 48:
        multiply<48, kGroups>(stream, 48, weights, columns, warp, lane, item_sums);
        break;
      case 64:
        multiply<64, kGroups>(stream, 64, weights, columns, warp, lane, item_sums);
        break;
      case 80:
        multiply<80, kGroups>(stream, 80, weights, columns, warp, lane, item_sums);
        break;
      default:
        multiply<0, kGroups>(stream, words, weights, columns, warp, lane, item_sums);
        break;
    }
    if (!is_last) {
      const int next_words = work.strip.words;
      __syncwarp();  // all lanes have read the last unit
      stream = Stream<kWarps>(work.strip, ring, 0, min(item_units, end - at - units), warp, lane);
#pragma unroll 1
      for (int s = 0; s < stages_of(next_words) - 1; ++s) {
        stream.template fetch<0>(s, next_words, lane);
      }
    }
    // One barrier a whole item is enough: what follows shares nothing with the next item, and
    // behind that one's barrier everybody is done with this one.
    __syncthreads();
    bool finishes = true;
    if (splits > 1) {
      await_cluster();
      finishes = gather_sums(jobs, item_sums, columns.count, count, split, splits, warp, lane,
                             kWarps, nullptr, &sum_barrier);
    } else if (units != item_units) {
      finishes = join_parts<kWarps>(jobs, deal, item * item_units, item_units, first_unit == 0,
                                    units, columns.count, item_sums, arrived);
    }
#pragma unroll 1
    for (int i = split + warp * splits; finishes && i < count; i += splits * kWarps) {
      const int sorted = first + i;
      int row = sorted;
      if (jobs.scatter != 0) row = jobs.order[sorted] - (is_shared ? jobs.shared_first : 0);
      const RowScale scale = jobs.scales[static_cast<std::int64_t>(plane) * jobs.capacity + sorted];
      finish_position(item_sums + i * jobs.digits * 128, jobs.digits, scale, row, lane, item_end);
    }
    if (is_last) return;
    at += units;
    ++item;
    first_unit = 0;
  }
}

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

// Blocks that run at once.
template <int kGroups, int kWarps>
int resident_blocks(const Jobs& jobs) {
  auto* kernel = units_kernel<kGroups, kWarps>;
  const int smem = smem_bytes(jobs, kWarps);
  allow_smem(kernel, smem);
  int resident = 0;
  FN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * kWarps,
                                                        static_cast<std::size_t>(smem)));
  check(resident > 0, "exl3: a block of units does not fit");
  return resident * multiprocessors();
}

// Blocks of a cluster for each of few items: as many as run at once, such that the multiprocessor
// with the most has least to do.
int choose_splits(const Jobs& jobs, int items, int warps, int resident) {
  const int units = jobs.in / kUnit;
  const int processors = multiprocessors();
  int best = 1;
  int least = 0;
  for (int splits = 1; splits <= std::min(kMaxSplits, units); ++splits) {
    const int blocks = items * splits;
    if (splits > 1 && blocks > resident) break;
    // Clusters of an odd size leave gaps: nearly full, they would need a second turn.
    if ((splits & (splits - 1)) != 0 && 10 * blocks > 9 * processors) continue;
    const int share = ceil_div(blocks, processors) * ceil_div(2 * ceil_div(units, splits), warps);
    if (least != 0 && share > least) continue;
    best = splits;
    least = share;
  }
  return best;
}

template <int kGroups, int kWarps>
void launch_blocks(cudaStream_t stream, Jobs jobs, int blocks, int splits) {
  jobs.ring_parts = ring_bytes(jobs, kWarps) / 16;
  launch_pdl_cluster(stream, units_kernel<kGroups, kWarps>,
                     dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(splits)),
                     dim3(32 * kWarps), static_cast<std::size_t>(smem_bytes(jobs, kWarps)),
                     dim3(1, static_cast<unsigned>(splits)), jobs);
}

// Many items go to small blocks that stay. Of few, a large block or a cluster takes one: small ones
// would spend their time on beginning and ending.
template <int kGroups>
void launch_linears(cudaStream_t stream, const Jobs& jobs, int items) {
  const bool is_large = smem_bytes(jobs, 8) <= kMaxSmem;
  if (items <= 4 * multiprocessors() && is_large) {
    const int resident = resident_blocks<kGroups, 8>(jobs);
    return launch_blocks<kGroups, 8>(stream, jobs, items, choose_splits(jobs, items, 8, resident));
  }
  const int resident = resident_blocks<kGroups, 4>(jobs);
  const int splits = choose_splits(jobs, items, 4, resident);
  launch_blocks<kGroups, 4>(stream, jobs, splits > 1 ? items : std::min(items, resident), splits);
}

}  // namespace

void exl3_units(cudaStream_t stream, const Jobs& of, int tiles) {
  Jobs jobs = of;
  if (jobs.experts != nullptr) {
    check(jobs.parts != nullptr && jobs.arrived != nullptr, "experts: room for parts of sums");
    jobs.tile_rows = unit_tile_rows(jobs.digits);
    const int most = std::min(kUnitBlocks, resident_blocks<1, 4>(jobs));
    return launch_blocks<1, 4>(stream, jobs, std::min(tiles * jobs.strips, most), 1);
  }
  const int groups = ceil_div(jobs.capacity * jobs.digits, kGroupColumns);
  tiles = ceil_div(groups, kMaxGroups);
  const int tile_groups = ceil_div(groups, tiles);
  jobs.tile_rows = tile_groups * kGroupColumns / jobs.digits;
  const int items = tiles * jobs.strips;
  switch (tile_groups) {
    case 2:
      return launch_linears<2>(stream, jobs, items);
    case 3:
      return launch_linears<3>(stream, jobs, items);
    default:
      return launch_linears<4>(stream, jobs, items);
  }
}

}  // namespace flashnext::cuda
