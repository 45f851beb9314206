// ple_gate and ple_conv: the n-gram layer on the streams (spec/model.md 6.4).
#include "cpp/base/math.h"
#include "cpp/device/host_rows.h"

namespace flashnext::host {

namespace {

constexpr std::int32_t kMaxKernel = 16;

// sign(s) * sqrt(max(|s|, 1e-6)), 0 for 0.
float signed_root(float s) {
  if (s == 0.0f) return 0.0f;
  const float size = s < 0.0f ? -s : s;
  const float root = math::sqrt(size < 1e-6f ? 1e-6f : size);
  return s < 0.0f ? -root : root;
}

}  // namespace

void ple_gate(const PleGateArgs& args, Context& context) {
  check(args.dim % 16 == 0, "ple_gate: the width of a stream must be a multiple of 16");
  const std::int64_t n = std::int64_t{checked_rows(args.rows, "ple_gate")} * args.num_streams;
  const RowKernels& kernels = row_kernels(context.isa);
  const float root_dim = math::sqrt(static_cast<float>(args.dim));
  context.pool.parallel_for(
      n, grain_for(8 * std::int64_t{args.dim}), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t row = i / args.num_streams;
          const std::int64_t stream = i % args.num_streams * args.dim;
          const float* s = args.streams + i * args.dim;
          const float* key = args.key + i * args.dim;
          // kn lies in m for a moment, which gets its own value below.
          float* m = args.m + i * args.dim;
          kernels.norm(key, args.norm_key + stream, args.eps, m, args.dim);
          const float r = math::rsqrt(
              kernels.sum_squares(s, args.dim) / static_cast<float>(args.dim) + args.eps);
          const float dot = kernels.dot_scaled(m, s, r, args.norm_query + stream, args.dim);
          const float gate = math::sigmoid(signed_root(dot / root_dim));
          args.gate[i] = gate;
          kernels.scale(gate, args.value + row * args.dim, m, args.dim);
          kernels.norm(m, args.norm_conv + stream, args.eps, m, args.dim);
        }
      });
}

void ple_conv(const PleConvArgs& args, Context& context) {
  const std::int32_t stack = args.num_streams * args.dim;
  const std::int32_t depth = args.dilation * (args.kernel - 1);
  check(args.kernel >= 1 && args.kernel <= kMaxKernel, "ple_conv: taps of the convolution");
  const RowKernels& kernels = row_kernels(context.isa);
  const StepHead& head = *args.step.head;
  check(head.rows >= 0 && head.rows <= args.step.max_rows,
        "ple_conv: more rows than the program was built for");
  for (std::int32_t g = 0; g < head.segments; ++g) {
    const Segment& segment = args.step.segments[g];
    const float* window = args.window + segment.state_in * args.slot_stride;
    const std::int64_t cost = 32 * std::int64_t{stack};
    context.pool.parallel_for(
        segment.rows, grain_for(cost), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t j = begin; j < end; ++j) {
            const std::int64_t row = segment.row0 + j;
            // The rows under the taps, null before the sequence starts.
            const float* taps[kMaxKernel];
            for (std::int32_t h = 0; h < args.num_streams; ++h) {
              const std::int64_t at = std::int64_t{h} * args.dim;
              for (std::int32_t i = 0; i < args.kernel; ++i) {
                const std::int64_t source = j - args.dilation * (args.kernel - 1 - i);
                taps[i] = source >= 0        ? args.m + (segment.row0 + source) * stack + at
                          : segment.pos0 > 0 ? window + (depth + source) * stack + at
                                             : nullptr;
              }
              kernels.add_conv(args.conv + at * args.kernel, args.kernel, taps,
                               args.gate[row * args.num_streams + h], args.value + row * args.dim,
                               args.streams + row * stack + at, args.dim);
            }
          }
        });
  }
}

}  // namespace flashnext::host
