// Where the time of a step goes: the ops of the last step's program, one family at a time.
#include "cpp/model/engine.h"
#include "cpp/model/op_cost.h"

#include <algorithm>
#include <chrono>
#include <set>

namespace flashnext {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// Seconds of one run, the median of `repeats` measurements. Short runs are measured several at a
// time, so that the wait at the end does not count.
template <class Run>
double Engine::time_run(Run&& enqueue, int repeats) {
  const auto measure = [&](int runs) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < runs; ++i) enqueue();
    device_.synchronize(streams_.main());
    return seconds_since(start);
  };
  measure(1);  // warm
  const double once = std::max(measure(1), 1e-7);
  const int runs = std::clamp(static_cast<int>(2e-3 / once), 1, 50);
  std::vector<double> all;
  for (int i = 0; i < repeats; ++i) all.push_back(measure(runs) / runs);
  std::nth_element(all.begin(), all.begin() + repeats / 2, all.end());
  return all[static_cast<std::size_t>(repeats / 2)];
}

// Distinct experts that the route op chose, read back through the memory of the logits.
std::int32_t Engine::count_experts(const RouteArgs& route, std::int32_t rows) {
  const auto n = static_cast<std::size_t>(rows) * static_cast<std::size_t>(route.top_k);
  if (n * sizeof(std::int32_t) > logits_host_.bytes()) {
    return std::min(route.router.out, static_cast<std::int32_t>(n));
  }
  auto* ids = logits_host_.as<std::int32_t>();
  device_.copy_async(streams_.main(), ids, route.ids, n * sizeof(std::int32_t));
  device_.synchronize(streams_.main());
  return static_cast<std::int32_t>(std::set<std::int32_t>(ids, ids + n).size());
}

namespace {

// Runs that are no steps of the cache's, until the end of the scope.
class Suspended {
 public:
  Suspended(cache::ExpertCache* cache, StreamId main) : cache_(cache) {
    if (cache_ != nullptr) cache_->suspend(main);
  }
  ~Suspended() {
    if (cache_ != nullptr) cache_->resume();
  }
  Suspended(const Suspended&) = delete;
  Suspended& operator=(const Suspended&) = delete;

 private:
  cache::ExpertCache* cache_;
};

}  // namespace

StepProfile Engine::profile(int repeats) {
  check(last_ != nullptr, "profile needs a step before it");
  check(repeats >= 1, "profile needs at least one repeat");
  const Suspended suspended(cache_, streams_.main());
  for (std::int32_t slot = 0; slot < 2 * options_.lanes; ++slot) settle(slot);
  const Program& program = last_->trunk_program;
  const StepHead head = last_->buffer->head();
  StepSizes sizes{last_->step.head, head.rows, head.outputs,
                  std::span(last_->buffer->segments(), static_cast<std::size_t>(head.segments)), 0};
  StepProfile profile;
  profile.rows = head.rows;
  profile.seconds =
      time_run([&] { run(*last_, program, last_->trunk_graphs, head.rows); }, repeats);
  for (const Graph& graph : last_->trunk_graphs) profile.nodes += graph.nodes();

  // Op by op, to learn which experts each layer reads.
  std::uint64_t experts = 0, routes = 0;
  program.for_each_op([&](Op op, const void* args, std::size_t bytes) {
    device_.launch(streams_.main(), op, args, bytes);
    if (op == Op::kRoute) {
      sizes.experts = count_experts(*static_cast<const RouteArgs*>(args), head.rows);
      experts += static_cast<std::uint64_t>(sizes.experts);
      ++routes;
    }
    const std::string name = op_family(op, args, weights_.head.out);
    auto family = std::find_if(profile.families.begin(), profile.families.end(),
                               [&](const OpFamily& f) { return f.name == name; });
    if (family == profile.families.end()) {
      profile.families.push_back({name, 0, 0, 0, {}});
      family = profile.families.end() - 1;
    }
    ++family->launches;
    family->cost += op_cost(op, args, sizes);
  });
  device_.synchronize(streams_.main());
  if (routes > 0) profile.experts = static_cast<double>(experts) / static_cast<double>(routes);

  // All ops of a family behind each other in one graph: every layer's weights are read once a run,
  // as in a step, so that no cache makes them look cheap.
  for (OpFamily& family : profile.families) {
    Capture scope(device_, streams_.main());
    program.for_each_op([&](Op op, const void* args, std::size_t bytes) {
      if (op_family(op, args, weights_.head.out) != family.name) return;
      device_.launch(streams_.main(), op, args, bytes);
    });
    const Graph graph = scope.finish();
    family.seconds = time_run([&] { graph.replay(streams_.main()); }, repeats);
    family.nodes = graph.nodes();
  }
  for (std::int32_t l = 0; l < options_.lanes; ++l) reset(l);
  last_ = nullptr;
  return profile;
}

}  // namespace flashnext
