// The integer linear for few rows, in one kernel: transform, product and result.
//
// A cluster of blocks takes 128 outputs; each of its blocks takes a range of k, for which it
// transforms the rows itself while its first weights travel. Every warp streams its own units (64
// inputs, 64 outputs of packed weights) through a ring in shared memory. A weight costs a shift, a
// mask and one multiplication: its four product bytes are the A operand of the u8 x s8 tensor core,
// against digits repeated four times, so that 1 to 8 columns (a digit of a row each) cost the same.
// Blocks of a cluster exchange the row maximum and the integer sums through shared memory.
#include "cpp/base/math.h"
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/exl3_cluster.cuh"
#include "cuda/exl3_finish.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_locate.cuh"
#include "cuda/exl3_multiply.cuh"
#include "cuda/exl3_rotate.cuh"
#include "cuda/exl3_stream.cuh"
#include "cuda/exl3_trellis.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kMaxSplits = 8;  // blocks of a cluster
// Warps of a multiprocessor that the registers are shared out to: more would spill, and fewer leave
// no room for blocks of the kernels before and after (with 20, a token took 1.27 instead of 1.23 ms
// on an H200).
constexpr int kOccupancy = 24;
constexpr int kKeepOnce = 8;   // the same of a block of many strips, where room is worth more
constexpr int kPitchPad = 64;  // bytes: an even and an odd column lie in different banks
constexpr int kKeep = 24;      // most rotated (position, 128 inputs) that a block keeps

// Rates without a kernel of their own share one.
__host__ __device__ constexpr bool is_special(int words) {
  return words == 48 || words == 64 || words == 80;
}
__host__ __device__ constexpr int stages_of(int words) {
  return ring_stages(is_special(words) ? words : 128);
}

// The row of x of a pair.
__device__ __forceinline__ int source_of(const Jobs& jobs, int pair) {
  return jobs.up != nullptr ? pair : pair / jobs.slots;
}

// Positions that share this pair's expert, from this pair on; none if the pair belongs to an
// earlier one's. The first warp's work.
__device__ __forceinline__ void find_members(const Jobs& jobs, int pair, int pairs, int expert,
                                             int lane, Shared& shared) {
  const auto same = [&](int p) {
    return (jobs.ids != nullptr ? __ldcg(jobs.ids + p) : p % jobs.slots) == expert;
  };
  const int size = kGroupColumns / jobs.digits;
  int rank = 0;
  for (int base = 0; base < pair; base += 32) {
    const int p = base + lane;
    rank += __popc(__ballot_sync(0xFFFFFFFFu, p < pair && same(p)));
  }
  int count = 0;
  if (rank % size == 0) {
    for (int base = pair; base < pairs && count < size; base += 32) {
      const int p = base + lane;
      const bool is_member = p < pairs && same(p);
      const unsigned members = __ballot_sync(0xFFFFFFFFu, is_member);
      const int at = count + __popc(members & ((1u << lane) - 1u));
      if (is_member && at < size) {
        shared.member[at] = p;
        shared.source[at] = source_of(jobs, p);
      }
      count = min(size, count + __popc(members));
    }
  }
  if (lane == 0) shared.count = count;
}

// Row of a (position, block) pair: mostly the first, which costs no division.
__device__ __forceinline__ int row_of(int item, int blocks) {
  return item < blocks ? 0 : item / blocks;
}

// Step 4 for one (position, 128 inputs).
__device__ __forceinline__ void quantise_block(const Jobs& jobs, const float (&u)[4], int item,
                                               int blocks, int lane, std::int8_t* digits, int pitch,
                                               Shared& shared) {
  const int i = row_of(item, blocks);
  const Digits d = digits_of(u, shared.levels[i], jobs.levels);
  std::int8_t* to = digits + i * jobs.digits * pitch + 128 * (item - i * blocks);
  store_digits(to, d.high, lane);
  if (jobs.digits == 2) store_digits(to + pitch, d.low, lane);
  const int sum = __reduce_add_sync(0xFFFFFFFFu, d.sum);
  if (lane == 0) add_here(&shared.row_sum[i], sum);
}

// Steps 1 to 4 for the block's inputs [first, first + 128 blocks): digits (columns, pitch) and sums
// of V. Needs shared.count and members; ends with a barrier. Two passes over (position, block)
// pairs; what does not fit `kept` (jobs.keep, 32 lanes) is rotated in both. `next`: the warp's
// first inputs, if they are the first row's. Loops stay rolled: code that runs once costs its
// fetch.
template <int kWarps>
__device__ __forceinline__ void transform(const Jobs& jobs, const __half* suh, int first,
                                          int blocks, int splits, int warp, int lane, RawInput next,
                                          std::int8_t* digits, int pitch, float4* kept,
                                          Shared& shared) {
  const int items = shared.count * blocks;
  const auto load = [&](int item) {
    const int i = row_of(item, blocks);
    return load_input(jobs.x, jobs.up, suh, shared.source[i], jobs.in,
                      first + 128 * (item - i * blocks) + 4 * lane);
  };
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    int item = warp;
    if (pass == 1) {
#pragma unroll 1
      for (; item < min(items, jobs.keep); item += kWarps) {
        const float4 v = kept[32 * item + lane];
        const float u[4] = {v.x, v.y, v.z, v.w};
        quantise_block(jobs, u, item, blocks, lane, digits, pitch, shared);
      }
    }
    if (item < items && (pass == 1 || item >= blocks)) next = load(item);
#pragma unroll 1
    for (; item < items; item += kWarps) {
      const RawInput raw = next;
      if (item + kWarps < items) next = load(item + kWarps);
      float u[4];
      rotate(raw, jobs.up != nullptr, lane, u);
      if (pass == 1) {
        quantise_block(jobs, u, item, blocks, lane, digits, pitch, shared);
        continue;
      }
      const std::uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, max_bits(u));
      if (lane == 0) atomicMax(&shared.row_max[row_of(item, blocks)], bits);
      if (item < jobs.keep) kept[32 * item + lane] = make_float4(u[0], u[1], u[2], u[3]);
    }
    if (pass == 0) {
      if (splits > 1) await_cluster();
      __syncthreads();
      const int count = shared.count;
      if (splits > 1) {
        const int i = static_cast<int>(threadIdx.x) >> 3;
        const int rank = static_cast<int>(threadIdx.x) & 7;
        if (i < count && rank < splits) {
          push_max(&shared.cluster_max[i], shared.row_max[i], &shared.max_barrier, rank);
        }
        if (threadIdx.x == 0) expect_bytes(&shared.max_barrier, 4 * splits * count);
        await(&shared.max_barrier);
      }
      if (static_cast<int>(threadIdx.x) < count) {
        const std::uint32_t* max_bits = splits > 1 ? shared.cluster_max : shared.row_max;
        shared.levels[threadIdx.x] = row_levels(max_bits[threadIdx.x], jobs.levels);
      }
    }
    __syncthreads();
  }
}

template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kOccupancy / kWarps)
    gemv_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ uint4 smem[];
  __shared__ Shared shared;
  const bool is_shared = static_cast<int>(blockIdx.x) < jobs.shared_blocks;
  const int place = static_cast<int>(blockIdx.x) - (is_shared ? 0 : jobs.shared_blocks);
  const int strips = is_shared ? jobs.shared_strips : jobs.strips;
  const int group = place / strips;
  const int strip_index = place - group * strips + (is_shared ? jobs.strips : 0);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int splits = static_cast<int>(gridDim.y);
  const int split = static_cast<int>(blockIdx.y);  // also the rank in the cluster
  const int all_blocks = jobs.in / 128;
  const int first = all_blocks * split / splits;
  const int blocks = all_blocks * (split + 1) / splits - first;
  const bool is_linear = jobs.experts == nullptr;

  // After the rings: sums (columns, 128), twice if there are more strips to come, digits (columns,
  // pitch), then what is kept of the transform. The pitch keeps two columns in different banks.
  int* sums = reinterpret_cast<int*>(smem + jobs.ring_parts);
  const int max_columns = min(jobs.capacity, kGroupColumns / jobs.digits) * jobs.digits;
  const int all_sums = (jobs.stride != 0 ? 2 : 1) * 128 * max_columns;
  std::int8_t* digits = reinterpret_cast<std::int8_t*>(sums + all_sums);
  const int pitch = 128 * ((all_blocks + splits - 1) / splits) + kPitchPad;
  if (threadIdx.x < kGroupColumns) {
    shared.row_max[threadIdx.x] = 0;
    shared.cluster_max[threadIdx.x] = 0;
    shared.row_sum[threadIdx.x] = 0;
  }
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < all_sums; i += 32 * kWarps) sums[i] = 0;
  if (splits > 1) {
    if (threadIdx.x == 0) {
      init_barrier(&shared.max_barrier);
      init_barrier(&shared.sum_barrier);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }

  // Weights are nobody's output, so the first units of known ones travel while the predecessor
  // ends. Down projections know their experts too: they follow the launch of gate and up, every
  // block of which waited for all work before it and then triggered, so that ids and count lie
  // still in L2. Whether a block of experts has work is the same in all blocks of its cluster.
  const bool is_routed = !is_linear && !is_shared;
  const ExpertRef* ref = jobs.shared;
  int expert = 0;
  int pairs = 0;
  const bool is_known = !is_routed || jobs.up != nullptr;
  if (is_routed) {
    if (!is_known) {
      if (threadIdx.x == 0) prefetch_table(jobs);
      pdl_wait();
    }
    expert = jobs.ids != nullptr ? __ldcg(jobs.ids + group) : group % jobs.slots;
    ref = jobs.experts + expert;
    pairs = jobs.rows.scale * __ldcg(jobs.rows.count) * jobs.slots;
    if (group >= pairs) {
      if (is_known) pdl_wait();
      if (splits > 1) await_cluster();
      return;
    }
  }
  const Strip strip = locate(jobs, strip_index, ref);
  if (is_routed && jobs.group != nullptr && __ldcg(jobs.group + expert) != jobs.only) {
    if (is_known) pdl_wait();
    if (splits > 1) await_cluster();
    return;
  }
  prefetch_scales(strip, 128 * first, blocks);
  const int stages = stages_of(strip.words);
  const uint4* ring_memory = smem + warp * stages * (slot_bytes(strip.words) / 16);
  Stream<kWarps> stream(strip, ring_memory, 2 * first, 2 * blocks, warp, lane);
#pragma unroll 1
  for (int s = 0; s < stages - 1; ++s) stream.template fetch<0>(s, strip.words, lane);
  if (threadIdx.x == 0) shared.end[0] = end_of(strip);
  // Position 0 of the block is known by now, and with it what its row of x will be multiplied by.
  int source = 0;
  if (is_routed) {
    source = source_of(jobs, group);
    if (warp == 0) find_members(jobs, group, pairs, expert, lane, shared);
  } else {
    source = is_shared && jobs.up != nullptr ? jobs.capacity : 0;
    if (threadIdx.x < kGroupColumns) {
      shared.member[threadIdx.x] = static_cast<int>(threadIdx.x);
      shared.source[threadIdx.x] = source + static_cast<int>(threadIdx.x);
    }
  }
  RawInput input{};
  const int at = 128 * (first + warp) + 4 * lane;
  if (warp < blocks) input.suh = __ldcg(reinterpret_cast<const uint2*>(strip.suh + at));
  if (is_known) pdl_wait();
  pdl_trigger();  // not before the wait: gdn_few.cu reads what is older than this kernel

  if (warp < blocks) {
    const std::int64_t from = static_cast<std::int64_t>(source) * jobs.in + at;
    input.x = *reinterpret_cast<const float4*>(jobs.x + from);
    if (jobs.up != nullptr) input.up = *reinterpret_cast<const float4*>(jobs.up + from);
  }
  if (!is_routed && threadIdx.x == 0) {
    shared.count = jobs.rows.scale * *jobs.rows.count;
  }
  __syncthreads();
  const int count = shared.count;
  if (count == 0) {
    cp_async_wait<0>();
    if (splits > 1) await_cluster();
    return;
  }
  transform<kWarps>(jobs, strip.suh, 128 * first, blocks, splits, warp, lane, input, digits, pitch,
                    reinterpret_cast<float4*>(digits + max_columns * pitch), shared);

  const std::uint32_t* ring = reinterpret_cast<const std::uint32_t*>(ring_memory);
  const int columns = count * jobs.digits;
  int at_strip = strip_index;
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    int* strip_sums = sums + turn * 128 * max_columns;
    switch (strip.words) {
      case 48:
        multiply<48>(stream, 48, ring, digits, pitch, columns, warp, lane, strip_sums);
        break;
      case 64:
        multiply<64>(stream, 64, ring, digits, pitch, columns, warp, lane, strip_sums);
        break;
      case 80:
        multiply<80>(stream, 80, ring, digits, pitch, columns, warp, lane, strip_sums);
        break;
      default:
        multiply<0>(stream, strip.words, ring, digits, pitch, columns, warp, lane, strip_sums);
        break;
    }
    // The next strip's weights travel during this one's end. It shares nothing with the next but
    // `end`, so that one barrier a strip is enough: behind it, everybody is done with the strip
    // before.
    const int next = at_strip + jobs.stride;
    const bool is_last = jobs.stride == 0 || next >= jobs.strips;
    if (!is_last) {
      const Strip following = locate(jobs, next, nullptr);
      prefetch_scales(following, 0, 0);
      __syncwarp();  // all lanes have read the last unit
      stream = Stream<kWarps>(following, ring_memory, 0, 2 * blocks, warp, lane);
#pragma unroll 1
      for (int s = 0; s < stages - 1; ++s) stream.template fetch<0>(s, strip.words, lane);
    }
    __syncthreads();
    if (!is_last && threadIdx.x == 0) shared.end[turn ^ 1] = end_of(locate(jobs, next, nullptr));
    if (splits > 1 && !gather_sums(jobs, strip_sums, columns, count, split, splits, warp, lane,
                                   kWarps, shared.row_sum, &shared.sum_barrier)) {
      return;
    }
#pragma unroll 1
    for (int i = split + warp * splits; i < count; i += splits * kWarps) {
      finish_position(strip_sums + i * jobs.digits * 128, jobs.digits,
                      {shared.levels[i].q, shared.row_sum[i]}, shared.member[i], lane,
                      shared.end[turn]);
    }
    if (is_last) return;
    at_strip = next;
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

int keep_items(const Jobs& jobs, int columns, int splits) {
  return std::min(kKeep, columns / jobs.digits * ceil_div(jobs.in / 128, splits));
}

// sums: sets of them; keep: items.
int smem_bytes(const Jobs& jobs, int columns, Shape shape, int sums, int keep) {
  const int pitch = 128 * ceil_div(jobs.in / 128, shape.splits) + kPitchPad;
  return ring_bytes(jobs, shape.warps) + columns * (512 * sums + pitch) + 512 * keep;
}

// A multiprocessor wants about 16 warps; a block costs a few units of its own.
Shape choose_shape(const Jobs& jobs, int strips, int columns) {
  const int blocks = jobs.in / 128;
  const int processors = multiprocessors();
  Shape best{0, 0};
  int best_cost = 0;
  for (const int warps : {4, 8}) {
    for (int splits = 1; splits <= std::min(kMaxSplits, blocks); ++splits) {
      const int keep = keep_items(jobs, columns, splits);
      if (smem_bytes(jobs, columns, {splits, warps}, 1, keep) > kMaxSmem) continue;
      // Clusters of an odd size leave gaps: nearly full, they would need a second wave.
      const int slots = processors * (warps == 4 ? 5 : 2);
      if ((splits & (splits - 1)) != 0 && 10 * strips * splits > 9 * slots) continue;
      const int resident = std::max(16, warps * ceil_div(strips * splits, processors));
      const int share = ceil_div(4 * ceil_div(blocks, splits), warps);
      const int cost = resident * (4 * share + 6 + splits);
      if (best_cost == 0 || cost < best_cost) {
        best = {splits, warps};
        best_cost = cost;
      }
    }
  }
  check(best_cost != 0, "exl3: a linear too wide for few rows");
  return best;
}

// Shared memory of a block of a launch that fits on the card at once, such that no multiprocessor
// takes more than its share: beside the predecessor's blocks some would, and others stay empty.
// `most`: blocks that its registers hold.
int spread(int smem, int blocks, int splits, int most) {
  constexpr int kReserved = 1024 + static_cast<int>(sizeof(Shared));  // of a block, by the system
  int share = ceil_div(blocks, multiprocessors());
  // Clusters that do not divide the share leave gaps.
  if (share % splits != 0 && 4 * blocks > 3 * share * multiprocessors()) ++share;
  if (share >= most) return smem;
  int device = 0;
  int all = 0;
  FN_CUDA(cudaGetDevice(&device));
  FN_CUDA(cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  return std::max(smem, (all / (share + 1) - kReserved + 128) / 16 * 16);
}

template <int kWarps>
void launch_gemv(cudaStream_t stream, Jobs jobs, int strips, int columns, int splits) {
  auto* kernel = gemv_kernel<kWarps>;
  const Shape shape{splits, kWarps};
  jobs.ring_parts = ring_bytes(jobs, kWarps) / 16;
  jobs.keep = keep_items(jobs, columns, splits);
  int smem = smem_bytes(jobs, columns, shape, 1, jobs.keep);
  // One linear of many strips, whose transform is the same for all: blocks that stay.
  const int loop_keep = std::min(kKeepOnce, jobs.keep);
  const int loop_smem = smem_bytes(jobs, columns, shape, 2, loop_keep);
  if (jobs.experts == nullptr && jobs.n == 1 && splits == 1 && loop_smem <= kMaxSmem) {
    allow_smem(kernel, loop_smem);
    int resident = 0;
    FN_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * kWarps,
                                                          static_cast<std::size_t>(loop_smem)));
    resident *= multiprocessors();
    if (resident > 0 && strips > resident) {
      smem = loop_smem;
      jobs.keep = loop_keep;
      jobs.stride = strips = resident;
    }
  }
  if (jobs.stride == 0) smem = spread(smem, strips * splits, splits, kOccupancy / kWarps);
  allow_smem(kernel, smem);
  launch_pdl_cluster(stream, kernel,
                     dim3(static_cast<unsigned>(strips), static_cast<unsigned>(splits)),
                     dim3(32 * kWarps), static_cast<std::size_t>(smem),
                     dim3(1, static_cast<unsigned>(splits)), jobs);
}

}  // namespace

void exl3_gemv(cudaStream_t stream, const Jobs& of, int groups) {
  check(of.in % 128 == 0 && of.in > 0 && of.in <= kMaxIn, "exl3: inputs of a linear");
  Jobs jobs = of;
  if (jobs.shared != nullptr) {
    jobs.shared_blocks = jobs.shared_strips;
  }
  const int strips = groups * jobs.strips + jobs.shared_blocks;
  const int columns = std::min(jobs.capacity * jobs.digits, kGroupColumns);
  const Shape shape = choose_shape(jobs, strips, columns);
  if (shape.warps == 4) return launch_gemv<4>(stream, jobs, strips, columns, shape.splits);
  return launch_gemv<8>(stream, jobs, strips, columns, shape.splits);
}

}  // namespace flashnext::cuda
