// route and combine (spec/model.md 5, spec/numerics.md 2).
//
// route, per row: e[i] = exp(l[i] - max l); total = 32 partial sums (partial j adds e[j], e[j +
// 32],
// ... in ascending order), then partials j + (j + 16), + 8, + 4, + 2, + 1; p[i] = e[i] / total. The
// top_k best p, descending, lower id first on ties. normalise: weights are divided by their sum,
// taken in slot order.
#include "cpp/base/math.h"
#include "cpp/device/host_rows.h"

#include <algorithm>

namespace flashnext::host {

namespace {

constexpr std::int32_t kMaxExperts = 4096;
constexpr std::int32_t kMaxTopK = 64;
constexpr std::int32_t kPartials = 32;

void route_row(const RouteArgs& args, const RowKernels& kernels, std::int64_t row) {
  const float* logits = args.logits + row * args.experts;
  float p[kMaxExperts];
  float top = logits[0];
  for (std::int32_t i = 1; i < args.experts; ++i) top = logits[i] > top ? logits[i] : top;
  kernels.exp_shifted(logits, top, p, args.experts);
  float sums[kPartials] = {};
  for (std::int32_t i = 0; i < args.experts; ++i) sums[i % kPartials] += p[i];
  for (std::int32_t half = kPartials / 2; half > 0; half /= 2) {
    for (std::int32_t j = 0; j < half; ++j) sums[j] = sums[j] + sums[j + half];
  }
  kernels.divide(p, sums[0], args.experts);

  // Insertion into the list of the best so far. NaN ranks below everything, so that ids stay valid;
  // its weights are NaN and tell.
  std::int32_t ids[kMaxTopK];
  float best[kMaxTopK];
  std::int32_t count = 0;
  for (std::int32_t i = 0; i < args.experts; ++i) {
    const float rank = p[i] == p[i] ? p[i] : -1.0f;
    if (count == args.top_k && !(rank > best[count - 1])) continue;
    std::int32_t at = count < args.top_k ? count++ : count - 1;
    for (; at > 0 && rank > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = rank;
    ids[at] = i;
  }
  float sum = 1.0f;
  if (args.normalise != 0) {
    sum = 0.0f;
    for (std::int32_t k = 0; k < count; ++k) sum = sum + p[ids[k]];
  }
  for (std::int32_t k = 0; k < count; ++k) {
    args.ids[row * args.top_k + k] = ids[k];
    args.weights[row * args.top_k + k] = math::div(p[ids[k]], sum);
  }
}

}  // namespace

void route(const RouteArgs& args, Context& context) {
  check(args.experts >= 1 && args.experts <= kMaxExperts, "route: number of experts");
  check(args.top_k >= 1 && args.top_k <= kMaxTopK && args.top_k <= args.experts, "route: top_k");
  const std::int32_t rows = checked_rows(args.rows, "route");
  const RowKernels& kernels = row_kernels(context.isa);
  context.pool.parallel_for(rows, grain_for(16 * std::int64_t{args.experts}),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t r = begin; r < end; ++r) {
                                route_row(args, kernels, r);
                              }
                            });
}

void combine(const CombineArgs& args, Context& context) {
  const std::int32_t rows = checked_rows(args.rows, "combine");
  const RowKernels& kernels = row_kernels(context.isa);
  const std::int64_t cost = std::int64_t{args.slots + 1} * args.dim;
  context.pool.parallel_for(rows, grain_for(cost), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      float* y = args.y + r * args.dim;
      std::fill(y, y + args.dim, 0.0f);
      for (std::int32_t s = 0; s < args.slots; ++s) {
        const std::int64_t slot = r * args.slots + s;
        kernels.add_fma(y, args.weights[slot], args.slot_y + slot * args.dim, args.dim);
      }
      kernels.add_fma(y, math::sigmoid(args.shared_gate[r]), args.shared_y + r * args.dim,
                      args.dim);
    }
  });
}

}  // namespace flashnext::host
