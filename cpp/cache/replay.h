// Replay: what a cache of so many lines would have done with a trace under a policy, on the host,
// with the code that the engine runs: Lines, Planner and apply_plan(). Its counts are those of an
// engine whose promotions land before the next step.
#pragma once

#include "cpp/cache/planner.h"
#include "cpp/cache/policy.h"
#include "cpp/cache/trace.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flashnext::cache {

struct ReplayOptions {
  // A plan is made before step s when s - 1 is a multiple of this.
  std::int32_t plan_every = 16;
  std::int32_t max_promotions = 32;    // a plan
  std::vector<std::uint64_t> profile;  // (layers, experts) or empty
  std::vector<std::int32_t> cpu_of;    // of m misses the processor takes so many; empty: none
  PlannerOptions planner;
};

struct LayerReplay {
  std::uint64_t hits = 0, fetched = 0, installed = 0, on_cpu = 0;  // distinct experts of steps
  std::uint64_t promoted = 0;
  std::uint64_t prompt_uses = 0, prompt_hits = 0;  // distinct experts of prompts' steps
};

struct StepReplay {
  std::int32_t sequence, rows;
  StepCounts counts;  // of all its layers
};

struct ReplayResult {
  std::vector<LayerReplay> layers;
  std::vector<StepReplay> steps;
  LayerReplay sum;
  std::uint64_t bytes = 0;  // fetched and promoted; prompts stream what they need beside
  std::string policy;       // that ran at the end
  std::optional<PolicyFault> fault;
  std::uint64_t plans = 0;
  double plan_seconds = 0;
  double hit_rate() const noexcept;  // of steps
};

// The shape of a cache for the model of a trace.
CacheShape shape_of(const TraceHead& head, std::int32_t lines);

// `policy` null: recency. Throws InputError when the trace is of another shape.
ReplayResult replay(const Trace& trace, const CacheShape& shape, std::shared_ptr<Policy> policy,
                    const ReplayOptions& options = {});

}  // namespace flashnext::cache
