// Routing traces made up from a few numbers: skew (Zipf) and recency, tuned so that a cache of so
// many lines gets a wanted hit rate. What is measured on them says so.
#pragma once

#include "cpp/cache/trace.h"

#include <cstdint>

namespace flashnext::cache {

struct SyntheticTraceOptions {
  TraceHead head;
  std::int32_t steps = 256;
  std::int32_t rows = 1;    // a step
  double zipf = 0.6;        // exponent of the popularity of experts; 0: all alike
  double recency = 0.5;     // probability that a choice repeats one of the last `window` steps
  std::int32_t window = 8;  // steps
  std::uint64_t seed = 1;
};

// Every layer has its own order of popularity. A row's experts are distinct. Sequences 1..steps.
// InputError when an option is out of range.
Trace synthetic_trace(const SyntheticTraceOptions& options);

struct TunedTrace {
  Trace trace;
  double recency;   // that was found
  double hit_rate;  // of the recency policy over the steps after the first quarter
};

// Chooses `recency` such that the recency policy reaches `hit_rate` at `lines` lines. InputError
// naming what can be reached when that is more or less.
TunedTrace tuned_trace(SyntheticTraceOptions options, std::int32_t lines, double hit_rate);

}  // namespace flashnext::cache
