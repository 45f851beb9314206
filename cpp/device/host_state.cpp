// embed and window_push: what enters a step and what it leaves behind.
#include "cpp/base/half.h"
#include "cpp/device/host_rows.h"

#include <algorithm>
#include <cstring>

namespace flashnext::host {

void embed(const EmbedArgs& args, Context& context) {
  const std::int32_t rows = args.step.head->rows;
  check(rows >= 0 && rows <= args.step.max_rows, "embed: more rows than the program was built for");
  for (std::int32_t r = 0; r < rows; ++r) check_token(args.step.rows[r].token, "embed", r);
  const std::int64_t stack = std::int64_t{args.num_streams} * args.dim;
  const auto width = static_cast<std::size_t>(args.dim) * sizeof(float);
  context.pool.parallel_for(rows, grain_for(stack), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* s = args.streams + r * stack;
      widen_bf16(args.table, args.step.rows[r].token, args.dim, s);
      for (std::int32_t h = 1; h < args.num_streams; ++h) {
        std::memcpy(s + std::int64_t{h} * args.dim, s, width);
      }
    }
  });
}

void window_push(const WindowPushArgs& args, Context&) {
  const auto row_bytes = static_cast<std::size_t>(args.channels) * sizeof(float);
  for (std::int32_t i = 0; i < args.step.head->segments; ++i) {
    const Segment& segment = args.step.segments[i];
    const float* x = args.x + segment.row0 * args.x_stride;
    const float* old = args.window + segment.state_in * args.slot_stride;
    float* window = args.window + segment.state_out * args.slot_stride;
    // Row k of the new window is row k + rows of (old window, x). Ascending k: the old rows that
    // are still needed lie above the one that is written, so the slots may be the same.
    for (std::int32_t k = 0; k < args.depth; ++k) {
      float* to = window + std::int64_t{k} * args.channels;
      const std::int32_t from = k + segment.rows;
      if (from >= args.depth) {
        std::memcpy(to, x + (from - args.depth) * args.x_stride, row_bytes);
      } else if (segment.pos0 == 0) {
        std::memset(to, 0, row_bytes);
      } else if (const float* source = old + std::int64_t{from} * args.channels; source != to) {
        std::memcpy(to, source, row_bytes);
      }
    }
  }
}

}  // namespace flashnext::host
