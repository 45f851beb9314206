// What the cache of experts did, as dictionaries.
#include "cpp/session/offload.h"
#include "python/bind/py_session.h"

namespace flashnext::bind {

namespace {

py::dict layer_dict(const cache::LayerStats& s) {
  py::dict d;
  d["steps"] = s.steps;
  d["hits"] = s.hits;
  d["fetched"] = s.fetched;
  d["installed"] = s.installed;
  d["on_cpu"] = s.on_cpu;
  d["fetch_ns"] = s.fetch_ns;
  d["wait_ns"] = s.wait_ns;
  d["promoted"] = s.promoted;
  d["streamed"] = s.streamed;
  return d;
}

}  // namespace

py::dict cache_stats(Session& session) {
  cache::ExpertCache& cache = *session.cache();
  py::dict d;
  py::list layers;
  for (const cache::LayerStats& s : cache.stats()) layers.append(layer_dict(s));
  const cache::CacheTotals totals = cache.totals();
  const cache::LayerStats& sum = totals.sum;
  d["lines"] = cache.shape().lines;
  d["experts"] = cache.shape().experts;
  d["line_bytes"] = cache.shape().line_bytes;
  d["staging_lines"] = cache.staging_lines();
  d["sum"] = layer_dict(sum);
  const std::uint64_t wanted = sum.hits + sum.fetched + sum.on_cpu;
  d["hit_rate"] = wanted == 0 ? 0.0 : static_cast<double>(sum.hits) / static_cast<double>(wanted);
  d["fetched_bytes"] = totals.fetched_bytes;
  d["promoted_bytes"] = totals.promoted_bytes;
  d["cpu_bytes"] = totals.cpu_bytes;
  d["streamed_bytes"] = totals.streamed_bytes;
  d["recording"] = session.recording();
  d["layers"] = layers;
  d["policy"] = cache.planner().policy_name();
  d["plans"] = cache.planner().plans();
  d["plan_seconds"] = cache.planner().plan_seconds();
  d["fault"] = cache.planner().fault() ? cache.planner().fault()->message() : std::string();
  d["stall"] = cache.stall();
  if (const cache::ExpertStream* stream = session.engine().stream()) {
    const cache::ExpertStream::Stats& s = stream->stats();
    py::dict p;
    p["layers"] = s.layers;
    p["passes"] = s.passes;
    p["lines"] = s.lines;
    p["bytes"] = s.bytes;
    p["ahead"] = s.ahead;
    p["ahead_unused"] = s.ahead_unused;
    d["prompts"] = p;
  }
  if (cache.has_cpu()) {
    const cache::CpuCounters c = cache.cpu()->counters();
    py::dict p;
    p["threads"] = cache.cpu()->threads();
    p["postings"] = c.postings;
    p["experts"] = c.experts;
    p["bytes"] = c.bytes;
    p["busy_ns"] = c.busy_ns;
    d["cpu"] = p;
  }
  d["cpu_of"] = std::vector<std::int32_t>(cache.cpu_of().begin(), cache.cpu_of().end());
  if (const ShareReport* share = session.cpu_share()) {
    py::list trials;
    for (const cache::ShareTrial& t : share->trials) {
      trials.append(py::make_tuple(t.share, t.seconds));
    }
    d["cpu_share"] = share->share;
    d["cpu_share_trials"] = trials;
    d["cpu_share_text"] = share->text();
  }
  const BankReport& bank = session.bank()->report();
  py::dict b;
  b["pinned_bytes"] = bank.pinned_bytes;
  b["pageable_bytes"] = bank.pageable_bytes;
  b["mapped_bytes"] = bank.mapped_bytes;
  b["fill_seconds"] = bank.fill_seconds;
  b["pin_seconds"] = bank.pin_seconds;
  d["bank"] = b;
  return d;
}

}  // namespace flashnext::bind
