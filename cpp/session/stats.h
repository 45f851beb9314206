// What a session counted, as a value: copied by the engine's thread between steps, so that whoever
// reads it waits for nobody.
#pragma once

#include "cpp/bank/bank.h"
#include "cpp/cache/expert_cache.h"
#include "cpp/cache/stream.h"
#include "cpp/model/engine.h"
#include "cpp/sched/scheduler.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flashnext {

// Of experts in host memory.
struct CacheStats {
  cache::CacheShape shape{};
  std::int32_t staging_lines = 0;
  std::vector<cache::LayerStats> layers;
  cache::CacheTotals totals{};
  bool recording = false;
  std::string policy, fault, stall;
  std::uint64_t plans = 0;
  double plan_seconds = 0;
  std::vector<std::int32_t> cpu_of;
  std::optional<cache::ExpertStream::Stats> stream;
  std::optional<cache::CpuCounters> cpu;
  std::int32_t cpu_threads = 0;
};

struct SessionStats {
  Engine::Counters engine{};
  Scheduler::Counters scheduler{};
  std::size_t prefixes = 0;  // remembered
  std::int32_t pages = 0, pages_free = 0;
  std::vector<std::string> notes;
  std::optional<CacheStats> cache;
};

}  // namespace flashnext
