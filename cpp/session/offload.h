// The processor's share of the misses of a session with experts in host memory, measured by whole
// steps when it opens.
#pragma once

#include "cpp/cache/cpu_share.h"
#include "cpp/cache/expert_cache.h"
#include "cpp/model/engine.h"
#include "cpp/session/session.h"

#include <cstdint>
#include <string>
#include <vector>

namespace flashnext {

// Whether the cache needs workers: misses may go to the processor, or some can go nowhere else.
bool needs_cpu(const SessionOptions& options, const Bank& bank);

// What was tried and what was chosen.
struct ShareReport {
  std::vector<cache::ShareTrial> trials;  // empty: nothing was measured
  double share = 0;                       // chosen
  std::int32_t most = -1;    // misses of a layer and step, as asked for; -1: no such limit
  std::string text() const;  // a line for people
};

// Decides the share, by `options.cpu_misses`, and tells the cache. Runs steps in a borrowed lane
// and leaves the lines as they are.
ShareReport choose_share(Engine& engine, const SessionOptions& options);

}  // namespace flashnext
