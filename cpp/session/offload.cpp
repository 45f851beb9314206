#include "cpp/session/offload.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>

namespace flashnext {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 8;   // measured a share, after one that warms it
constexpr int kPasses = 2;  // over them: what else the machine does delays a step now and then

// Seconds of a step of one row. Every call runs the same ids from the same start, so that the same
// experts miss: shares are compared on equal terms.
double step_seconds(Engine& engine) {
  double best[kSteps + 1];
  for (int pass = 0; pass < kPasses; ++pass) {
    const std::optional<LaneLease> lease = engine.borrow();
    check(lease.has_value(), "no lane is free while a session opens");
    const std::int32_t lane = lease->lane();
    std::uint32_t state = 1;
    for (int i = 0; i <= kSteps; ++i) {
      state = state * 1664525u + 1013904223u;
      const std::int32_t limit = engine.options().token_limit;
      const auto id = static_cast<std::int32_t>((state >> 8) % static_cast<unsigned>(limit));
      if (engine.length(lane) >= engine.options().window) engine.reset(lane);
      check(engine.reserve(lane, 1), "no page for a step of measurement");
      const LaneRows rows{lane, {&id, 1}, LaneRows::Logits::kLast, {}};
      const Clock::time_point start = Clock::now();
      engine.step({&rows, 1}, false);
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      best[i] = pass == 0 ? seconds : std::min(best[i], seconds);
    }
  }
  return std::accumulate(best + 1, best + kSteps + 1, 0.0) / kSteps;
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
  cache.bypass(true);
  const auto measure = [&](double share) {
    cache.share_misses(cache::cpu_table(most, share, most));
    report.trials.push_back({share, step_seconds(engine)});
  };
  for (int eighths = 0; eighths <= 8; ++eighths) measure(eighths / 8.0);
  report.share = cache::best_share(report.trials);
  // A layer misses a handful of experts: half a step of the first search moves one more or less.
  if (const double found = report.share; found > 0) {
    for (const double near : {found - 1.0 / 16, found + 1.0 / 16}) {
      if (near < 1) measure(near);
    }
    report.share = cache::best_share(report.trials);
  }
  cache.share_misses(cache::cpu_table(most, report.share, most));
  cache.bypass(false);
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
