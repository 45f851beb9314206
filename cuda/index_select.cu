// The exact choice of the best blocks of a row: a radix selection on the bits of the scores (they
// are not negative, so the bits order like the values) finds the last score taken, then one
// ascending pass keeps what is above it and the lowest blocks that tie with it.
#include "cuda/attention.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent.cuh"
#include "cuda/index_score.cuh"
#include "cuda/kernels.h"

#include <algorithm>

namespace flashnext::cuda {
namespace {

using attn::kBlock;
using attn::kScoreBlocks;

constexpr int kBins = 2048;  // 11 bits a round: 31..21, 20..10, then the last 10
constexpr std::size_t kScoreBytes = std::size_t{64} << 20;

// Exclusive prefix sum over the block; `sums` holds 32 ints. Ends with a barrier.
__device__ __forceinline__ int block_scan(int value, int* sums) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int warps = static_cast<int>(blockDim.x >> 5);
  int inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    int total = lane < warps ? sums[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, total, step);
      if (lane >= step) total += other;
    }
    sums[lane] = total;
  }
  __syncthreads();
  const int before = (warp > 0 ? sums[warp - 1] : 0) + inclusive - value;
  __syncthreads();
  return before;
}

// Calls take(index, bits) for a contiguous, ascending run of the row's scores a thread.
template <class Take>
__device__ __forceinline__ void for_own_run(const float* scores, int n, Take take) {
  const int threads = static_cast<int>(blockDim.x);
  const int each = 4 * ((n + 4 * threads - 1) / (4 * threads));
  const int begin = static_cast<int>(threadIdx.x) * each;
  const int end = min(begin + each, n);
  int i = begin;
  for (; i + 4 <= end; i += 4) {
    const uint4 bits = *reinterpret_cast<const uint4*>(scores + i);
    take(i, bits.x);
    take(i + 1, bits.y);
    take(i + 2, bits.z);
    take(i + 3, bits.w);
  }
  for (; i < end; ++i) take(i, __float_as_uint(scores[i]));
}

__global__ void pick_kernel(const IndexSelectArgs a, const float* scores, std::int64_t stride,
                            int row0, int cached) {
  extern __shared__ float4 shared_raw[];  // (cached) scores
  __shared__ int bins[kBins];
  __shared__ int sums[32];
  __shared__ std::uint32_t chosen;
  __shared__ int wanted;
  const int r = row0 + static_cast<int>(blockIdx.x);
  const int rows = a.step.head->rows;
  const Row row = a.step.rows[r];
  wait_for_previous();
  let_next_start();
  if (r >= rows) return;
  const int tid = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int n = (row.pos + 1) / kBlock;
  const int max_blocks = a.dims.max_blocks;
  if (n <= max_blocks) {
    if (tid == 0) a.count[r] = -1;
    return;
  }
  const float* own = scores + blockIdx.x * stride;
  if (n <= cached) {  // the passes below read them five times
    float* copy = reinterpret_cast<float*>(shared_raw);
    for (int i = 4 * tid; i < n; i += 4 * threads) {
      if (i + 4 <= n) {
        cp_async16(copy + i, own + i);
      } else {
        for (int j = i; j < n; ++j) copy[j] = own[j];
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    own = copy;
  }
  if (tid == 0) {
    chosen = 0;
    wanted = max_blocks;
  }
  // After round i the digits so far of the last score taken are in `chosen`, and `wanted` of the
  // scores that share them are still to be taken.
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
    const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
    const std::uint32_t mask = round == 2 ? 1023u : 2047u;
    const std::uint32_t above = round == 0 ? 0u : ~0u << (round == 1 ? 21 : 10);
    for (int i = tid; i < kBins; i += threads) bins[i] = 0;
    __syncthreads();
    const std::uint32_t prefix = chosen;
    for (int i = tid; i < n; i += threads) {
      const std::uint32_t bits = __float_as_uint(own[i]);
      if ((bits & above) == prefix) atomicAdd(&bins[(bits >> shift) & mask], 1);
    }
    __syncthreads();
    const int each = kBins / threads;  // a thread scans its bins from the highest digit down
    int count = 0;
    for (int i = 0; i < each; ++i) count += bins[kBins - 1 - (tid * each + i)];
    const int need = wanted;
    int before = block_scan(count, sums);
    if (before < need && need <= before + count) {  // true for one thread
      for (int i = 0; i < each; ++i) {
        const int digit = kBins - 1 - (tid * each + i);
        if (before + bins[digit] >= need) {
          chosen = prefix | (static_cast<std::uint32_t>(digit) << shift);
          wanted = need - before;
          break;
        }
        before += bins[digit];
      }
    }
    __syncthreads();
  }
  const std::uint32_t last = chosen;
  const int ties = wanted;
  int greater = 0;
  int equal = 0;
  for_own_run(own, n, [&](int, std::uint32_t bits) {
    greater += bits > last ? 1 : 0;
    equal += bits == last ? 1 : 0;
  });
  int greater_before = block_scan(greater, sums);
  int equal_before = block_scan(equal, sums);
  std::int32_t* to = a.blocks + static_cast<std::int64_t>(r) * max_blocks;
  for_own_run(own, n, [&](int i, std::uint32_t bits) {
    if (bits > last) {
      to[greater_before + min(equal_before, ties)] = i;
      ++greater_before;
    } else if (bits == last) {
      if (equal_before < ties) to[greater_before + equal_before] = i;
      ++equal_before;
    }
  });
  if (tid == 0) a.count[r] = max_blocks;
}

// Floats between the scores of two rows.
std::int64_t score_stride(const IndexSelectArgs& args) {
  const std::int64_t blocks = args.max_context / kBlock;
  return (blocks + kScoreBlocks - 1) / kScoreBlocks * kScoreBlocks;
}

// Rows whose scores the workspace holds at a time: a whole number of tiles of 32.
int chunk_rows(const IndexSelectArgs& args) {
  const std::int64_t row_bytes = score_stride(args) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t fit = std::max<std::int64_t>(
      static_cast<std::int64_t>(kScoreBytes) / std::max<std::int64_t>(row_bytes, 1) / 32 * 32, 32);
  return static_cast<int>(std::min<std::int64_t>(fit, args.step.max_rows));
}

bool may_select(const IndexSelectArgs& args) {
  return args.max_context / kBlock > args.dims.max_blocks;
}

}  // namespace

std::size_t workspace_bytes(const IndexSelectArgs& args) {
  if (!may_select(args)) return 0;
  return static_cast<std::size_t>(chunk_rows(args)) * static_cast<std::size_t>(score_stride(args)) *
         sizeof(float);
}

void index_select(cudaStream_t stream, const IndexSelectArgs& args) {
  attn::check_dims(args.dims);
  check(args.workspace.bytes >= workspace_bytes(args), "index_select: workspace too small");
  float* scores = static_cast<float*>(args.workspace.data);
  const std::int64_t stride = score_stride(args);
  const int chunk = chunk_rows(args);
  const int threads = args.step.max_rows <= kDecodeRows ? 1024 : 256;
  const int cached = may_select(args) ? static_cast<int>(std::min<std::int64_t>(stride, 8192)) : 0;
  for (int row0 = 0; row0 < args.step.max_rows; row0 += chunk) {
    const int rows = std::min(chunk, args.step.max_rows - row0);
    if (may_select(args)) attn::index_scores(stream, args, scores, stride, row0, rows);
    launch_dependent(stream, dim3(static_cast<unsigned>(rows)), threads, 4 * cached, pick_kernel,
                     args, scores, stride, row0, cached);
  }
}

}  // namespace flashnext::cuda
