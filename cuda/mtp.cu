// What enters the draft head (spec/model.md 7.1).
#include "cpp/base/math.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 256;

// Block (row, part): part 0 is the embedding, part 1 + h stream h of the trunk. One statistic over
// the stack is computed by each of its streams, in the same order.
__global__ void __launch_bounds__(kThreads) norm_kernel(const MtpNormArgs args) {
  __shared__ float parts[kThreads / 32];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= args.step.head->rows) return;
  const int part = static_cast<int>(blockIdx.y);
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const int tid = static_cast<int>(threadIdx.x);
  if (part == 0) {
    const std::uint16_t* from = reinterpret_cast<const std::uint16_t*>(args.table) +
                                static_cast<std::size_t>(args.step.rows[row].token) * dim;
    const auto value = [&](int c) {
      return __uint_as_float(static_cast<std::uint32_t>(from[c]) << 16);
    };
    float squares = 0.0f;
    for (int c = tid; c < args.dim; c += kThreads) squares += value(c) * value(c);
    const float r =
        math::rsqrt(block_sum(squares, parts) / static_cast<float>(args.dim) + args.eps);
    float* e = args.e + static_cast<std::size_t>(row) * dim;
    for (int c = tid; c < args.dim; c += kThreads) e[c] = value(c) * r * args.norm_embed[c];
    return;
  }
  const std::size_t stream = static_cast<std::size_t>(part - 1) * dim;
  const std::size_t stack = dim * static_cast<std::size_t>(args.num_streams);
  const float* hidden = args.hidden + static_cast<std::size_t>(row) * stack;
  const float* from = args.per_stream != 0 ? hidden + stream : hidden;
  const int n = args.per_stream != 0 ? args.dim : args.dim * args.num_streams;
  float squares = 0.0f;
  for (int c = tid; c < n; c += kThreads) squares += from[c] * from[c];
  const float r = math::rsqrt(block_sum(squares, parts) / static_cast<float>(n) + args.eps);
  float* h = args.h + static_cast<std::size_t>(row) * stack + stream;
  for (int c = tid; c < args.dim; c += kThreads) {
    h[c] = hidden[stream + c] * r * args.norm_hidden[stream + c];
  }
}

// Block (channels, row).
__global__ void __launch_bounds__(kThreads) join_kernel(const MtpJoinArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.y);
  const int stack = args.num_streams * args.dim;
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows_now(args.rows) || c >= stack) return;
  const std::size_t at = static_cast<std::size_t>(row) * stack + c;
  args.streams[at] = args.fh[at] + args.fe[static_cast<std::size_t>(row) * args.dim + c % args.dim];
}

}  // namespace

void mtp_norm(cudaStream_t stream, const MtpNormArgs& args) {
  if (args.step.max_rows <= 0) return;
  const dim3 grid(static_cast<unsigned>(args.step.max_rows),
                  static_cast<unsigned>(1 + args.num_streams));
  launch_pdl(stream, norm_kernel, grid, dim3(kThreads), 0, args);
}

void mtp_join(cudaStream_t stream, const MtpJoinArgs& args) {
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.num_streams * args.dim, kThreads)),
                  static_cast<unsigned>(args.rows.max));
  launch_pdl(stream, join_kernel, grid, dim3(kThreads), 0, args);
}

}  // namespace flashnext::cuda
