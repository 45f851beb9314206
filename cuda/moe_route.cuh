// What the kernels of the op `route` share (moe_route.cu for many rows, moe_route_decode.cu for
// few): the choice of one row's experts by one warp. Bit for bit what cpp/device/host_moe.cpp
// computes, in its order.
#pragma once

#include "cpp/base/math.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

#include <cmath>
#include <cstdint>

namespace flashnext::cuda {

inline constexpr int kMaxExperts = 4096;
inline constexpr int kMaxTopK = 64;

// Up to kFragmentRows and 512 experts, with products of one slice (half_product.cuh): one kernel.
inline constexpr int kFewExperts = 512;
bool route_in_one_kernel(const RouteArgs& args);
// logits: (rows.max, experts).
void route_decode(cudaStream_t stream, const RouteArgs& args, float* logits);

#if defined(__CUDACC__)

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ __forceinline__ float larger(float a, float b) { return b > a ? b : a; }

__device__ __forceinline__ float warp_larger(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v = larger(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

__device__ __forceinline__ float warp_total(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kAllLanes, v, d);
  return v;
}

// Keys order as probabilities do, NaN below all; 0 is no expert.
__device__ __forceinline__ std::uint32_t key_of(float p) {
  return p == p ? __float_as_uint(p) + 2u : 1u;
}
__device__ __forceinline__ float probability_of(std::uint32_t key) {
  return key >= 2u ? __uint_as_float(key - 2u) : NAN;
}

// Of one row.
template <int kPerLane>
struct ChoiceShared {
  static constexpr int kExperts = 32 * kPerLane;
  union {
    struct {
      float exponentials[kExperts];
      std::uint32_t keys[kExperts];
    };
    alignas(16) unsigned long long candidates[kExperts + 4];  // then zeros
  };
  uint4 bests[8];               // of the 32 lanes
  float4 chosen[kMaxTopK / 4];  // then zeros
};

// The top_k-th largest of the lanes' best keys, at least 1. It is reached by at least top_k
// experts, so that the experts which reach it (few, unless many tie) hold the answer.
__device__ __forceinline__ std::uint32_t choice_threshold(std::uint32_t best, int top_k, int lane,
                                                          uint4* bests) {
  if (top_k > 32) return 1;
  reinterpret_cast<std::uint32_t*>(bests)[lane] = best;
  __syncwarp();
  int place = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 other = bests[i];
    const std::uint32_t b[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) place += b[j] > best || (b[j] == best && 4 * i + j < lane) ? 1 : 0;
  }
  const unsigned holder = __ballot_sync(kAllLanes, place == top_k - 1);
  const std::uint32_t reached = __shfl_sync(kAllLanes, best, __ffs(static_cast<int>(holder)) - 1);
  return reached > 0 ? reached : 1;
}

// The top_k experts of the largest keys, the lower id first on ties; lane j holds the keys of
// experts j, j + 32, ..
template <int kPerLane>
__device__ __forceinline__ void choose_best(const std::uint32_t (&key)[kPerLane], int top_k,
                                            int lane, ChoiceShared<kPerLane>& shared,
                                            std::int32_t* ids) {
  std::uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) best = key[i] > best ? key[i] : best;
  const std::uint32_t threshold = choice_threshold(best, top_k, lane, shared.bests);
  // Larger is earlier: probability first, then the lower id. Each candidate finds its place by
  // counting.
  int count = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const bool in = key[i] >= threshold;
    const unsigned lanes = __ballot_sync(kAllLanes, in);
    if (in) {
      shared.candidates[count + __popc(lanes & ((1u << lane) - 1u))] =
          (static_cast<unsigned long long>(key[i]) << 32) |
          (kAllLanes - static_cast<unsigned>(lane + 32 * i));
    }
    count += __popc(lanes);
  }
  if (lane < 4) shared.candidates[count + lane] = 0;
  __syncwarp();
  float* chosen = reinterpret_cast<float*>(shared.chosen);
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
    if (place < top_k) {
      ids[place] = static_cast<std::int32_t>(kAllLanes - static_cast<unsigned>(mine));
      chosen[place] = probability_of(static_cast<std::uint32_t>(mine >> 32));
    }
  }
}

// ids and weights of a row from shared.keys, by one whole warp, which sees them.
template <int kPerLane>
__device__ __forceinline__ void finish_row(const RouteArgs& args, int row, int lane,
                                           ChoiceShared<kPerLane>& shared) {
  const std::size_t first = static_cast<std::size_t>(row) * static_cast<std::size_t>(args.top_k);
  std::int32_t* ids = args.ids + first;
  float* chosen = reinterpret_cast<float*>(shared.chosen);
  chosen[lane] = chosen[lane + 32] = 0.0f;
  static_assert(kMaxTopK == 64, "two a lane");
  const std::int32_t* forced = args.forced != nullptr ? args.forced + first : nullptr;
  if (forced != nullptr && forced[0] >= 0) {
    __syncwarp();
    for (int s = lane; s < args.top_k; s += 32) {
      const std::int32_t id = forced[s];
      ids[s] = id;
      chosen[s] = static_cast<unsigned>(id) < static_cast<unsigned>(args.router.out)
                      ? probability_of(shared.keys[id])
                      : NAN;
    }
  } else {
    std::uint32_t key[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) key[i] = shared.keys[lane + 32 * i];
    __syncwarp();  // candidates take the place of the keys
    choose_best<kPerLane>(key, args.top_k, lane, shared, ids);
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
  float* weights = args.weights + first;
  for (int s = lane; s < args.top_k; s += 32) weights[s] = math::div(chosen[s], sum);
}

#endif  // __CUDACC__

}  // namespace flashnext::cuda
