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
  const float* x = args.x + static_cast<std::size_t>(segment.row0) * channels + c;
  const float* old = args.window + segment.state_in * args.slot_stride + c;
  float* window = args.window + segment.state_out * args.slot_stride + c;
  for (int k = 0; k < args.depth; ++k) {
    const int from = k + segment.rows;
    float v = 0.0f;
    if (from >= args.depth) {
      v = x[static_cast<std::size_t>(from - args.depth) * channels];
    } else if (segment.pos0 != 0) {
      v = old[static_cast<std::size_t>(from) * channels];
    }
    window[static_cast<std::size_t>(k) * channels] = v;
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
