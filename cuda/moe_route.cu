// route and combine (spec/model.md 5): bit for bit what cpp/device/host_moe.cpp computes, in its
// order.
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

#include <cmath>

namespace flashnext::cuda {

namespace {

constexpr int kMaxExperts = 4096;
constexpr int kMaxTopK = 64;
constexpr unsigned kAll = 0xFFFFFFFFu;

// A warp a row; lane j holds experts j, j + 32, ..: the 32 partial sums of the softmax are its
// lanes.
//
// The top_k-th largest of the lanes' best probabilities is reached by at least top_k experts, so
// that the experts which reach it (few, unless many tie) hold the answer; each finds its place by
// counting.
template <int kPerLane>
__global__ void __launch_bounds__(32) route_kernel(const RouteArgs args) {
  __shared__ unsigned long long candidates[32 * kPerLane];
  __shared__ float chosen[kMaxTopK];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= rows_now(args.rows)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const float* logits = args.logits + static_cast<std::size_t>(row) * args.experts;
  float p[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    p[i] = id < args.experts ? logits[id] : -INFINITY;
  }
  // The largest logit, as a scan from logit 0 on finds it: NaN is passed over, unless it comes
  // first.
  float top = __shfl_sync(kAll, p[0], 0);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) top = p[i] > top ? p[i] : top;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAll, top, d);
    top = other > top ? other : top;
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    p[i] = math::exp(p[i] - top);
    if (lane + 32 * i < args.experts) total += p[i];
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(kAll, total, d);

  // Keys order as probabilities do, NaN below all; 0 is no expert.
  std::uint32_t key[kPerLane];
  std::uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    p[i] = math::div(p[i], total);
    key[i] = p[i] == p[i] ? __float_as_uint(p[i]) + 2u : 1u;
    if (lane + 32 * i >= args.experts) key[i] = 0;
    best = key[i] > best ? key[i] : best;
  }
  std::uint32_t threshold = 1;
  if (args.top_k <= 32) {
    int place = 0;
#pragma unroll
    for (int other = 0; other < 32; ++other) {
      const std::uint32_t b = __shfl_sync(kAll, best, other);
      place += b > best || (b == best && other < lane) ? 1 : 0;
    }
    const unsigned holder = __ballot_sync(kAll, place == args.top_k - 1);
    const std::uint32_t reached = __shfl_sync(kAll, best, __ffs(static_cast<int>(holder)) - 1);
    threshold = reached > 0 ? reached : 1;
  }
  // Larger is earlier: probability first, then the lower id.
  int count = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool in = key[i] >= threshold;
    const unsigned lanes = __ballot_sync(kAll, in);
    if (in) {
      candidates[count + __popc(lanes & ((1u << lane) - 1u))] =
          (static_cast<unsigned long long>(key[i]) << 32) |
          (kAll - static_cast<unsigned>(lane + 32 * i));
    }
    count += __popc(lanes);
  }
  __syncwarp();
  std::int32_t* ids = args.ids + static_cast<std::size_t>(row) * args.top_k;
  for (int i = lane; i < count; i += 32) {
    const unsigned long long mine = candidates[i];
    int place = 0;
    for (int other = 0; other < count; ++other) place += candidates[other] > mine ? 1 : 0;
    if (place < args.top_k) {
      ids[place] = static_cast<std::int32_t>(kAll - static_cast<unsigned>(mine));
      const std::uint32_t bits = static_cast<std::uint32_t>(mine >> 32);
      chosen[place] = bits >= 2u ? __uint_as_float(bits - 2u) : NAN;
    }
  }
  __syncwarp();
  float sum = 1.0f;
  if (args.normalise != 0) {
    sum = 0.0f;
    for (int s = 0; s < args.top_k; ++s) sum = sum + chosen[s];
  }
  float* weights = args.weights + static_cast<std::size_t>(row) * args.top_k;
  for (int s = lane; s < args.top_k; s += 32) weights[s] = math::div(chosen[s], sum);
}

// The same for few rows, where a row's time is what counts: kFewWarps warps share the exponentials
// and quotients of up to kFewExperts experts, each adds up the 32 partial sums for itself, and the
// first one chooses.
constexpr int kFewRows = 8;
constexpr int kFewWarps = 4;
constexpr int kFewExperts = 512;

struct FewShared {
  float tops[kFewWarps];
  float exponentials[kFewExperts];
  std::uint32_t keys[kFewExperts];
  uint4 bests[8];                                              // of the 32 lanes
  alignas(16) unsigned long long candidates[kFewExperts + 4];  // then zeros
  float4 chosen[kMaxTopK / 4];                                 // then zeros
};

// The top_k-th largest of the lanes' best keys, at least 1.
__device__ __forceinline__ std::uint32_t few_threshold(std::uint32_t best, int top_k, int lane,
                                                       FewShared& shared) {
  if (top_k > 32) return 1;
  reinterpret_cast<std::uint32_t*>(shared.bests)[lane] = best;
  __syncwarp();
  int place = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 other = shared.bests[i];
    const std::uint32_t b[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) place += b[j] > best || (b[j] == best && 4 * i + j < lane) ? 1 : 0;
  }
  const unsigned holder = __ballot_sync(kAll, place == top_k - 1);
  const std::uint32_t reached = __shfl_sync(kAll, best, __ffs(static_cast<int>(holder)) - 1);
  return reached > 0 ? reached : 1;
}

__global__ void __launch_bounds__(32 * kFewWarps) few_route_kernel(const RouteArgs args) {
  constexpr int kLaneExperts = kFewExperts / 32;
  constexpr int kMine = kLaneExperts / kFewWarps;
  __shared__ FewShared shared;
  pdl_trigger();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  float* chosen = reinterpret_cast<float*>(shared.chosen);
  if (threadIdx.x < kMaxTopK) chosen[threadIdx.x] = 0.0f;
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  const float* logits = args.logits + static_cast<std::size_t>(row) * args.experts;
  float p[kMine];
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int id = lane + 32 * (warp + kFewWarps * j);
    p[j] = id < args.experts ? logits[id] : -INFINITY;
  }
  float top = logits[0];
  if (row >= rows_now(args.rows)) return;
#pragma unroll
  for (int j = 0; j < kMine; ++j) top = p[j] > top ? p[j] : top;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAll, top, d);
    top = other > top ? other : top;
  }
  if (lane == 0) shared.tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kFewWarps; ++w) top = shared.tops[w] > top ? shared.tops[w] : top;
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    p[j] = math::exp(p[j] - top);
    shared.exponentials[lane + 32 * (warp + kFewWarps * j)] = p[j];
  }
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const float e = shared.exponentials[lane + 32 * i];
    if (lane + 32 * i < args.experts) total += e;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(kAll, total, d);
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int id = lane + 32 * (warp + kFewWarps * j);
    const float q = math::div(p[j], total);
    const std::uint32_t key = q == q ? __float_as_uint(q) + 2u : 1u;
    shared.keys[id] = id < args.experts ? key : 0;
  }
  __syncthreads();
  if (warp != 0) return;

  std::uint32_t key[kLaneExperts];
  std::uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    key[i] = shared.keys[lane + 32 * i];
    best = key[i] > best ? key[i] : best;
  }
  const std::uint32_t threshold = few_threshold(best, args.top_k, lane, shared);
  int count = 0;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const bool in = key[i] >= threshold;
    const unsigned lanes = __ballot_sync(kAll, in);
    if (in) {
      shared.candidates[count + __popc(lanes & ((1u << lane) - 1u))] =
          (static_cast<unsigned long long>(key[i]) << 32) |
          (kAll - static_cast<unsigned>(lane + 32 * i));
    }
    count += __popc(lanes);
  }
  if (lane < 4) shared.candidates[count + lane] = 0;
  __syncwarp();
  std::int32_t* ids = args.ids + static_cast<std::size_t>(row) * args.top_k;
  for (int i = lane; i < count; i += 32) {
    const unsigned long long mine = shared.candidates[i];
    int place = 0;
    for (int other = 0; other < count; other += 4) {
      const ulonglong2* four = reinterpret_cast<const ulonglong2*>(shared.candidates + other);
      const ulonglong2 a = four[0];
      const ulonglong2 b = four[1];
      place +=
          (a.x > mine ? 1 : 0) + (a.y > mine ? 1 : 0) + (b.x > mine ? 1 : 0) + (b.y > mine ? 1 : 0);
    }
    if (place < args.top_k) {
      ids[place] = static_cast<std::int32_t>(kAll - static_cast<unsigned>(mine));
      const std::uint32_t bits = static_cast<std::uint32_t>(mine >> 32);
      chosen[place] = bits >= 2u ? __uint_as_float(bits - 2u) : NAN;
    }
  }
  __syncwarp();
  float sum = 1.0f;
  if (args.normalise != 0) {
    sum = 0.0f;
    // What is past top_k adds zero.
    for (int s = 0; s < args.top_k; s += 4) {
      const float4 c = shared.chosen[s / 4];
      sum = sum + c.x;
      sum = sum + c.y;
      sum = sum + c.z;
      sum = sum + c.w;
    }
  }
  float* weights = args.weights + static_cast<std::size_t>(row) * args.top_k;
  for (int s = lane; s < args.top_k; s += 32) weights[s] = math::div(chosen[s], sum);
}

// A thread four channels.
__global__ void __launch_bounds__(128) combine_kernel(const CombineArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.y);
  const int c = 4 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows_now(args.rows) || c >= args.dim) return;
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t slot0 = static_cast<std::size_t>(row) * static_cast<std::size_t>(args.slots);
  const std::size_t at = static_cast<std::size_t>(row) * dim + static_cast<std::size_t>(c);
  const float4 shared = *reinterpret_cast<const float4*>(args.shared_y + at);
  float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](float w, const float4& v) {
    y.x = math::fma(w, v.x, y.x);
    y.y = math::fma(w, v.y, y.y);
    y.z = math::fma(w, v.z, y.z);
    y.w = math::fma(w, v.w, y.w);
  };
#pragma unroll 10
  for (int s = 0; s < args.slots; ++s) {
    add(args.weights[slot0 + static_cast<std::size_t>(s)],
        *reinterpret_cast<const float4*>(args.slot_y + (slot0 + static_cast<std::size_t>(s)) * dim +
                                         static_cast<std::size_t>(c)));
  }
  add(math::sigmoid(args.shared_gate[row]), shared);
  *reinterpret_cast<float4*>(args.y + at) = y;
}

}  // namespace

void route(cudaStream_t stream, const RouteArgs& args) {
  check(args.experts >= 1 && args.experts <= kMaxExperts, "route: number of experts");
  check(args.top_k >= 1 && args.top_k <= kMaxTopK && args.top_k <= args.experts, "route: top_k");
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(args.rows.max));
  if (args.rows.max <= kFewRows && args.experts <= kFewExperts) {
    return launch_pdl(stream, few_route_kernel, grid, dim3(32 * kFewWarps), 0, args);
  }
  const auto kernel = args.experts <= 32    ? route_kernel<1>
                      : args.experts <= 512 ? route_kernel<16>
                                            : route_kernel<kMaxExperts / 32>;
  launch_pdl(stream, kernel, grid, dim3(32), 0, args);
}

void combine(cudaStream_t stream, const CombineArgs& args) {
  check(args.dim % 4 == 0, "combine: dim must be a multiple of 4");
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.dim, 512)),
                  static_cast<unsigned>(args.rows.max));
  launch_pdl(stream, combine_kernel, grid, dim3(128), 0, args);
}

}  // namespace flashnext::cuda
