// route and combine (spec/model.md 5): bit for bit what cpp/device/host_moe.cpp computes, in its
// order.
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

constexpr int kMaxExperts = 4096;
constexpr int kMaxTopK = 64;
constexpr unsigned kAll = 0xFFFFFFFFu;

// A warp a row; lane j holds experts j, j + 32, ..: the 32 partial sums of the softmax are its
// lanes.
template <int kPerLane>
__global__ void __launch_bounds__(32) route_kernel(const RouteArgs args) {
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
    p[i] = id < args.experts ? logits[id] : 0.0f;
  }
  // The largest logit; a comparison with NaN is false and keeps what is there, as a scan from logit
  // 0 on does unless that one is NaN itself (then every probability is NaN).
  float top = __shfl_sync(kAll, p[0], 0);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < args.experts && p[i] > top) top = p[i];
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAll, top, d);
    if (other > top) top = other;
  }
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < args.experts) {
      p[i] = math::exp(p[i] - top);
      total += p[i];
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(kAll, total, d);

  // Keys order as probabilities do; NaN below everything, 0 for a taken or absent one.
  std::uint32_t best = 0;
  int best_at = 0;
  std::uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    key[i] = 0;
    if (lane + 32 * i < args.experts) {
      p[i] = math::div(p[i], total);
      key[i] = p[i] == p[i] ? __float_as_uint(p[i]) + 2u : 1u;
      if (key[i] > best) {
        best = key[i];
        best_at = i;
      }
    }
  }
  std::int32_t* ids = args.ids + static_cast<std::size_t>(row) * args.top_k;
  float* weights = args.weights + static_cast<std::size_t>(row) * args.top_k;
  // Slot s is kept by lane s % 32.
  float kept[kMaxTopK / 32];
  float sum = 0.0f;
  for (int s = 0; s < args.top_k; ++s) {
    const std::uint32_t most = __reduce_max_sync(kAll, best);
    const unsigned id =
        __reduce_min_sync(kAll, best == most ? static_cast<unsigned>(lane + 32 * best_at) : kAll);
    float weight = 0.0f;
    if (static_cast<int>(id % 32) == lane) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (i == best_at) {
          weight = p[i];
          key[i] = 0;
        }
      }
      best = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (key[i] > best) {
          best = key[i];
          best_at = i;
        }
      }
      ids[s] = static_cast<std::int32_t>(id);
    }
    weight = __shfl_sync(kAll, weight, static_cast<int>(id % 32));
    sum = sum + weight;
    if (s % 32 == lane) kept[s / 32] = weight;
  }
  if (args.normalise == 0) sum = 1.0f;
  for (int s = lane; s < args.top_k; s += 32) weights[s] = math::div(kept[s / 32], sum);
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
