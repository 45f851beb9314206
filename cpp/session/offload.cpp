#include "cpp/session/offload.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace flashnext {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 3;  // measured a share, after one that warms it

// Seconds of a step of one row at a share of its misses; the least of a few, since what disturbs a
// step only makes it longer. Ids differ from step to step, so that experts do.
double step_seconds(Engine& engine, std::uint32_t& state) {
  double best = 1e30;
  for (int i = 0; i <= kSteps; ++i) {
    state = state * 1664525u + 1013904223u;
    const std::int32_t limit = engine.options().token_limit;
    const std::int32_t id = static_cast<std::int32_t>((state >> 8) % static_cast<unsigned>(limit));
    if (engine.length(0) >= engine.options().window || !engine.reserve(0, 1)) engine.reset(0);
    check(engine.reserve(0, 1), "no page for a step of measurement");
    const LaneRows rows{0, {&id, 1}, LaneRows::Logits::kLast, {}};
    const Clock::time_point start = Clock::now();
    engine.step({&rows, 1}, false);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (i > 0) best = std::min(best, seconds);
  }
  return best;
}

}  // namespace

bool needs_cpu(const SessionOptions& options, const Bank& bank) {
  if (cache::parse_cpu_misses(options.cpu_misses).mode != cache::CpuMisses::Mode::kOff) return true;
  return std::any_of(bank.layers().begin(), bank.layers().end(), [](const Bank::Layer& layer) {
    return std::find(layer.pinned.begin(), layer.pinned.end(), 0) != layer.pinned.end();
  });
}

ShareReport choose_share(Engine& engine, const SessionOptions& options) {
  ShareReport report;
  cache::ExpertCache& cache = *engine.cache();
  if (!cache.has_cpu()) return report;
  const cache::CpuMisses asked = cache::parse_cpu_misses(options.cpu_misses);
  const std::int32_t most = cache.max_misses();
  if (asked.mode != cache::CpuMisses::Mode::kAuto) {
    report.most = asked.most;
    cache.share_misses(cache::cpu_table(most, 1.0, report.most));
    return report;
  }
  engine.reset(0);
  cache.bypass(true);
  std::uint32_t state = 1;
  for (int eighths = 0; eighths <= 8; ++eighths) {
    const double share = eighths / 8.0;
    cache.share_misses(cache::cpu_table(most, share, most));
    report.trials.push_back({share, step_seconds(engine, state)});
  }
  report.share = cache::best_share(report.trials);
  cache.share_misses(cache::cpu_table(most, report.share, most));
  cache.bypass(false);
  engine.reset(0);
  return report;
}

std::string ShareReport::text() const {
  char line[160];
  if (most >= 0) {
    std::snprintf(line, sizeof line, "of a layer's misses the processor computes up to %d", most);
  } else if (trials.empty()) {
    return "misses are fetched, the processor computes none";
  } else {
    const auto at =
        std::find_if(trials.begin(), trials.end(), [&](const auto& t) { return t.share == share; });
    std::snprintf(line, sizeof line,
                  "the processor computes %.0f %% of the misses: %.2f ms a token against %.2f ms "
                  "with all fetched",
                  100 * share, 1e3 * (at == trials.end() ? 0.0 : at->seconds),
                  1e3 * trials.front().seconds);
  }
  return line;
}

}  // namespace flashnext
