// What a session counted, as dictionaries.
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

py::dict cache_dict(const Session& session, const CacheStats& cache) {
  py::dict d;
  py::list layers;
  for (const cache::LayerStats& s : cache.layers) layers.append(layer_dict(s));
  const cache::LayerStats& sum = cache.totals.sum;
  d["lines"] = cache.shape.lines;
  d["experts"] = cache.shape.experts;
  d["line_bytes"] = cache.shape.line_bytes;
  d["staging_lines"] = cache.staging_lines;
  d["sum"] = layer_dict(sum);
  const std::uint64_t wanted = sum.hits + sum.fetched + sum.on_cpu;
  d["hit_rate"] = wanted == 0 ? 0.0 : static_cast<double>(sum.hits) / static_cast<double>(wanted);
  d["fetched_bytes"] = cache.totals.fetched_bytes;
  d["promoted_bytes"] = cache.totals.promoted_bytes;
  d["cpu_bytes"] = cache.totals.cpu_bytes;
  d["streamed_bytes"] = cache.totals.streamed_bytes;
  d["recording"] = cache.recording;
  d["layers"] = layers;
  d["policy"] = cache.policy;
  d["plans"] = cache.plans;
  d["plan_seconds"] = cache.plan_seconds;
  d["fault"] = cache.fault;
  d["stall"] = cache.stall;
  if (cache.stream) {
    const cache::ExpertStream::Stats& s = *cache.stream;
    py::dict p;
    p["layers"] = s.layers;
    p["passes"] = s.passes;
    p["lines"] = s.lines;
    p["bytes"] = s.bytes;
    p["ahead"] = s.ahead;
    p["ahead_unused"] = s.ahead_unused;
    d["prompts"] = p;
  }
  if (cache.cpu) {
    py::dict p;
    p["threads"] = cache.cpu_threads;
    p["postings"] = cache.cpu->postings;
    p["experts"] = cache.cpu->experts;
    p["bytes"] = cache.cpu->bytes;
    p["busy_ns"] = cache.cpu->busy_ns;
    d["cpu"] = p;
  }
  d["cpu_of"] = cache.cpu_of;
  if (const ShareReport* share = session.cpu_share()) {
    py::list trials;
    for (const cache::ShareTrial& t : share->trials) {
      trials.append(py::make_tuple(t.share, t.seconds));
    }
    d["cpu_share"] = share->share;
    d["cpu_share_trials"] = trials;
    d["cpu_share_text"] = share->text();
  }
  const BankReport bank = held_by_system(session.bank()->report(), session.device());
  py::dict b;
  b["pinned_bytes"] = bank.pinned_bytes;
  b["pageable_bytes"] = bank.pageable_bytes;
  b["mapped_bytes"] = bank.mapped_bytes;
  b["fill_seconds"] = bank.fill_seconds;
  b["pin_seconds"] = bank.pin_seconds;
  d["bank"] = b;
  return d;
}

py::dict stats_dict(const Session& session) {
  const std::shared_ptr<const SessionStats> stats = session.stats();
  const Engine::Counters& e = stats->engine;
  const Scheduler::Counters& c = stats->scheduler;
  py::dict d;
  d["steps"] = e.steps;
  d["rows"] = e.rows;
  d["rewinds"] = e.rewinds;
  d["snapshots"] = e.snapshots;
  d["restores"] = e.restores;
  d["graphs"] = e.graphs;
  d["ops_per_step"] = e.ops_per_token;
  d["requests"] = c.requests;
  d["queued"] = c.queued;
  d["reading"] = c.reading;
  d["decoding"] = c.decoding;
  d["cancelled"] = c.cancelled;
  d["failed"] = c.failed;
  d["preempted"] = c.preempted;
  d["prompt_tokens"] = c.prompt_tokens;
  d["reused_tokens"] = c.reused_tokens;
  d["decode_tokens"] = c.new_tokens;
  d["prefill_seconds"] = c.prefill_seconds;
  d["decode_seconds"] = c.decode_seconds;
  d["longest_wait"] = c.longest_wait;
  d["remembered_prefixes"] = stats->prefixes;
  d["pages"] = stats->pages;
  d["pages_free"] = stats->pages_free;
  py::dict memory;
  const bool on_host = session.device().kind() == "host";  // which pins nothing
  for (const Allocated& a : session.memory()) {
    const Space space = on_host && a.space == Space::kPinned ? Space::kPageable : a.space;
    const auto key = py::str(std::string(to_string(space)) + ": " + a.what);
    memory[key] = (memory.contains(key) ? memory[key].cast<std::uint64_t>() : 0) + a.bytes;
  }
  d["memory"] = memory;
  d["device"] = session.device_description();
  if (stats->cache) d["cache"] = cache_dict(session, *stats->cache);
  return d;
}

}  // namespace flashnext::bind
