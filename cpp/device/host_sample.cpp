// sample: one token an output row.
#include "cpp/device/host_rows.h"
#include "cpp/sample/sample.h"

#include <algorithm>

namespace flashnext::host {

namespace {
// Rows that are worked on at a time, each with scratch of its own.
std::int32_t lanes(const SampleArgs& args, int threads) {
  return std::min(args.step.max_outputs, std::max(threads, 1));
}
}  // namespace

std::size_t workspace_bytes(const SampleArgs& args, int threads) {
  return static_cast<std::size_t>(lanes(args, threads)) * sample::scratch_bytes(args.limit);
}

void sample(const SampleArgs& args, Context& context) {
  const int threads = context.pool.threads();
  check(args.limit >= 1 && args.limit <= args.vocab, "sample: limit of the ids");
  check(args.workspace.bytes >= workspace_bytes(args, threads), "sample: workspace too small");
  const std::int32_t outputs = args.step.head->outputs;
  check(outputs >= 0 && outputs <= args.step.max_outputs,
        "sample: more outputs than the program was built for");
  const std::int32_t n = lanes(args, threads);
  auto* scratch = static_cast<std::byte*>(args.workspace.data);
  const auto stride = static_cast<std::int64_t>(sample::scratch_bytes(args.limit));
  context.pool.parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t lane = begin; lane < end; ++lane) {
      for (std::int64_t i = lane; i < outputs; i += n) {
        const SampleParams& p = args.step.sampling[i];
        args.tokens[i] =
            sample::draw(args.logits + i * args.vocab, args.limit,
                         {p.seed, p.temperature, p.top_p, p.min_p, p.top_k, p.position},
                         scratch + lane * stride);
      }
    }
  });
}

}  // namespace flashnext::host
