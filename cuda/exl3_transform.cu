// Steps 1 to 4 of the integer linear for many rows: rows of x, or silu(gate) * up, become digit
// planes, one block of threads a (position, plane).
#include "cuda/check.h"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_rotate.cuh"
#include "cuda/exl3_trellis.cuh"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxWarps = 16;

// Blocks of 128 inputs: warp w takes w, w + warps, ..., at most kBlocks of them.
template <int kBlocks>
__global__ void __launch_bounds__(32 * kMaxWarps)
    transform_kernel(const __grid_constant__ TransformJobs jobs) {
  pdl_wait();
  pdl_trigger();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int warps = static_cast<int>(blockDim.x) >> 5;
  const int position = static_cast<int>(blockIdx.x);
  if (jobs.arrived != nullptr && position == 0 && blockIdx.y == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < kUnitBlocks; i += 32 * warps) {
      jobs.arrived[i] = 0;
    }
  }
  const int positions = jobs.num_sorted != nullptr
                            ? *jobs.num_sorted
                            : jobs.rows.scale * *jobs.rows.count * jobs.slots;
  if (jobs.first + position >= positions) return;
  const int plane = static_cast<int>(blockIdx.y);
  const int pair =
      jobs.order != nullptr ? jobs.order[jobs.first + position] : jobs.first + position;
  const bool is_shared = jobs.shared != nullptr && pair >= jobs.shared_first;
  const __half* suh = jobs.suh[plane];
  if (jobs.experts != nullptr) {
    const ExpertRef* ref = jobs.shared;
    if (!is_shared) {
      ref = jobs.experts + (jobs.ids != nullptr ? jobs.ids[pair] : pair % jobs.slots);
    }
    suh = reinterpret_cast<const __half*>(ref->suh[jobs.member[plane]]);
  }
  const int source = is_shared ? pair - jobs.shared_first : pair / jobs.slots;
  const std::int64_t row = jobs.up != nullptr ? position : source;

  RawInput raw[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = (warp + b * warps) * 128;
    if (at < jobs.in) raw[b] = load_input(jobs.x, jobs.up, suh, row, jobs.in, at + 4 * lane);
  }
  float u[kBlocks][4];
  std::uint32_t bits = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    if ((warp + b * warps) * 128 >= jobs.in) break;
    rotate(raw[b], jobs.up != nullptr, lane, u[b]);
    bits = max(bits, max_bits(u[b]));
  }

  __shared__ std::uint32_t warp_max[kMaxWarps];
  __shared__ std::int32_t warp_sum[kMaxWarps];
  bits = __reduce_max_sync(kAll, bits);
  if (lane == 0) warp_max[warp] = bits;
  __syncthreads();
  bits = __reduce_max_sync(kAll, lane < warps ? warp_max[lane] : 0);
  const RowLevels levels = row_levels(bits, jobs.levels);

  const bool two = jobs.levels > 127;
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  std::int8_t* high = jobs.planes + plane * (two ? 2 : 1) * plane_bytes +
                      static_cast<std::int64_t>(position) * jobs.in;
  int sum = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = (warp + b * warps) * 128;
    if (at >= jobs.in) break;
    const Digits d = digits_of(u[b], levels, jobs.levels);
    sum += d.sum;
    store_digits(high + at, d.high, lane);
    if (two) store_digits(high + plane_bytes + at, d.low, lane);
  }
  sum = __reduce_add_sync(kAll, sum);
  if (lane == 0) warp_sum[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = __reduce_add_sync(kAll, lane < warps ? warp_sum[lane] : 0);
    if (lane == 0) {
      jobs.scales[static_cast<std::int64_t>(plane) * jobs.capacity + position] = {levels.q, sum};
    }
  }
}

}  // namespace

void exl3_transform(cudaStream_t stream, const TransformJobs& jobs) {
  check(jobs.in % 128 == 0 && jobs.in > 0 && jobs.in <= kMaxIn, "exl3: inputs of a linear");
  const int blocks = jobs.in / 128;
  const dim3 grid(static_cast<unsigned>(jobs.capacity), static_cast<unsigned>(jobs.n));
  if (blocks <= 4 * kMaxWarps) {
    launch_pdl(stream, transform_kernel<4>, grid,
               dim3(static_cast<unsigned>(32 * ceil_div(blocks, 4))), 0, jobs);
  } else {
    launch_pdl(stream, transform_kernel<8>, grid,
               dim3(static_cast<unsigned>(32 * ceil_div(blocks, 8))), 0, jobs);
  }
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  FN_CUDA(cudaGetDevice(&device));
  FN_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace flashnext::cuda
