// route against softmax and sort in double precision, its products against `dense`, and its bits
// over row counts, threads and instruction sets.
#include "cpp/base/errors.h"
#include "tests/cpp/host_op_case.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace flashnext {
namespace {

using test::Rng;
using test::same_bits;

std::size_t z(std::int64_t n) { return static_cast<std::size_t>(n); }

// Arguments whose parts lie in vectors.
struct RouteCase {
  std::int32_t rows, dim, experts, top_k, normalise;
  std::vector<float> x;                   // (rows, dim)
  std::vector<std::uint16_t> router;      // (experts, dim)
  std::vector<std::uint16_t> gate_w;      // (dim)
  std::vector<std::int32_t> forced = {};  // (rows, top_k) or empty
  std::vector<std::int32_t> ids = {};
  std::vector<float> weights = {}, gate = {};
  std::int32_t ticket = 0;

  // A step each of `step` rows.
  void run(host::Context& context, std::int32_t step = 0) {
    if (step == 0) step = rows;
    ids.assign(z(rows) * z(top_k), -1);
    weights.assign(ids.size(), NAN);
    gate.assign(z(rows), NAN);
    for (std::int32_t r = 0; r < rows; r += step) {
      const std::int32_t count = std::min(step, rows - r);
      RouteArgs a{};
      a.rows = {&count, 1, step};
      a.x = x.data() + r * dim;
      a.router = {router.data(), dim, experts};
      a.shared_gate = {gate_w.data(), dim, 1};
      a.forced = forced.empty() ? nullptr : forced.data() + r * top_k;
      a.ids = ids.data() + r * top_k;
      a.weights = weights.data() + r * top_k;
      a.gate = gate.data() + r;
      a.top_k = top_k;
      a.normalise = normalise;
      a.ticket = &ticket;
      std::vector<std::byte> workspace(host::workspace_bytes(a, context.pool.threads()));
      a.workspace = {workspace.data(), workspace.size()};
      host::route(a, context);
    }
  }
  // The formula: ids (those that are forced, or the best), weights and gates.
  void expect(std::vector<std::int32_t>& want_ids, std::vector<double>& want,
              std::vector<double>& want_gate) const {
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto product = [&](const std::uint16_t* w) {
        double sum = 0;
        for (std::int32_t k = 0; k < dim; ++k) sum += double{f16_to_f32(w[k])} * x[z(r * dim + k)];
        return sum;
      };
      std::vector<double> l(z(experts));
      for (std::int32_t e = 0; e < experts; ++e) l[z(e)] = product(router.data() + e * dim);
      want_gate.push_back(product(gate_w.data()));
      std::vector<std::int32_t> order(z(experts));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return l[z(a)] > l[z(b)]; });
      if (!forced.empty() && forced[z(r * top_k)] >= 0) {
        std::copy_n(forced.begin() + r * top_k, top_k, order.begin());
      }
      double total = 0;
      if (normalise != 0) {
        for (std::int32_t k = 0; k < top_k; ++k) total += std::exp(l[z(order[z(k)])]);
      } else {
        for (const double v : l) total += std::exp(v);
      }
      for (std::int32_t k = 0; k < top_k; ++k) {
        want_ids.push_back(order[z(k)]);
        want.push_back(std::exp(l[z(order[z(k)])]) / total);
      }
    }
  }
  // The formula in every context and every division into steps.
  void check() {
    std::vector<std::int32_t> want_ids;
    std::vector<double> want, want_gate;
    expect(want_ids, want, want_gate);
    std::vector<float> first;
    test::for_each_context([&](host::Context& context) {
      for (const std::int32_t step : {rows, 1, 7}) {
        run(context, step);
        EXPECT_EQ(ids, want_ids);
        test::expect_near(weights, want, 2e-6);
        test::expect_near(gate, want_gate, 1e-6);
        if (first.empty()) first = weights;
        EXPECT_TRUE(same_bits(weights, first));
        EXPECT_EQ(ticket, 0);
      }
    });
  }
};

// router x = x: the logits are what one writes into x.
RouteCase with_logits(std::vector<float> logits, std::int32_t experts, std::int32_t top_k,
                      std::int32_t normalise) {
  RouteCase c{static_cast<std::int32_t>(logits.size()) / experts,
              experts,
              experts,
              top_k,
              normalise,
              std::move(logits),
              std::vector<std::uint16_t>(z(experts * experts)),
              std::vector<std::uint16_t>(z(experts), f32_to_f16(0.5f))};
  for (std::int32_t e = 0; e < experts; ++e) c.router[z(e * experts + e)] = f32_to_f16(1.0f);
  return c;
}

class Route : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  std::vector<float> logits(std::int32_t rows) const {
    Rng rng(8);
    const std::int32_t experts = std::get<0>(GetParam());
    auto l = rng.floats(z(rows * experts), 2.0f);
    for (std::int32_t r = 0; r < rows; r += 2) {  // every other row full of ties
      for (std::int32_t i = 0; i < experts; ++i) {
        l[z(r * experts + i)] = static_cast<float>(rng.below(4));
      }
    }
    return l;
  }
};

TEST_P(Route, PicksTheBestWithTiesToTheLowerId) {
  const auto [experts, top_k] = GetParam();
  for (const std::int32_t normalise : {0, 1}) {
    with_logits(logits(15), experts, top_k, normalise).check();
  }
}

TEST_P(Route, ForcedExpertsKeepTheirOrderAndTheirProbabilities) {
  const auto [experts, top_k] = GetParam();
  for (const std::int32_t normalise : {0, 1}) {
    RouteCase c = with_logits(logits(15), experts, top_k, normalise);
    for (std::int32_t r = 0; r < c.rows; ++r) {
      for (std::int32_t k = 0; k < top_k; ++k) {
        c.forced.push_back(r % 3 == 1 ? -1 : (5 * r + 3 * k) % experts);
      }
    }
    c.check();
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Route,
                         testing::Values(std::tuple{512, 10}, std::tuple{32, 4}, std::tuple{9, 3},
                                         std::tuple{4, 4}));

TEST(RouteProducts, FollowTheFormulaAndDense) {
  Rng rng(9);
  RouteCase c{
      20, 256, 40, 6, 1, rng.floats(20 * 256), rng.halves(40 * 256, 0.1f), rng.halves(256, 0.1f)};
  c.check();
  ThreadPool pool(1);
  host::Context context{pool, exl3::best_isa()};
  c.run(context);
  std::vector<float> y(z(c.rows));
  DenseArgs dense{};
  dense.rows = {&c.rows, 1, c.rows};
  dense.x = c.x.data();
  dense.w[0] = {c.gate_w.data(), c.dim, 1};
  dense.y[0] = y.data();
  dense.n = 1;
  host::dense(dense, context);
  EXPECT_TRUE(same_bits(c.gate, y));
}

TEST(RouteProducts, IdsStayValidWhenLogitsAreNan) {
  ThreadPool pool(1);
  host::Context context{pool, exl3::best_isa()};
  RouteCase c = with_logits(std::vector<float>(32, NAN), 32, 4, 1);
  c.run(context);
  EXPECT_EQ(c.ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_TRUE(std::isnan(c.weights[0]));
}

TEST(RouteProducts, RefusesForcedIdsThatAreNoExperts) {
  ThreadPool pool(1);
  host::Context context{pool, exl3::best_isa()};
  for (const std::int32_t bad : {-1, 32}) {
    RouteCase c = with_logits(std::vector<float>(32, 1.0f), 32, 2, 1);
    c.forced = {3, bad};
    EXPECT_THROW(c.run(context), LogicError);
  }
}

}  // namespace
}  // namespace flashnext
