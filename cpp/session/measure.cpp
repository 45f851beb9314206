#include "cpp/session/measure.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace flashnext {
namespace {

using Clock = std::chrono::steady_clock;

// Runs the rows; drawn tokens, a lane each, go to `drawn`.
void timed_step(Engine& engine, std::span<const LaneRows> rows, std::vector<std::int64_t>& ns,
                std::vector<std::int32_t>& drawn) {
  const Clock::time_point start = Clock::now();
  for (const LaneRows& r : rows) {
    if (engine.reserve(r.lane, static_cast<std::int32_t>(r.tokens.size()))) continue;
    throw InputError("the KV pages of the session hold " +
                     std::to_string(engine.state().num_pages() * kPageTokens) +
                     " tokens, too few for this run of several lanes; open it with more kv_bytes");
  }
  const std::vector<StepOutput>& out = engine.step(rows, false);
  ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  for (const StepOutput& o : out) {
    if (o.token < 0) {
      throw DeviceError("the logits at position " + std::to_string(o.pos) + " are not finite");
    }
    drawn[static_cast<std::size_t>(o.lane)] = o.token;
  }
}

// Graphs on or off until the end of the scope.
class GraphChoice {
 public:
  GraphChoice(Engine& engine, bool on) : engine_(engine) { engine_.use_graphs(on); }
  ~GraphChoice() { engine_.use_graphs(true); }
  GraphChoice(const GraphChoice&) = delete;
  GraphChoice& operator=(const GraphChoice&) = delete;

 private:
  Engine& engine_;
};

// The routing of one step of many, until the end of the scope.
class Routing {
 public:
  Routing(Session& session, std::span<const std::int32_t> all) : engine_(session.engine()) {
    if (all.empty()) return;
    const ModelShape& s = session.shape();
    const std::size_t step = static_cast<std::size_t>(s.layers) * static_cast<std::size_t>(s.top_k);
    if (session.cache() == nullptr || !engine_.options().forced_routing) {
      throw InputError(
          "routing can be replayed only with experts in host memory and forced_routing = true");
    }
    const bool sound = std::all_of(all.begin(), all.end(),
                                   [&s](std::int32_t id) { return id >= 0 && id < s.experts; });
    if (all.size() % step != 0 || !sound) {
      throw InputError("routing must be (steps, layers, top_k) ids of experts of this model");
    }
    all_ = all;
    step_ = step;
  }
  ~Routing() {
    if (!all_.empty()) engine_.force_routing({}, 1);
  }
  Routing(const Routing&) = delete;
  Routing& operator=(const Routing&) = delete;
  std::size_t steps() const { return step_ == 0 ? 0 : all_.size() / step_; }
  void take(std::size_t i) {
    if (!all_.empty()) engine_.force_routing(all_.subspan(i % steps() * step_, step_), 1);
  }

 private:
  Engine& engine_;
  std::span<const std::int32_t> all_;
  std::size_t step_ = 0;
};

StepExperts expert_counts(const cache::ExpertCache* cache) {
  StepExperts sum;
  if (cache == nullptr) return sum;
  const cache::CacheTotals totals = cache->totals();
  sum.hits = totals.sum.hits;
  sum.fetched = totals.sum.fetched;
  sum.installed = totals.sum.installed;
  sum.on_cpu = totals.sum.on_cpu;
  sum.promoted = totals.sum.promoted;
  sum.fetched_bytes = totals.fetched_bytes;
  sum.cpu_bytes = totals.cpu_bytes;
  sum.fetch_ns = totals.sum.fetch_ns;
  sum.wait_ns = totals.sum.wait_ns;
  return sum;
}

StepExperts operator-(StepExperts a, const StepExperts& b) {
  a.hits -= b.hits;
  a.fetched -= b.fetched;
  a.installed -= b.installed;
  a.on_cpu -= b.on_cpu;
  a.promoted -= b.promoted;
  a.fetched_bytes -= b.fetched_bytes;
  a.cpu_bytes -= b.cpu_bytes;
  a.fetch_ns -= b.fetch_ns;
  a.wait_ns -= b.wait_ns;
  return a;
}

// Experts that have a line now: (sets, layers, top_k) of up to `sets` disjoint choices.
std::vector<std::int32_t> resident_routing(Session& session, std::int32_t sets) {
  cache::ExpertCache* cache = session.cache();
  if (cache == nullptr) throw InputError("the experts are resident: there are no lines to choose");
  const ModelShape& s = session.shape();
  std::vector<std::vector<std::int32_t>> resident(static_cast<std::size_t>(s.layers));
  std::size_t least = static_cast<std::size_t>(s.experts);
  for (std::int32_t l = 0; l < s.layers; ++l) {
    std::vector<std::int32_t>& mine = resident[static_cast<std::size_t>(l)];
    for (std::int32_t e = 0; e < s.experts; ++e) {
      if (cache->line_of(l, e) != nullptr) mine.push_back(e);
    }
    least = std::min(least, mine.size());
  }
  const auto k = static_cast<std::size_t>(s.top_k);
  if (least < k || sets < 1) throw InputError("a layer holds fewer experts than a token takes");
  const std::size_t n = std::min(static_cast<std::size_t>(sets), least / k);
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < n; ++i) {
    for (const std::vector<std::int32_t>& mine : resident) {
      ids.insert(ids.end(), mine.begin() + static_cast<std::ptrdiff_t>(i * k),
                 mine.begin() + static_cast<std::ptrdiff_t>((i + 1) * k));
    }
  }
  return ids;
}

std::uint64_t streamed(const Engine& engine) {
  return engine.stream() == nullptr ? 0 : engine.stream()->stats().bytes;
}

// The first lanes, which are all free while nothing runs.
std::vector<LaneLease> borrow_lanes(Engine& engine, std::int32_t count) {
  std::vector<LaneLease> leases;
  for (std::int32_t lane = 0; lane < count; ++lane) {
    std::optional<LaneLease> lease = engine.borrow();
    check(lease && lease->lane() == lane, "a lane is in use while nothing runs");
    leases.push_back(std::move(*lease));
  }
  return leases;
}

RunTimes measure_alone(Session& session, std::span<const std::int32_t> prompt,
                       const MeasureOptions& options) {
  Engine& engine = session.engine();
  const EngineOptions& limits = engine.options();
  const auto total = static_cast<std::int64_t>(prompt.size()) + options.new_tokens;
  if (prompt.empty() || options.new_tokens < 0 || total > limits.window) {
    throw InputError("a prompt of " + std::to_string(prompt.size()) + " tokens and " +
                     std::to_string(options.new_tokens) + " new ones: must be 1 to window = " +
                     std::to_string(limits.window) + " together");
  }
  if (options.lanes < 1 || options.lanes > limits.lanes) {
    throw InputError("lanes = " + std::to_string(options.lanes) + ": the session was opened for " +
                     std::to_string(limits.lanes));
  }
  if (options.lanes > 1 && (!options.routing.empty() || options.resident_sets > 0)) {
    throw InputError("lanes = " + std::to_string(options.lanes) +
                     ": experts can be chosen in place of the model for one lane alone");
  }
  if (options.chunk < 0 || options.chunk > limits.chunk) {
    throw InputError("chunk = " + std::to_string(options.chunk) + ": the session was opened for " +
                     std::to_string(limits.chunk) + " rows");
  }
  const auto chunk = static_cast<std::size_t>(options.chunk > 0 ? options.chunk : limits.chunk);
  session.scheduler().prefixes().clear();
  const std::vector<LaneLease> leases = borrow_lanes(engine, options.lanes);
  const GraphChoice choice(engine, options.graphs);
  RunTimes times;
  const std::uint64_t streamed_before = streamed(engine);
  const auto lanes = static_cast<std::size_t>(options.lanes);
  std::vector<std::int32_t> drawn(lanes, -1);
  for (std::int32_t lane = 0; lane < options.lanes; ++lane) {
    std::vector<std::int32_t> ids(prompt.begin(), prompt.end());
    const std::size_t first = static_cast<std::size_t>(lane) * ids.size() / lanes;
    std::rotate(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end());
    std::vector<std::int64_t> others;
    for (std::size_t at = 0; at < ids.size(); at += chunk) {
      if (options.poll) options.poll();
      const std::size_t n = std::min(chunk, ids.size() - at);
      const bool is_end = at + n == ids.size();
      const LaneRows rows{lane, std::span(ids).subspan(at, n),
                          is_end ? LaneRows::Logits::kLast : LaneRows::Logits::kNone,
                          options.sampling};
      timed_step(engine, {&rows, 1}, lane == 0 ? times.chunk_ns : others, drawn);
    }
  }
  times.streamed_bytes = streamed(engine) - streamed_before;
  times.tokens = drawn;
  std::vector<std::int32_t> resident;
  if (options.resident_sets > 0) resident = resident_routing(session, options.resident_sets);
  Routing routing(session, resident.empty() ? options.routing : std::span(resident));
  StepExperts before = expert_counts(session.cache());
  for (std::int32_t i = 0; i < options.new_tokens; ++i) {
    if (options.poll) options.poll();
    const auto at = static_cast<std::size_t>(i);
    std::vector<std::int32_t> fed = drawn;
    std::vector<LaneRows> rows;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      if (!options.feed.empty()) {
        fed[lane] = options.feed[(at * lanes + lane) % options.feed.size()];
      }
      rows.push_back({static_cast<std::int32_t>(lane), std::span(fed).subspan(lane, 1),
                      LaneRows::Logits::kLast, options.sampling});
    }
    routing.take(at);
    timed_step(engine, rows, times.decode_ns, drawn);
    times.tokens.insert(times.tokens.end(), drawn.begin(), drawn.end());
    if (session.cache() == nullptr) continue;
    const StepExperts after = expert_counts(session.cache());
    times.experts.push_back(after - before);
    before = after;
  }
  if (options.profile > 0) times.profile = engine.profile(options.profile);
  return times;
}

void warm_alone(Session& session, std::span<const std::int32_t> steps,
                const std::function<void()>& poll) {
  Engine& engine = session.engine();
  Routing routing(session, steps);
  session.scheduler().prefixes().clear();
  const std::vector<LaneLease> leases = borrow_lanes(engine, 1);
  std::vector<std::int64_t> unused;
  std::vector<std::int32_t> drawn(1);
  for (std::size_t i = 0; i < routing.steps(); ++i) {
    if (poll) poll();
    if (engine.length(0) >= engine.options().window) engine.reset(0);
    routing.take(i);
    const std::int32_t token = static_cast<std::int32_t>(i % 97) % engine.options().token_limit;
    const LaneRows rows{0, {&token, 1}, LaneRows::Logits::kNone, {}};
    timed_step(engine, {&rows, 1}, unused, drawn);
  }
}

// As a job of the engine's thread, unless the caller is one already.
void run_alone(Session& session, const std::function<void()>& job) {
  if (session.thread().is_this_thread()) return job();
  session.thread().run(EngineThread::When::kAlone, job);
}

}  // namespace

RunTimes measure_run(Session& session, std::span<const std::int32_t> prompt,
                     const MeasureOptions& options) {
  RunTimes times;
  run_alone(session, [&] { times = measure_alone(session, prompt, options); });
  return times;
}

void warm_cache(Session& session, std::span<const std::int32_t> steps,
                const std::function<void()>& poll) {
  run_alone(session, [&] { warm_alone(session, steps, poll); });
}

}  // namespace flashnext
