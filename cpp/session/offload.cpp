#include "cpp/session/offload.h"

#include "cpp/cache/prefetch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace flashnext {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 6;  // measured a share, after one that warms it

// Seconds of a step of one row. Every call runs the same ids from the same start, so that the same
// experts miss: shares are compared on equal terms.
double step_seconds(Engine& engine) {
  engine.reset(0);
  std::uint32_t state = 1;
  double sum = 0;
  for (int i = 0; i <= kSteps; ++i) {
    state = state * 1664525u + 1013904223u;
    const std::int32_t limit = engine.options().token_limit;
    const auto id = static_cast<std::int32_t>((state >> 8) % static_cast<unsigned>(limit));
    if (engine.length(0) >= engine.options().window) engine.reset(0);
    check(engine.reserve(0, 1), "no page for a step of measurement");
    const LaneRows rows{0, {&id, 1}, LaneRows::Logits::kLast, {}};
    const Clock::time_point start = Clock::now();
    engine.step({&rows, 1}, false);
    if (i > 0) sum += std::chrono::duration<double>(Clock::now() - start).count();
  }
  return sum / kSteps;
}

// Measures whole steps for one session's choices.
class Trials {
 public:
  Trials(Engine& engine, const SessionOptions& options)
      : engine_(engine),
        cache_(*engine.cache()),
        misses_(cache::parse_cpu_misses(options.cpu_misses)),
        prefetch_(cache::parse_prefetch(options.prefetch)) {}

  ShareReport run() {
    engine_.reset(0);
    cache_.bypass(true);
    if (prefetch_.mode == cache::Prefetch::Mode::kCount) use_prefetch(prefetch_.lines);
    choose_share();
    if (prefetch_.mode == cache::Prefetch::Mode::kAuto && cache_.options().prefetch > 0) {
      choose_prefetch();
    }
    share(report_.share);
    cache_.bypass(false);
    engine_.reset(0);
    return std::move(report_);
  }

 private:
  void share(double share) {
    if (!cache_.has_cpu()) return;
    const std::int32_t all = cache_.max_misses();
    const bool counted = misses_.mode != cache::CpuMisses::Mode::kAuto;
    cache_.share_misses(counted ? cache::cpu_table(all, 1.0, misses_.most)
                                : cache::cpu_table(all, share, all));
  }

  void use_prefetch(std::int32_t lines) {
    engine_.use_prefetch(lines > 0);
    cache_.prefetch(lines);
    report_.prefetch = lines;
  }

  cache::ShareTrial measure(double of) {
    share(of);
    report_.trials.push_back({of, step_seconds(engine_), report_.prefetch});
    return report_.trials.back();
  }

  void choose_share() {
    if (!cache_.has_cpu()) return;
    if (misses_.mode != cache::CpuMisses::Mode::kAuto) {
      report_.most = misses_.most;
      return;
    }
    for (int eighths = 0; eighths <= 8; ++eighths) measure(eighths / 8.0);
    report_.share = cache::best_share(report_.trials);
    // A layer misses a handful of experts: half a step of the first search moves one more or less.
    if (const double found = report_.share; found > 0) {
      for (const double near : {found - 1.0 / 16, found + 1.0 / 16}) {
        if (near < 1) measure(near);
      }
      report_.share = cache::best_share(report_.trials);
    }
  }

  // What is copied ahead takes from the processor's part rather than from the link's.
  void choose_prefetch() {
    const cache::ShareTrial without = measure(report_.share);
    std::vector<cache::ShareTrial> ahead;
    for (std::int32_t lines = 1; lines <= cache_.options().prefetch; ++lines) {
      use_prefetch(lines);
      ahead.push_back(measure(without.share));
      if (report_.share > 1.0 / 8) ahead.push_back(measure(without.share - 1.0 / 8));
    }
    const cache::ShareTrial best = cache::best_prefetch(without, ahead);
    use_prefetch(best.prefetch);
    report_.share = best.share;
  }

  Engine& engine_;
  cache::ExpertCache& cache_;
  cache::CpuMisses misses_;
  cache::Prefetch prefetch_;
  ShareReport report_;
};

// Seconds of the trial, or 0 when there was none like it.
double seconds_of(const ShareReport& report, double share, std::int32_t prefetch) {
  for (auto t = report.trials.rbegin(); t != report.trials.rend(); ++t) {
    if (t->share == share && t->prefetch == prefetch) return t->seconds;
  }
  return 0;
}

}  // namespace

bool needs_cpu(const SessionOptions& options, const Bank& bank) {
  if (cache::parse_cpu_misses(options.cpu_misses).mode != cache::CpuMisses::Mode::kOff) return true;
  return std::any_of(bank.layers().begin(), bank.layers().end(), [](const Bank::Layer& layer) {
    return std::find(layer.pinned.begin(), layer.pinned.end(), 0) != layer.pinned.end();
  });
}

ShareReport choose_share(Engine& engine, const SessionOptions& options) {
  return Trials(engine, options).run();
}

std::string ShareReport::text() const {
  char line[160];
  if (most >= 0) {
    std::snprintf(line, sizeof line, "of a layer's misses the processor computes up to %d", most);
  } else if (trials.empty() || (share == 0 && prefetch > 0)) {
    return "misses are fetched, the processor computes none";
  } else {
    std::snprintf(line, sizeof line,
                  "the processor computes %.0f %% of the misses: %.2f ms a token against %.2f ms "
                  "with all fetched",
                  100 * share, 1e3 * seconds_of(*this, share, prefetch),
                  1e3 * trials.front().seconds);
  }
  return line;
}

std::string ShareReport::prefetch_text() const {
  if (prefetch == 0) return "none are copied ahead";
  char line[160];
  std::snprintf(line, sizeof line, "up to %d a layer are guessed and copied ahead", prefetch);
  std::string text = line;
  const double ahead = seconds_of(*this, share, prefetch);
  const double without = seconds_of(*this, share, 0);
  if (ahead > 0 && without > 0) {
    std::snprintf(line, sizeof line, ": %.2f ms a token against %.2f ms", 1e3 * ahead,
                  1e3 * without);
    text += line;
  }
  return text;
}

}  // namespace flashnext
