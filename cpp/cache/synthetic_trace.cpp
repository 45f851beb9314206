#include "cpp/cache/synthetic_trace.h"

#include "cpp/base/errors.h"
#include "cpp/cache/order.h"
#include "cpp/cache/replay.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <numeric>
#include <utility>
#include <vector>

namespace flashnext::cache {

namespace {

constexpr int kTries = 64;       // draws of one choice before the most popular free expert is taken
constexpr int kHalvings = 14;    // of the interval in which recency is sought
constexpr double kClose = 0.02;  // a hit rate that far off was not reached

std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

// A stream of random numbers of one layer.
class Draws {
 public:
  Draws(std::uint64_t seed, std::int32_t layer)
      : stream_(mix64(seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(layer))) {}
  std::uint64_t bits() noexcept { return random_at(stream_, at_++); }
  double unit() noexcept { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  std::size_t below(std::size_t n) noexcept {
    return draw_below(bits(), static_cast<std::uint32_t>(n));
  }

 private:
  std::uint64_t stream_;
  std::uint64_t at_ = 0;
};

// The choices of one layer, step by step.
class Router {
 public:
  Router(const SyntheticTraceOptions& options, const std::vector<double>& popularity,
         std::int32_t layer)
      : o_(options), popularity_(popularity), draws_(options.seed, layer) {
    ranked_.resize(popularity.size());
    std::iota(ranked_.begin(), ranked_.end(), std::uint16_t{0});
    for (std::size_t i = ranked_.size(); i > 1; --i) {
      std::swap(ranked_[i - 1], ranked_[draws_.below(i)]);
    }
    taken_.assign(ranked_.size(), false);
  }

  // (rows, top_k)
  std::vector<std::uint16_t> step() {
    std::vector<std::uint16_t> ids;
    for (std::int32_t row = 0; row < o_.rows; ++row) {
      const std::size_t begin = ids.size();
      for (std::int32_t slot = 0; slot < o_.head.top_k; ++slot) ids.push_back(choose());
      for (std::size_t i = begin; i < ids.size(); ++i) taken_[ids[i]] = false;
    }
    recent_.push_back(ids);
    if (recent_.size() > index(o_.window)) recent_.pop_front();
    return ids;
  }

 private:
  std::uint16_t choose() {
    const bool repeat = draws_.unit() < o_.recency && !recent_.empty();
    for (int i = 0; i < kTries; ++i) {
      const std::uint16_t id = repeat ? recent_one() : popular_one();
      if (!taken_[id]) return take(id);
    }
    return take(*std::find_if(ranked_.begin(), ranked_.end(),
                              [this](std::uint16_t id) { return !taken_[id]; }));
  }
  std::uint16_t take(std::uint16_t id) {
    taken_[id] = true;
    return id;
  }
  std::uint16_t recent_one() {
    const std::vector<std::uint16_t>& step = recent_[draws_.below(recent_.size())];
    return step[draws_.below(step.size())];
  }
  std::uint16_t popular_one() {
    const double u = draws_.unit() * popularity_.back();
    const auto at = std::upper_bound(popularity_.begin(), popularity_.end() - 1, u);
    return ranked_[static_cast<std::size_t>(at - popularity_.begin())];
  }

  const SyntheticTraceOptions& o_;
  const std::vector<double>& popularity_;  // (experts) running sums by rank
  Draws draws_;
  std::vector<std::uint16_t> ranked_;  // (experts) by popularity
  std::vector<bool> taken_;            // (experts) by the row at hand
  std::deque<std::vector<std::uint16_t>> recent_;
};

double hits_after_warmup(const Trace& trace, std::int32_t lines) {
  const ReplayResult r = replay(trace, shape_of(trace.head, lines), nullptr);
  std::int64_t hits = 0, uses = 0;
  for (std::size_t i = r.steps.size() / 4; i < r.steps.size(); ++i) {
    hits += r.steps[i].counts.hits;
    uses += r.steps[i].counts.hits + r.steps[i].counts.fetched;
  }
  return uses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(uses);
}

std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * share);
  return text;
}

}  // namespace

Trace synthetic_trace(const SyntheticTraceOptions& o) {
  const TraceHead& h = o.head;
  if (h.layers < 1 || h.experts < 1 || h.experts > 65536 || h.top_k < 1 || h.top_k > h.experts) {
    throw InputError("a trace needs layers, 1 to 65536 experts and 1 to as many choices");
  }
  if (o.steps < 1 || o.rows < 1 || o.window < 1) {
    throw InputError("steps, rows and window of a trace are at least 1");
  }
  if (!(o.zipf >= 0 && o.zipf <= 8) || !(o.recency >= 0 && o.recency <= 1)) {
    throw InputError("zipf is 0 to 8 and recency 0 to 1");
  }
  std::vector<double> popularity;
  double sum = 0;
  for (std::int32_t rank = 1; rank <= h.experts; ++rank) {
    sum += std::pow(rank, -o.zipf);
    popularity.push_back(sum);
  }
  std::vector<Router> routers;
  routers.reserve(index(h.layers));
  for (std::int32_t layer = 0; layer < h.layers; ++layer)
    routers.emplace_back(o, popularity, layer);
  Trace trace;
  trace.head = h;
  std::vector<std::uint16_t> ids;
  for (std::int32_t sequence = 1; sequence <= o.steps; ++sequence) {
    ids.clear();
    for (Router& router : routers) {
      const std::vector<std::uint16_t> chosen = router.step();
      ids.insert(ids.end(), chosen.begin(), chosen.end());
    }
    trace.add(TraceKind::kStep, sequence, o.rows, 0, h.layers, ids);
  }
  return trace;
}

TunedTrace tuned_trace(SyntheticTraceOptions o, std::int32_t lines, double hit_rate) {
  const auto at = [&](double recency) {
    o.recency = recency;
    Trace trace = synthetic_trace(o);
    const double reached = hits_after_warmup(trace, lines);
    return TunedTrace{std::move(trace), recency, reached};
  };
  TunedTrace low = at(0), high = at(1);
  if (!(hit_rate >= low.hit_rate - kClose && hit_rate <= high.hit_rate + kClose)) {
    throw InputError("a hit rate of " + percent(hit_rate) + " at " + std::to_string(lines) +
                     " lines is out of reach: this skew gives " + percent(low.hit_rate) + " to " +
                     percent(high.hit_rate) + "; change zipf, window or lines");
  }
  TunedTrace best = hit_rate - low.hit_rate < high.hit_rate - hit_rate ? low : high;
  for (int i = 0; i < kHalvings; ++i) {
    TunedTrace middle = at((low.recency + high.recency) / 2);
    if (std::fabs(middle.hit_rate - hit_rate) < std::fabs(best.hit_rate - hit_rate)) best = middle;
    if (std::fabs(best.hit_rate - hit_rate) < 0.0005) break;
    (middle.hit_rate < hit_rate ? low : high) = std::move(middle);
  }
  return best;
}

}  // namespace flashnext::cache
