// window_push: the last rows of a segment become the state of a causal convolution.
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

// A thread a channel of a segment: it moves its column upwards, so state_in may be state_out.
__global__ void __launch_bounds__(128) window_push_kernel(const WindowPushArgs args) {
  pdl_trigger();
  pdl_wait();
  const int s = static_cast<int>(blockIdx.y);
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s >= args.step.head->segments || c >= args.channels) return;
  const Segment segment = args.step.segments[s];
  const std::size_t channels = static_cast<std::size_t>(args.channels);
  const float* x = args.x + segment.row0 * args.x_stride + c;
  const float* old = args.window + segment.state_in * args.slot_stride + c;
  float* window = args.window + segment.state_out * args.slot_stride + c;
  // Some rows at a time, all read before the first is written, so that the reads overlap.
  constexpr int kPart = 4;
  for (int first = 0; first < args.depth; first += kPart) {
    float v[kPart];
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int from = first + i + segment.rows;
      v[i] = 0.0f;
      if (first + i >= args.depth) continue;
      if (from >= args.depth) {
        v[i] = x[(from - args.depth) * args.x_stride];
      } else if (segment.pos0 != 0) {
        v[i] = old[static_cast<std::size_t>(from) * channels];
      }
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (first + i < args.depth) window[static_cast<std::size_t>(first + i) * channels] = v[i];
    }
  }
}

}  // namespace

void window_push(cudaStream_t stream, const WindowPushArgs& args) {
  if (args.step.max_segments <= 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div(args.channels, 128)),
                  static_cast<unsigned>(args.step.max_segments));
  launch_pdl(stream, window_push_kernel, grid, dim3(128), 0, args);
}

}  // namespace flashnext::cuda
