// Requests timed step by step: cold prompts in chunks, then one token a lane and step, each fed
// back. This is what a bench asks of a Session; generate() is what a user asks.
#pragma once

#include "cpp/session/session.h"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace flashnext {

struct MeasureOptions {
  std::int32_t new_tokens = 32;  // decode steps after the first token
  std::int32_t lanes = 1;        // requests; each begins the prompt at another place of it
  std::int32_t chunk = 0;        // rows of a prefill step; 0: the session's
  bool graphs = true;            // false: every step op by op
  SampleParams sampling{};
  std::function<void()> poll;  // called between steps; may throw
  // Ids of the decode steps in place of those that were drawn, lane by lane and in turn; empty:
  // each is fed back.
  std::span<const std::int32_t> feed;
  // Experts of the decode steps in place of the model's choice, (steps, layers, top_k) of the trunk
  // in turn; empty: its own. Needs SessionOptions::forced_routing, experts in host memory and one
  // lane.
  std::span<const std::int32_t> routing;
  // The same of experts that have a line when the prompt has run, in up to so many disjoint choices
  // in turn: steps that miss nothing. 0: off.
  std::int32_t resident_sets = 0;
  int profile = 0;  // > 0: repeats of the last step's profile
};

// What a step did with its experts, over all layers.
struct StepExperts {
  std::uint64_t hits = 0, fetched = 0, installed = 0, on_cpu = 0;  // distinct experts a layer
  std::uint64_t promoted = 0;                                      // copies that began before it
  std::uint64_t fetched_bytes = 0, cpu_bytes = 0;
  std::uint64_t fetch_ns = 0, wait_ns = 0;
};

struct RunTimes {
  std::vector<std::int64_t> chunk_ns;   // of each prefill step of lane 0, on the caller's clock
  std::vector<std::int64_t> decode_ns;  // of each decode step: token in to token out
  std::vector<std::int32_t> tokens;     // drawn, lane by lane: by the prefill, then a decode step
  std::vector<StepExperts> experts;     // of each decode step; empty when experts are resident
  std::uint64_t streamed_bytes = 0;     // copied for the prompt
  StepProfile profile;                  // with MeasureOptions::profile
};

// Runs when no request does, in lanes of its own; prefixes are forgotten. Throws InputError when
// prompt and tokens exceed the window, DeviceError when logits are not finite.
RunTimes measure_run(Session& session, std::span<const std::int32_t> prompt,
                     const MeasureOptions& options);

// Runs untimed steps of one row with this routing (steps, layers, top_k), so that the cache is as
// it would be in a long run.
void warm_cache(Session& session, std::span<const std::int32_t> routing,
                const std::function<void()>& poll = {});

}  // namespace flashnext
