// The n-gram layer's gate and convolution (spec/model.md 6.4).
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxTaps = 8;

// Block (row, stream).
__global__ void __launch_bounds__(kThreads) gate_kernel(const PleGateArgs args) {
  __shared__ float parts[4][kThreads / 32];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= rows_now(args.rows)) return;
  const int h = static_cast<int>(blockIdx.y);
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t which = static_cast<std::size_t>(row) * args.num_streams + h;
  const float* key = args.key + which * dim;
  const float* stream = args.streams + which * dim;
  const float* value = args.value + static_cast<std::size_t>(row) * dim;
  const float* norm_key = args.norm_key + static_cast<std::size_t>(h) * dim;
  const float* norm_query = args.norm_query + static_cast<std::size_t>(h) * dim;
  const float* norm_conv = args.norm_conv + static_cast<std::size_t>(h) * dim;
  const int tid = static_cast<int>(threadIdx.x);

  // Both norms are scalars times the row, so one pass gives all three sums.
  float key_squares = 0.0f;
  float stream_squares = 0.0f;
  float dot = 0.0f;
  for (int c = tid; c < args.dim; c += kThreads) {
    const float k = key[c];
    const float s = stream[c];
    key_squares += k * k;
    stream_squares += s * s;
    dot += (k * norm_key[c]) * (s * norm_query[c]);
  }
  const float count = static_cast<float>(args.dim);
  const float rk = math::rsqrt(block_sum(key_squares, parts[0]) / count + args.eps);
  const float rq = math::rsqrt(block_sum(stream_squares, parts[1]) / count + args.eps);
  const float s = math::div(block_sum(dot, parts[2]) * rk * rq, math::sqrt(count));
  const float size = fabsf(s);
  const float root = math::sqrt(size > 1e-6f ? size : 1e-6f);
  const float t = s > 0.0f ? root : s < 0.0f ? -root : s;  // sign(0) = 0; NaN stays
  const float gate = math::sigmoid(t);
  if (tid == 0) args.gate[which] = gate;
  float squares = 0.0f;
  for (int c = tid; c < args.dim; c += kThreads) {
    const float v = gate * value[c];
    squares += v * v;
  }
  const float r = math::rsqrt(block_sum(squares, parts[3]) / count + args.eps);
  float* m = args.m + which * dim;
  for (int c = tid; c < args.dim; c += kThreads) m[c] = gate * value[c] * r * norm_conv[c];
}

// A thread a channel of a row of the stack.
__global__ void __launch_bounds__(kThreads) conv_kernel(const PleConvArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.y);
  const int stack = args.num_streams * args.dim;
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= args.step.head->rows || c >= stack) return;
  const Segment segment = args.step.segments[args.step.rows[row].segment];
  const int depth = args.dilation * (args.kernel - 1);
  const float* window = args.window + segment.state_in * args.slot_stride + c;
  const float* m = args.m + static_cast<std::size_t>(segment.row0) * stack + c;
  const float* taps = args.conv + static_cast<std::size_t>(c) * args.kernel;
  float y = 0.0f;
  for (int i = 0; i < args.kernel; ++i) {
    const int at = row - segment.row0 - args.dilation * (args.kernel - 1 - i);
    float x = 0.0f;
    if (at >= 0) {
      x = m[static_cast<std::size_t>(at) * stack];
    } else if (segment.pos0 != 0) {
      x = window[static_cast<std::size_t>(depth + at) * stack];
    }
    y = y + taps[i] * x;
  }
  const int h = c / args.dim;
  const float gate = args.gate[row * args.num_streams + h];
  const float value = args.value[static_cast<std::size_t>(row) * args.dim + c % args.dim];
  float* s = args.streams + static_cast<std::size_t>(row) * stack + c;
  *s = *s + (gate * value + math::silu(y));
}

}  // namespace

void ple_gate(cudaStream_t stream, const PleGateArgs& args) {
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(args.rows.max), static_cast<unsigned>(args.num_streams));
  launch_pdl(stream, gate_kernel, grid, dim3(kThreads), 0, args);
}

void ple_conv(cudaStream_t stream, const PleConvArgs& args) {
  check(args.kernel >= 1 && args.kernel <= kMaxTaps, "ple_conv: number of taps");
  if (args.step.max_rows <= 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.num_streams * args.dim, kThreads)),
                  static_cast<unsigned>(args.step.max_rows));
  launch_pdl(stream, conv_kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace flashnext::cuda
