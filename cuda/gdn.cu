// Gated DeltaNet around the recurrence: convolution with norms and gates, and the gated output
// norm. One warp owns 128 channels (one head), four a lane; sums over a head are butterflies of
// the warp.
#include "cpp/base/math.h"
#include "cuda/dependent.cuh"
#include "cuda/gdn.cuh"
#include "cuda/kernels.h"

namespace flashnext::cuda {
namespace {

using gdn::kHead;

constexpr int kTaps = 4;
constexpr int kWarps = 4;

__device__ __forceinline__ float sum_of_squares(float4 x) {
  float s = __fmul_rn(x.x, x.x);
  s = fmaf(x.y, x.y, s);
  s = fmaf(x.z, x.z, s);
  s = fmaf(x.w, x.w, s);
  return gdn::warp_sum(s);
}

__device__ __forceinline__ float4 scaled(float4 x, float f) {
  return {x.x * f, x.y * f, x.z * f, x.w * f};
}

__device__ __forceinline__ float4 load4(const float* p) {
  return *reinterpret_cast<const float4*>(p);
}

__device__ __forceinline__ float tap_sum(const float4& w, float x0, float x1, float x2, float x3) {
  return fmaf(w.w, x3, fmaf(w.z, x2, fmaf(w.y, x1, w.x * x0)));
}

// decay and beta of 32 value heads, a lane each.
__device__ __forceinline__ void gates(const GdnConvArgs& a, int head, int row0, int end) {
  if (head >= a.dims.v_heads) return;
  const float rate = a.rate[head];
  const float bias = a.dt_bias[head];
  for (int r = row0; r < end; ++r) {
    const std::int64_t at = static_cast<std::int64_t>(r) * a.dims.v_heads + head;
    a.decay[at] = math::exp(-rate * math::softplus(a.a[at] + bias));
    a.beta[at] = math::sigmoid(a.b[at]);
  }
}

// A warp walks kRows consecutive rows of one head; the taps slide along. The warps past the last
// head do the gates.
template <int kRows>
__global__ void __launch_bounds__(kWarps * 32) conv_kernel(const GdnConvArgs a) {
  const int row0 = static_cast<int>(blockIdx.y) * kRows;
  const int heads = 2 * a.dims.k_heads + a.dims.v_heads;
  const int head = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int channels = heads * kHead;
  const int channel = head * kHead + 4 * lane;
  float4 w[4];
  if (head < heads) {
#pragma unroll
    for (int c = 0; c < 4; ++c) w[c] = load4(a.conv + (channel + c) * kTaps);
  }
  // Read together: most steps have the one segment.
  const int rows = a.step.head->rows;
  const int first_segment = a.step.rows[row0].segment;
  const Segment segment0 = a.step.segments[0];
  wait_for_previous();
  if (kRows == 1) let_next_start();
  const int end = min(row0 + kRows, rows);
  if (row0 >= rows) return;
  if (head >= heads) return gates(a, (head - heads) * 32 + lane, row0, end);

  float4 x[kTaps];
  float4 ahead = load4(a.u + static_cast<std::int64_t>(row0) * channels + channel);
  int segment = -1;
  for (int r = row0; r < end; ++r) {
    const int own = r == row0 ? first_segment : a.step.rows[r].segment;
    if (own != segment) {  // the first row, or another sequence: fetch the history
      segment = own;
      const Segment s = own == 0 ? segment0 : a.step.segments[own];
      const float* window = a.window + s.state_in * a.dims.slot_stride + channel;
#pragma unroll
      for (int i = 0; i < kTaps - 1; ++i) {
        const int back = r - (kTaps - 1) + i;
        if (back >= s.row0) {
          x[i] = load4(a.u + static_cast<std::int64_t>(back) * channels + channel);
        } else if (s.pos0 > 0) {
          x[i] = load4(window + static_cast<std::int64_t>(kTaps - 1 + back - s.row0) * channels);
        } else {
          x[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
        }
      }
    }
    x[3] = ahead;
    if (r + 1 < end) ahead = load4(a.u + static_cast<std::int64_t>(r + 1) * channels + channel);
    float4 y;
    y.x = math::silu(tap_sum(w[0], x[0].x, x[1].x, x[2].x, x[3].x));
    y.y = math::silu(tap_sum(w[1], x[0].y, x[1].y, x[2].y, x[3].y));
    y.z = math::silu(tap_sum(w[2], x[0].z, x[1].z, x[2].z, x[3].z));
    y.w = math::silu(tap_sum(w[3], x[0].w, x[1].w, x[2].w, x[3].w));
    if (head < 2 * a.dims.k_heads) {
      float norm = math::rsqrt(sum_of_squares(y) + 1e-6f);
      if (head < a.dims.k_heads) norm = norm * 0.088388347648318447f;  // 128^-0.5
      y = scaled(y, norm);
    }
    *reinterpret_cast<float4*>(a.qkv + static_cast<std::int64_t>(r) * channels + channel) = y;
    x[0] = x[1];
    x[1] = x[2];
    x[2] = x[3];
  }
}

__global__ void __launch_bounds__(kWarps * 32) gate_kernel(const GdnGateArgs a) {
  const std::int64_t item =
      static_cast<std::int64_t>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int rows = a.rows.scale * *a.rows.count;
  const float4 w = load4(a.w + 4 * lane);
  wait_for_previous();
  let_next_start();
  if (item >= static_cast<std::int64_t>(rows) * a.v_heads) return;
  const std::int64_t at = item * kHead + 4 * lane;
  const float4 o = load4(a.o + at);
  const float4 z = load4(a.z + at);
  const float norm = math::rsqrt(fmaf(sum_of_squares(o), 1.0f / kHead, a.eps));
  auto gate = [&](float v) { return a.silu_gate != 0 ? math::silu(v) : math::sigmoid(v); };
  float4 y;
  y.x = o.x * norm * w.x * gate(z.x);
  y.y = o.y * norm * w.y * gate(z.y);
  y.z = o.z * norm * w.z * gate(z.z);
  y.w = o.w * norm * w.w * gate(z.w);
  *reinterpret_cast<float4*>(a.y + at) = y;
}

}  // namespace

void gdn_conv(cudaStream_t stream, const GdnConvArgs& args) {
  gdn::check_dims(args.dims);
  check(args.dims.kernel == kTaps, "gdn_conv: the CUDA kernel is built for 4 taps");
  const int warps = 2 * args.dims.k_heads + args.dims.v_heads + (args.dims.v_heads + 31) / 32;
  const unsigned groups = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  // Long buckets share the taps and weights among 16 rows; the arithmetic of a row is the same.
  if (args.step.max_rows <= 64) {
    launch_dependent(stream, dim3(groups, static_cast<unsigned>(args.step.max_rows)), kWarps * 32,
                     0, conv_kernel<1>, args);
  } else {
    const unsigned tiles = static_cast<unsigned>((args.step.max_rows + 15) / 16);
    launch_dependent(stream, dim3(groups, tiles), kWarps * 32, 0, conv_kernel<16>, args);
  }
}

void gdn_gate(cudaStream_t stream, const GdnGateArgs& args) {
  check(args.v_heads > 0, "gdn_gate: no heads");
  const std::int64_t items = static_cast<std::int64_t>(args.rows.max) * args.v_heads;
  const unsigned blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  if (blocks > 0) launch_dependent(stream, dim3(blocks), kWarps * 32, 0, gate_kernel, args);
}

}  // namespace flashnext::cuda
