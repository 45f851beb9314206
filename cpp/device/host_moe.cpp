// route and combine (spec/model.md 5, spec/numerics.md 2).
//
// route, per row: l = router x, as `dense` has it; e[i] = exp(l[i] - max l); total = 32 partial
// sums (partial j adds e[j], e[j + 32], ... in ascending order), then partials j + (j + 16), + 8,
// + 4, + 2, + 1; p[i] = e[i] / total. The top_k best p, descending, lower id first on ties; forced
// ids take the place of that choice. normalise: weights are divided by their sum, taken in slot
// order.
#include "cpp/base/math.h"
#include "cpp/device/host_rows.h"

#include <algorithm>

namespace flashnext::host {

namespace {

constexpr std::int32_t kMaxExperts = 4096;
constexpr std::int32_t kMaxTopK = 64;
constexpr std::int32_t kPartials = 32;

// The top_k best of p (experts). NaN ranks below everything, so that ids stay valid; its weights
// are NaN and tell.
void choose(const float* p, std::int32_t experts, std::int32_t top_k, std::int32_t* ids) {
  float best[kMaxTopK];
  std::int32_t count = 0;
  for (std::int32_t i = 0; i < experts; ++i) {
    const float rank = p[i] == p[i] ? p[i] : -1.0f;
    if (count == top_k && !(rank > best[count - 1])) continue;
    std::int32_t at = count < top_k ? count++ : count - 1;
    for (; at > 0 && rank > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = rank;
    ids[at] = i;
  }
}

void route_row(const RouteArgs& args, const float* logits, const RowKernels& kernels,
               std::int64_t row) {
  const std::int32_t experts = args.router.out;
  float p[kMaxExperts];
  float top = logits[0];
  for (std::int32_t i = 1; i < experts; ++i) top = logits[i] > top ? logits[i] : top;
  kernels.exp_shifted(logits, top, p, experts);
  float sums[kPartials] = {};
  for (std::int32_t i = 0; i < experts; ++i) sums[i % kPartials] += p[i];
  for (std::int32_t half = kPartials / 2; half > 0; half /= 2) {
    for (std::int32_t j = 0; j < half; ++j) sums[j] = sums[j] + sums[j + half];
  }
  kernels.divide(p, sums[0], experts);

  std::int32_t* ids = args.ids + row * args.top_k;
  const std::int32_t* forced = args.forced != nullptr ? args.forced + row * args.top_k : nullptr;
  if (forced != nullptr && forced[0] >= 0) {
    for (std::int32_t k = 0; k < args.top_k; ++k) {
      check(forced[k] >= 0 && forced[k] < experts, "route: a forced id is no expert");
      ids[k] = forced[k];
    }
  } else {
    choose(p, experts, args.top_k, ids);
  }
  float sum = 1.0f;
  if (args.normalise != 0) {
    sum = 0.0f;
    for (std::int32_t k = 0; k < args.top_k; ++k) sum = sum + p[ids[k]];
  }
  for (std::int32_t k = 0; k < args.top_k; ++k) {
    args.weights[row * args.top_k + k] = math::div(p[ids[k]], sum);
  }
}

}  // namespace

// Workspace: logits (rows, experts).
std::size_t workspace_bytes(const RouteArgs& args, int) {
  return static_cast<std::size_t>(args.rows.max) * static_cast<std::size_t>(args.router.out) *
         sizeof(float);
}

void route(const RouteArgs& args, Context& context) {
  const std::int32_t experts = args.router.out;
  check(experts >= 1 && experts <= kMaxExperts, "route: number of experts");
  check(args.top_k >= 1 && args.top_k <= kMaxTopK && args.top_k <= experts, "route: top_k");
  check(args.shared_gate.out == 1, "route: the shared gate is one row");
  check(args.workspace.bytes >= workspace_bytes(args, 0), "route: workspace too small");
  const std::int32_t rows = checked_rows(args.rows, "route");
  float* logits = static_cast<float*>(args.workspace.data);
  const DenseWeight weights[] = {args.router, args.shared_gate};
  float* const y[] = {logits, args.gate};
  products(weights, y, 2, args.x, rows, context);
  const RowKernels& kernels = row_kernels(context.isa);
  context.pool.parallel_for(rows, grain_for(16 * std::int64_t{experts}),
                            [&](std::int64_t begin, std::int64_t end) {
                              for (std::int64_t r = begin; r < end; ++r) {
                                route_row(args, logits + r * experts, kernels, r);
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
