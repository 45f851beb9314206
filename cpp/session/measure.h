// One request timed step by step: a cold prompt in chunks, then one token a step, each fed back.
// This is what a bench asks of a Session; generate() is what a user asks.
#pragma once

#include "cpp/session/session.h"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace flashnext {

struct MeasureOptions {
  std::int32_t new_tokens = 32;  // decode steps after the first token
  std::int32_t chunk = 0;        // rows of a prefill step; 0: the session's
  bool graphs = true;            // false: every step op by op
  SampleParams sampling{};
  std::function<void()> poll;  // called between steps; may throw
};

struct RunTimes {
  std::vector<std::int64_t> chunk_ns;   // of each prefill step, on the caller's clock
  std::vector<std::int64_t> decode_ns;  // of each decode step: token in to token out
  std::vector<std::int32_t> tokens;     // drawn: the first by the prefill, then one a decode step
};

// Uses lane 0, which is empty afterwards unless `keep` is set. Throws InputError when prompt and
// tokens exceed the window, DeviceError when logits are not finite.
RunTimes measure_run(Session& session, std::span<const std::int32_t> prompt,
                     const MeasureOptions& options, bool keep = false);

}  // namespace flashnext
