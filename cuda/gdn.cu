// Gated DeltaNet around the recurrence: products, convolution and window of many rows, a kernel
// each (few rows: gdn_few.cu), and the gated output norm. One warp owns 128 channels (one head),
// four a lane; sums over a head are butterflies of the warp.
#include "cuda/dependent.cuh"
#include "cuda/gdn.cuh"
#include "cuda/kernels.h"

namespace flashnext::cuda {
namespace {

using gdn::kHead;
using gdn::kTaps;
using gdn::load4;

constexpr int kWarps = 4;

// decay and beta of 32 value heads, a lane each, in place of the products.
__device__ __forceinline__ void gates(const GdnConvArgs& a, int head, int row0, int end) {
  if (head >= a.dims.v_heads) return;
  const float rate = a.rate[head];
  const float bias = a.dt_bias[head];
  for (int r = row0; r < end; ++r) {
    const std::int64_t at = static_cast<std::int64_t>(r) * a.dims.v_heads + head;
    a.decay[at] = gdn::decay_of(a.decay[at], rate, bias);
    a.beta[at] = math::sigmoid(a.beta[at]);
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
    const float4 y = gdn::conv_row(w, x, head, a.dims);
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
  let_next_start();
  wait_for_previous();
  if (item >= static_cast<std::int64_t>(rows) * a.v_heads) return;
  const std::int64_t at = item * kHead + 4 * lane;
  const float4 o = load4(a.o + at);
  const float4 z = load4(a.z + at);
  const float norm = math::rsqrt(fmaf(gdn::sum_of_squares(o), 1.0f / kHead, a.eps));
  auto gate = [&](float v) { return a.silu_gate != 0 ? math::silu(v) : math::sigmoid(v); };
  float4 y;
  y.x = o.x * norm * w.x * gate(z.x);
  y.y = o.y * norm * w.y * gate(z.y);
  y.z = o.z * norm * w.z * gate(z.z);
  y.w = o.w * norm * w.w * gate(z.w);
  *reinterpret_cast<float4*>(a.y + at) = y;
}

// a x and b x, left where the gates will be.
DenseArgs products_of(const GdnConvArgs& args) {
  DenseArgs dense{};
  dense.rows = {&args.step.head->rows, 1, args.step.max_rows};
  dense.x = args.x;
  dense.w[0] = args.a;
  dense.w[1] = args.b;
  dense.y[0] = args.decay;
  dense.y[1] = args.beta;
  dense.n = 2;
  dense.workspace = args.workspace;
  return dense;
}

}  // namespace

std::size_t workspace_bytes(const GdnConvArgs& args) {
  return gdn::is_few(args) ? 0 : workspace_bytes(products_of(args));
}

void gdn_conv(cudaStream_t stream, const GdnConvArgs& args) {
  gdn::check_dims(args.dims);
  check(args.dims.kernel == kTaps, "gdn_conv: the CUDA kernels are built for 4 taps");
  check(args.a.out == args.dims.v_heads && args.b.out == args.dims.v_heads,
        "gdn_conv: gates have one output a value head");
  check(args.a.in == args.b.in && args.a.in % 8 == 0,
        "gdn_conv: weights of the gates share `in`, a multiple of 8");
  if (args.step.max_rows <= 0) return;
  if (gdn::is_few(args)) return gdn::conv_few(stream, args);
  dense(stream, products_of(args));
  const int heads = 2 * args.dims.k_heads + args.dims.v_heads;
  const int warps = heads + (args.dims.v_heads + 31) / 32;
  const unsigned groups = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  // Long buckets share the taps and weights among 16 rows; the arithmetic of a row is the same.
  if (args.step.max_rows <= 64) {
    launch_dependent(stream, dim3(groups, static_cast<unsigned>(args.step.max_rows)), kWarps * 32,
                     0, conv_kernel<1>, args);
  } else {
    const unsigned tiles = static_cast<unsigned>((args.step.max_rows + 15) / 16);
    launch_dependent(stream, dim3(groups, tiles), kWarps * 32, 0, conv_kernel<16>, args);
  }
  window_push(stream, {args.step, args.u, std::int64_t{heads} * kHead, args.window,
                       args.dims.slot_stride, kTaps - 1, heads * kHead});
}

void gdn_gate(cudaStream_t stream, const GdnGateArgs& args) {
  check(args.v_heads > 0, "gdn_gate: no heads");
  const std::int64_t items = static_cast<std::int64_t>(args.rows.max) * args.v_heads;
  const unsigned blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  if (blocks > 0) launch_dependent(stream, dim3(blocks), kWarps * 32, 0, gate_kernel, args);
}

}  // namespace flashnext::cuda
