// Steps 1 to 4 of the integer linear: rows of x, or silu(gate) * up, become digit planes, one block
// of threads a (position, plane). On the way the scratch of a GEMV is zeroed and, for experts, its
// groups are formed.
#include "cpp/base/math.h"
#include "cuda/check.h"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_trellis.cuh"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kMaxWarps = 32;
constexpr int kMaxPairs = 1024;  // of a GEMV of experts

__device__ int expert_of(const TransformJobs& jobs, int pair) {
  return jobs.ids != nullptr ? jobs.ids[pair] : pair % jobs.slots;
}

// Pairs of the same expert share groups of at most group_size. One block; a thread a pair.
__device__ void form_groups(const TransformJobs& jobs, int pairs) {
  __shared__ std::int32_t ids[kMaxPairs];
  __shared__ std::int32_t rank[kMaxPairs];  // among the pairs of its expert
  for (int p = static_cast<int>(threadIdx.x); p < pairs; p += static_cast<int>(blockDim.x)) {
    ids[p] = expert_of(jobs, p);
  }
  __syncthreads();
  for (int p = static_cast<int>(threadIdx.x); p < pairs; p += static_cast<int>(blockDim.x)) {
    int before = 0;
    for (int o = 0; o < p; ++o) before += ids[o] == ids[p] ? 1 : 0;
    rank[p] = before;
  }
  __syncthreads();
  const int size = jobs.group_size;
  for (int p = static_cast<int>(threadIdx.x); p < pairs; p += static_cast<int>(blockDim.x)) {
    const int in_group = rank[p] % size;
    int group = 0;
    if (in_group == 0) {
      int members = 0;
      for (int o = 0; o < pairs; ++o) {
        if (o < p && rank[o] % size == 0) ++group;
        if (ids[o] == ids[p] && rank[o] / size == rank[p] / size) ++members;
      }
      jobs.groups[group].expert = ids[p];
      jobs.groups[group].count = members;
    } else {
      int leader = p;
      for (int o = 0; o < p; ++o) {
        if (ids[o] == ids[p] && rank[o] == rank[p] - in_group) leader = o;
      }
      for (int o = 0; o < leader; ++o) group += rank[o] % size == 0 ? 1 : 0;
    }
    jobs.groups[group].position[in_group] = p;
  }
  if (threadIdx.x == 0) {
    int groups = 0;
    for (int p = 0; p < pairs; ++p) groups += rank[p] % size == 0 ? 1 : 0;
    *jobs.num_groups = groups;
  }
}

// Digits of four consecutive inputs of a lane, in the byte order of the planes: lanes l and l ^ 2
// swap halves so that each stores one word.
__device__ __forceinline__ void store_digits(std::int8_t* block, std::uint32_t bytes, int lane) {
  const bool upper = (lane & 2) != 0;
  const std::uint32_t give = upper ? bytes & 0xFFFFu : bytes >> 16;
  const std::uint32_t other = __shfl_xor_sync(kAll, give, 2);
  const std::uint32_t word =
      upper ? (other & 0xFFFFu) | (bytes & 0xFFFF0000u) : (bytes & 0xFFFFu) | (other << 16);
  const int t = 2 * (lane & 1) + (upper ? 1 : 0);
  *reinterpret_cast<std::uint32_t*>(block + (lane >> 2) * 16 + 4 * t) = word;
}

// Blocks of 128 inputs: warp w takes w, w + warps, ..., at most kBlocks of them.
template <int kBlocks>
__global__ void __launch_bounds__(kBlocks <= 2 ? 1024 : 512)
    transform_kernel(const __grid_constant__ TransformJobs jobs) {
  pdl_wait();
  pdl_trigger();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int warps = static_cast<int>(blockDim.x) >> 5;
  if (jobs.zero != nullptr) {
    const int step = static_cast<int>(gridDim.x * gridDim.y * blockDim.x);
    int i = static_cast<int>((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x);
    for (; i < jobs.zero_words; i += step) jobs.zero[i] = 0;
  }
  const int pairs = jobs.rows.scale * *jobs.rows.count * jobs.slots;
  if (jobs.groups != nullptr && blockIdx.x == gridDim.x - 1) {
    if (blockIdx.y == 0) form_groups(jobs, pairs);
    return;
  }
  const int position = static_cast<int>(blockIdx.x);
  if (jobs.first + position >= pairs) return;
  const int plane = static_cast<int>(blockIdx.y);
  const int pair =
      jobs.order != nullptr ? jobs.order[jobs.first + position] : jobs.first + position;
  const __half* suh = jobs.suh[plane];
  if (jobs.experts != nullptr) {
    suh = reinterpret_cast<const __half*>(
        jobs.experts[expert_of(jobs, pair)].suh[jobs.member[plane]]);
  }
  const bool is_activation = jobs.up != nullptr;
  const std::int64_t row = is_activation ? position : pair / jobs.slots;
  const float* x = jobs.x + row * jobs.in;
  const float* up = is_activation ? jobs.up + row * jobs.in : nullptr;

  float u[kBlocks][4];
  std::uint32_t max_bits = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = (warp + b * warps) * 128 + 4 * lane;
    if (at >= jobs.in) break;
    const float4 value = *reinterpret_cast<const float4*>(x + at);
    float v[4] = {value.x, value.y, value.z, value.w};
    if (is_activation) {
      const float4 other = *reinterpret_cast<const float4*>(up + at);
      v[0] = __fmul_rn(math::silu(v[0]), other.x);
      v[1] = __fmul_rn(math::silu(v[1]), other.y);
      v[2] = __fmul_rn(math::silu(v[2]), other.z);
      v[3] = __fmul_rn(math::silu(v[3]), other.w);
    }
    float scale[4];
    load_halves(suh + at, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[b][i] = __fmul_rn(v[i], scale[i]);
    butterflies(u[b], lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u[b][i] = __fmul_rn(u[b][i], kRootEighth);
      max_bits = max(max_bits, __float_as_uint(u[b][i]) & 0x7FFFFFFFu);
    }
  }

  __shared__ std::uint32_t warp_max[kMaxWarps];
  __shared__ std::int32_t warp_sum[kMaxWarps];
  max_bits = __reduce_max_sync(kAll, max_bits);  // NaN above infinity above numbers
  if (lane == 0) warp_max[warp] = max_bits;
  __syncthreads();
  max_bits = __reduce_max_sync(kAll, lane < warps ? warp_max[lane] : 0);

  const float levels = static_cast<float>(jobs.levels);
  const float m = __uint_as_float(max_bits);
  const float r = __fdiv_rn(levels, m);
  float q = __fdiv_rn(m, levels);
  const bool is_finite = max_bits < 0x7F800000u;
  const bool has_numbers = is_finite && m != 0.0f && __float_as_uint(r) < 0x7F800000u;
  if (!has_numbers) q = is_finite ? 0.0f : __uint_as_float(0x7FC00000u);

  const bool two = jobs.levels > 127;
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  std::int8_t* high = jobs.planes + plane * (two ? 2 : 1) * plane_bytes +
                      static_cast<std::int64_t>(position) * jobs.in;
  int sum = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int at = (warp + b * warps) * 128;
    if (at >= jobs.in) break;
    std::uint32_t d0 = 0;
    std::uint32_t d1 = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int v = has_numbers ? __float2int_rn(__fmul_rn(u[b][i], r)) : 0;
      v = min(max(v, -jobs.levels), jobs.levels);
      sum += v;
      const int h = two ? (v + 128) >> 8 : v;
      d0 |= (static_cast<std::uint32_t>(h) & 0xFFu) << (8 * i);
      d1 |= (static_cast<std::uint32_t>(v) & 0xFFu) << (8 * i);
    }
    store_digits(high + at, d0, lane);
    if (two) store_digits(high + plane_bytes + at, d1, lane);
  }
  sum = __reduce_add_sync(kAll, sum);
  if (lane == 0) warp_sum[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = __reduce_add_sync(kAll, lane < warps ? warp_sum[lane] : 0);
    if (lane == 0) {
      jobs.scales[static_cast<std::int64_t>(plane) * jobs.capacity + position] = {q, sum};
    }
  }
}

}  // namespace

void exl3_transform(cudaStream_t stream, const TransformJobs& jobs) {
  check(jobs.in % 128 == 0 && jobs.in > 0 && jobs.in <= kMaxIn, "exl3: inputs of a linear");
  const int blocks = jobs.in / 128;
  // Few rows: a block of 128 a warp, for latency. Many rows: more of them, for throughput.
  const int per_warp = jobs.capacity > 256 || blocks > 64 ? (blocks > 64 ? 8 : 4)
                       : blocks > 32                      ? 2
                                                          : 1;
  const int extra = jobs.groups != nullptr ? 1 : 0;
  check(extra == 0 || jobs.capacity <= kMaxPairs, "exl3: pairs of a decode step");
  const dim3 grid(static_cast<unsigned>(jobs.capacity + extra), static_cast<unsigned>(jobs.n));
  const dim3 block(static_cast<unsigned>(32 * ceil_div(blocks, per_warp)));
  switch (per_warp) {
    case 1:
      return launch_pdl(stream, transform_kernel<1>, grid, block, 0, jobs);
    case 2:
      return launch_pdl(stream, transform_kernel<2>, grid, block, 0, jobs);
    case 4:
      return launch_pdl(stream, transform_kernel<4>, grid, block, 0, jobs);
    default:
      return launch_pdl(stream, transform_kernel<8>, grid, block, 0, jobs);
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
