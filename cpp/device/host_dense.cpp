// dense: fp16 weights times fp32 rows.
#include "cpp/device/host_rows.h"

#include <algorithm>

namespace flashnext::host {

namespace {
constexpr std::int32_t kChunkOutputs = 16;
constexpr std::int32_t kChunkRows = 64;
}  // namespace

void products(const DenseWeight* w, float* const* y, std::int32_t n, const float* x,
              std::int32_t rows, Context& context) {
  if (rows == 0 || n == 0) return;
  const RowKernels& kernels = row_kernels(context.isa);
  const std::int32_t in = w[0].in;
  std::int64_t first[kMaxLinears + 1] = {};  // first chunk of each weight
  for (std::int32_t i = 0; i < n; ++i) {
    check(w[i].in == in, "dense: weights of one op must have equal `in`");
    first[i + 1] = first[i] + (w[i].out + kChunkOutputs - 1) / kChunkOutputs;
  }
  const std::int64_t row_chunks = (rows + kChunkRows - 1) / kChunkRows;
  const std::int64_t cost = std::int64_t{kChunkOutputs} * in * std::min(rows, kChunkRows);
  context.pool.parallel_for(
      first[n] * row_chunks, grain_for(cost), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t piece = begin; piece < end; ++piece) {
          const std::int64_t chunk = piece / row_chunks;
          const auto row = static_cast<std::int32_t>(piece % row_chunks) * kChunkRows;
          std::int32_t i = 0;
          while (chunk >= first[i + 1]) ++i;
          const auto out = static_cast<std::int32_t>(chunk - first[i]) * kChunkOutputs;
          kernels.product(w[i].w + std::int64_t{out} * in, in,
                          std::min(kChunkOutputs, w[i].out - out), x + std::int64_t{row} * in, in,
                          std::min(kChunkRows, rows - row),
                          y[i] + std::int64_t{row} * w[i].out + out, w[i].out);
        }
      });
}

void dense(const DenseArgs& args, Context& context) {
  check(args.n >= 1 && args.n <= kMaxLinears, "dense: number of weights");
  products(args.w, args.y, args.n, args.x, checked_rows(args.rows, "dense"), context);
}

std::size_t workspace_bytes(const DenseArgs&, int) { return 0; }

}  // namespace flashnext::host
