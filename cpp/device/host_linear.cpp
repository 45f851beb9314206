// The op exl3_linear on the host: every row is prepared once for each linear (each has its own
// suh), then (linear, row group, output block) jobs share the pool.
#include "cpp/base/errors.h"
#include "cpp/device/host_ops.h"

#include <algorithm>

namespace flashnext::host {

namespace {
constexpr std::int32_t kBlock = 128;

std::int32_t groups_of(std::int32_t rows) { return (rows + exl3::kRowGroup - 1) / exl3::kRowGroup; }
}  // namespace

std::size_t workspace_bytes(const Exl3LinearArgs& args, int) {
  std::size_t bytes = 0;
  for (std::int32_t i = 0; i < args.n; ++i) {
    bytes += exl3::prepared_bytes(args.rows.max, args.w[i].in);
  }
  return bytes;
}

void exl3_linear(const Exl3LinearArgs& args, Context& context) {
  const std::int32_t rows = rows_of(args.rows);
  if (rows <= 0) return;
  check(args.n >= 1 && args.n <= kMaxLinears, "exl3_linear: number of linears");
  check(args.workspace.bytes >= workspace_bytes(args, 0), "exl3_linear: workspace too small");

  exl3::Prepared prepared[kMaxLinears];
  std::int64_t jobs_before[kMaxLinears + 1] = {};
  std::byte* memory = static_cast<std::byte*>(args.workspace.data);
  for (std::int32_t i = 0; i < args.n; ++i) {
    prepared[i] = exl3::place_prepared(memory, rows, args.w[i].in);
    memory += exl3::prepared_bytes(args.rows.max, args.w[i].in);
    const std::int64_t blocks = args.w[i].out / kBlock;
    jobs_before[i + 1] = jobs_before[i] + blocks * groups_of(rows);
  }

  context.pool.parallel_for(static_cast<std::int64_t>(args.n) * rows, rows > 64 ? 8 : 1,
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t job = begin; job < end; ++job) {
                                const std::int32_t i = static_cast<std::int32_t>(job / rows);
                                const std::int32_t row = static_cast<std::int32_t>(job % rows);
                                exl3::prepare(args.w[i], args.x, args.w[i].in, args.levels,
                                              context.isa, row, row + 1, prepared[i]);
                              }
                            });

  context.pool.parallel_for(jobs_before[args.n], 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      std::int32_t i = 0;
      while (job >= jobs_before[i + 1]) ++i;
      const Exl3Weight& w = args.w[i];
      const std::int64_t local = job - jobs_before[i];
      const std::int32_t blocks = w.out / kBlock;
      const std::int32_t block = static_cast<std::int32_t>(local % blocks);
      const std::int32_t row = static_cast<std::int32_t>(local / blocks) * exl3::kRowGroup;
      const std::int32_t count = std::min(exl3::kRowGroup, rows - row);
      exl3::multiply(w, exl3::rows_of(prepared[i], row, count), context.isa, block, block + 1,
                     args.y[i] + static_cast<std::int64_t>(row) * w.out, w.out);
    }
  });
}

}  // namespace flashnext::host
