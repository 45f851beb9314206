// Policies: what shall lie in the lines of the device, and what goes first. A policy is a pure
// function from counters to a plan; it runs on the host before the first step and then between
// steps, every few of them, never inside one. Python subclasses come through
// python/bind/policy.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashnext::cache {

struct CacheShape {
  std::int32_t layers;   // with experts: the trunk's, then that of the MTP head when there is one
  std::int32_t experts;  // a layer
  std::int32_t top_k;
  std::int32_t lines;  // a layer: the budget
  std::int64_t line_bytes;
};

// What a policy sees. Uses count distinct experts a step (a step of eight rows that all pick one
// expert uses it once), of prompts and of single tokens alike.
struct PolicyInput {
  const CacheShape& shape;
  std::int32_t sequence;                    // steps so far, 0 before the first
  std::span<const std::uint32_t> recent;    // (layers, experts) uses since the plan before
  std::span<const std::uint64_t> total;     // (layers, experts) uses since the cache was filled, on
                                            // top of the profile's
  std::span<const std::int32_t> last;       // (layers, experts) sequence of the last use, 0: never
  std::span<const std::int32_t> expert_of;  // (layers, lines) expert that a line holds, or negative
};

struct Promotion {
  std::int32_t layer;
  std::int32_t expert;
};

struct PlanOutput {
  std::vector<Promotion> promote;  // copied to lines between steps, first ones first
  // A layer: experts in the order in which their lines are given up; the others follow, the longest
  // unused first. Empty, or (layers).
  std::vector<std::vector<std::int32_t>> evict;
  bool install = true;  // a miss takes a line; false: it passes through, lines change by promotion
};

class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string name() const = 0;
  // Experts that fill the lines at first, a layer, best first; at most shape.lines count. `profile`
  // (layers, experts) holds the uses of earlier runs, or is empty.
  virtual std::vector<std::vector<std::int32_t>> initial(
      const CacheShape& shape, std::span<const std::uint64_t> profile) = 0;
  virtual PlanOutput plan(const PolicyInput& input) = 0;
};

// "recency" (the default), "frequency", "static" or "random" (one of the oldest eighth, by `seed`).
// InputError for another name.
std::unique_ptr<Policy> make_policy(std::string_view name, std::uint64_t seed = 0);
// The names above, for messages.
std::vector<std::string> policy_names();

}  // namespace flashnext::cache
