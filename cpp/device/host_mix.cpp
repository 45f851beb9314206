// mix and residual: the gated residual streams (spec/model.md 2).
#include "cpp/base/math.h"
#include "cpp/device/host_rows.h"

#include <algorithm>

namespace flashnext::host {

namespace {

// Channels and rows that share one pass over `up`.
constexpr std::int32_t kTile = 16;
constexpr std::int32_t kTileRows = 64;

// The pending update of a row, then its streams normed: n (streams * D).
void update_and_norm(const MixArgs& args, std::int32_t row, const RowKernels& kernels, float* n) {
  const std::int64_t stack = std::int64_t{args.num_streams} * args.dim;
  float* s = args.streams + (args.pick != nullptr ? args.pick[row] : row) * stack;
  for (std::int32_t h = 0; h < args.num_streams; ++h) {
    const std::int64_t at = std::int64_t{h} * args.dim;
    if (args.pending_y != nullptr) {
      kernels.add_scaled(s + at, args.pending_inj[std::int64_t{row} * args.num_streams + h],
                         args.pending_y + std::int64_t{row} * args.dim, args.dim);
    }
    kernels.norm(s + at, args.w.norm + at, args.eps, n + at, args.dim);
  }
}

// x (rows, D), channels [c, c + kTile): the mean over streams of sigmoid(up a) * n.
void gated_mean(const MixArgs& args, std::int32_t rows, std::int32_t c, const RowKernels& kernels,
                const float* a, const float* n) {
  const std::int64_t stack = std::int64_t{args.num_streams} * args.dim;
  float g[kTileRows * kTile];  // (rows of the tile, channels of the tile)
  for (std::int32_t r0 = 0; r0 < rows; r0 += kTileRows) {
    const std::int32_t count = std::min(kTileRows, rows - r0);
    for (std::int32_t h = 0; h < args.num_streams; ++h) {
      const std::int64_t at = std::int64_t{h} * args.dim + c;
      kernels.product(args.w.up + at * args.rank, args.rank, kTile,
                      a + std::int64_t{r0} * args.rank, args.rank, count, g, kTile);
      for (std::int32_t r = 0; r < count; ++r) {
        kernels.gate(g + r * kTile, n + (r0 + r) * stack + at, h > 0,
                     args.x + std::int64_t{r0 + r} * args.dim + c, kTile);
      }
    }
    for (std::int32_t r = r0; r < r0 + count; ++r) {
      kernels.divide(args.x + std::int64_t{r} * args.dim + c, static_cast<float>(args.num_streams),
                     kTile);
    }
  }
}

}  // namespace

// Workspace: n (rows, streams * D), then a (rows, rank).
std::size_t workspace_bytes(const MixArgs& args, int) {
  const std::size_t row =
      static_cast<std::size_t>(args.num_streams) * static_cast<std::size_t>(args.dim) +
      static_cast<std::size_t>(args.rank);
  return static_cast<std::size_t>(args.rows.max) * row * sizeof(float);
}

void mix(const MixArgs& args, Context& context) {
  check(args.dim % kTile == 0, "mix: the width of a stream must be a multiple of 16");
  check(args.pick == nullptr || args.pending_y == nullptr,
        "mix: picked rows and a pending update exclude each other");
  check((args.inj == nullptr) == (args.w.inject == nullptr),
        "mix: an output for the injection goes with its weight");
  check(args.workspace.bytes >= workspace_bytes(args, context.pool.threads()),
        "mix: workspace too small");
  const std::int32_t rows = checked_rows(args.rows, "mix");
  const RowKernels& kernels = row_kernels(context.isa);
  const std::int64_t stack = std::int64_t{args.num_streams} * args.dim;
  float* n = static_cast<float*>(args.workspace.data);
  float* a = n + args.rows.max * stack;

  context.pool.parallel_for(rows, grain_for(8 * stack), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      update_and_norm(args, static_cast<std::int32_t>(r), kernels, n + r * stack);
    }
  });

  const DenseWeight weights[2] = {
      {args.w.down, static_cast<std::int32_t>(stack), args.rank},
      {args.w.inject, static_cast<std::int32_t>(stack), args.num_streams}};
  float* const outputs[2] = {a, args.inj};
  products(weights, outputs, args.inj != nullptr ? 2 : 1, n, rows, context);

  const auto d = static_cast<float>(args.num_streams);
  kernels.silu_of_quotient(a, d, rows * args.rank);
  if (args.inj != nullptr) {
    for (std::int32_t i = 0; i < rows * args.num_streams; ++i) {
      args.inj[i] = 2.0f * math::sigmoid(args.inj[i] / d);
    }
  }

  const std::int64_t cost = std::int64_t{kTile} * args.num_streams * args.rank * rows;
  context.pool.parallel_for(
      args.dim / kTile, grain_for(cost), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
          gated_mean(args, rows, static_cast<std::int32_t>(t) * kTile, kernels, a, n);
        }
      });
}

void residual(const ResidualArgs& args, Context& context) {
  const std::int32_t rows = checked_rows(args.rows, "residual");
  const RowKernels& kernels = row_kernels(context.isa);
  const std::int64_t stack = std::int64_t{args.num_streams} * args.dim;
  context.pool.parallel_for(rows, grain_for(stack), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      for (std::int32_t h = 0; h < args.num_streams; ++h) {
        kernels.add_scaled(args.streams + r * stack + std::int64_t{h} * args.dim,
                           args.inj[r * args.num_streams + h], args.y + r * args.dim, args.dim);
      }
    }
  });
}

}  // namespace flashnext::host
