// route and combine (spec/model.md 5): bit for bit what cpp/device/host_moe.cpp computes, in its
// order.
#include "cpp/base/errors.h"
#include "cuda/half_product.cuh"
#include "cuda/kernels.h"
#include "cuda/moe_route.cuh"

namespace flashnext::cuda {

namespace {

// Softmax and choice, a warp a row; lane j holds experts j, j + 32, ..: the 32 partial sums of the
// softmax are its lanes.
template <int kPerLane>
__global__ void __launch_bounds__(32) route_kernel(const RouteArgs args, const float* all_logits) {
  __shared__ ChoiceShared<kPerLane> shared;
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= rows_now(args.rows)) return;
  const int lane = static_cast<int>(threadIdx.x);
  const int experts = args.router.out;
  const float* logits =
      all_logits + static_cast<std::size_t>(row) * static_cast<std::size_t>(experts);
  float p[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    p[i] = id < experts ? logits[id] : -INFINITY;
  }
  // The largest logit, as a scan from logit 0 on finds it: NaN is passed over, unless it comes
  // first.
  float top = __shfl_sync(kAllLanes, p[0], 0);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) top = larger(top, p[i]);
  top = warp_larger(top);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    p[i] = math::exp(p[i] - top);
    if (lane + 32 * i < experts) total += p[i];
  }
  total = warp_total(total);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    shared.keys[id] = id < experts ? key_of(math::div(p[i], total)) : 0;
  }
  __syncwarp();
  finish_row<kPerLane>(args, row, lane, shared);
}

constexpr int kSlotsAhead = 10;  // slots whose rows are under way at a time

// A thread four channels. Of few rows, loads do not wait for the number of rows: those beyond it
// lie in buffers made for more, and only what is written is limited.
template <bool kFew>
__global__ void __launch_bounds__(128) combine_kernel(const CombineArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.y);
  const int c = 4 * static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= args.dim) return;
  const int count = *args.rows.count;
  if constexpr (!kFew) {
    if (row >= args.rows.scale * count) return;
  }
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t slot0 = static_cast<std::size_t>(row) * static_cast<std::size_t>(args.slots);
  const std::size_t at = static_cast<std::size_t>(row) * dim + static_cast<std::size_t>(c);
  const float gate = args.shared_gate[row];
  const float4 shared = *reinterpret_cast<const float4*>(args.shared_y + at);
  float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
  const auto add = [&](float w, const float4& v) {
    y.x = math::fma(w, v.x, y.x);
    y.y = math::fma(w, v.y, y.y);
    y.z = math::fma(w, v.z, y.z);
    y.w = math::fma(w, v.w, y.w);
  };
#pragma unroll 1
  for (int first = 0; first < args.slots; first += kSlotsAhead) {
    float w[kSlotsAhead];
    float4 v[kSlotsAhead];
#pragma unroll
    for (int i = 0; i < kSlotsAhead; ++i) {
      if (first + i >= args.slots) break;
      const std::size_t slot = slot0 + static_cast<std::size_t>(first + i);
      w[i] = args.weights[slot];
      v[i] =
          *reinterpret_cast<const float4*>(args.slot_y + slot * dim + static_cast<std::size_t>(c));
    }
#pragma unroll
    for (int i = 0; i < kSlotsAhead; ++i) {
      if (first + i < args.slots) add(w[i], v[i]);
    }
  }
  add(math::sigmoid(gate), shared);
  if (row < args.rows.scale * count) *reinterpret_cast<float4*>(args.y + at) = y;
}

struct RouteSpace {
  DenseArgs dense;  // without its workspace
  std::size_t logits, bytes;
};

RouteSpace route_space(const RouteArgs& args) {
  RouteSpace space{};
  space.logits = align_up(static_cast<std::size_t>(args.rows.max) *
                          static_cast<std::size_t>(args.router.out) * sizeof(float));
  space.bytes = space.logits;
  if (!route_in_one_kernel(args)) {
    space.dense.rows = args.rows;
    space.dense.x = args.x;
    space.dense.w[0] = args.router;
    space.dense.w[1] = args.shared_gate;
    space.dense.n = 2;
    space.bytes += workspace_bytes(space.dense);
  }
  return space;
}

}  // namespace

std::size_t workspace_bytes(const RouteArgs& args) { return route_space(args).bytes; }

void route(cudaStream_t stream, const RouteArgs& args) {
  const int experts = args.router.out;
  check(experts >= 1 && experts <= kMaxExperts, "route: number of experts");
  check(args.top_k >= 1 && args.top_k <= kMaxTopK && args.top_k <= experts, "route: top_k");
  check(args.router.in % 8 == 0, "route: `in` must be a multiple of 8");
  check(args.shared_gate.in == args.router.in && args.shared_gate.out == 1,
        "route: the shared gate is one row of the router's `in`");
  if (args.rows.max <= 0) return;
  RouteSpace space = route_space(args);
  check(args.workspace.bytes >= space.bytes, "route: workspace too small");
  char* work = static_cast<char*>(args.workspace.data);
  float* logits = reinterpret_cast<float*>(work);
  if (route_in_one_kernel(args)) return route_decode(stream, args, logits);
  space.dense.y[0] = logits;
  space.dense.y[1] = args.gate;
  space.dense.workspace = {work + space.logits, args.workspace.bytes - space.logits};
  dense(stream, space.dense);
  const auto kernel = experts <= 32    ? route_kernel<1>
                      : experts <= 512 ? route_kernel<16>
                                       : route_kernel<kMaxExperts / 32>;
  launch_pdl(stream, kernel, dim3(static_cast<unsigned>(args.rows.max)), dim3(32), 0, args,
             static_cast<const float*>(logits));
}

void combine(cudaStream_t stream, const CombineArgs& args) {
  check(args.dim % 4 == 0, "combine: dim must be a multiple of 4");
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.dim, 512)),
                  static_cast<unsigned>(args.rows.max));
  const auto kernel = args.rows.max <= kDecodeRows ? combine_kernel<true> : combine_kernel<false>;
  launch_pdl(stream, kernel, grid, dim3(128), 0, args);
}

}  // namespace flashnext::cuda
