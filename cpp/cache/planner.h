// Planner: the counters that a policy sees, and the policy itself, kept on a short leash.
//
// Counts the experts that steps use and asks the policy now and then for a plan. A policy that
// throws, that names layers or experts which do not exist, or that takes too long is replaced by
// recency for the rest of the run; fault() says why, and the run goes on. Threads: one at a time.
#pragma once

#include "cpp/cache/lines.h"
#include "cpp/cache/policy.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flashnext::cache {

struct PlannerOptions {
  // Seconds that a plan may take. A policy is too slow when two plans in a row took longer, or one
  // ten times as long: one hiccup of the machine is forgiven.
  double plan_limit = 0.05;
};

struct PolicyFault {
  std::string policy;
  std::string reason;
  std::int32_t sequence = 0;   // steps that had run
  bool is_first_fill = false;  // else of a plan; the first plan has sequence 0 as well
  // One sentence for notes and logs.
  std::string message() const;
};

class Planner {
 public:
  // `policy` null: recency. `profile` (layers, experts) uses of earlier runs, or empty.
  Planner(const CacheShape& shape, std::shared_ptr<Policy> policy,
          std::span<const std::uint64_t> profile = {}, PlannerOptions options = {});

  // What the lines hold at first: for every layer at most shape.lines experts, best first.
  std::vector<std::vector<std::int32_t>> initial();

  // A step used these distinct experts of a layer.
  void count(std::int32_t layer, std::span<const std::int32_t> experts, std::int32_t sequence);
  // The same from the choices (rows, slots) of a step, where experts repeat.
  void count_choices(std::int32_t layer, std::span<const std::int32_t> ids, std::int32_t sequence);

  // The plan after `sequence` steps; expert_of (layers, lines) is what lies in the lines. Uses
  // since the last plan count from 0 again.
  PlanOutput next(std::int32_t sequence, std::span<const std::int32_t> expert_of);

  // Counters start anew from the profile, as before the first step.
  void forget();

  const CacheShape& shape() const noexcept { return shape_; }
  // Of the policy that runs now, after a fault "recency".
  std::string policy_name() const { return policy_->name(); }
  const std::optional<PolicyFault>& fault() const noexcept { return fault_; }
  // (layers, experts) uses since the start on top of the profile's: the next profile.
  std::span<const std::uint64_t> total() const noexcept { return total_; }
  std::uint64_t plans() const noexcept { return plans_; }
  double plan_seconds() const noexcept { return plan_seconds_; }  // of all plans

 private:
  void replace(std::string reason, std::int32_t sequence, bool is_first_fill = false);
  void judge_time(double seconds, std::int32_t sequence);

  CacheShape shape_;
  PlannerOptions options_;
  std::shared_ptr<Policy> policy_;
  bool is_default_ = false;  // recency of ours: never replaced
  std::optional<PolicyFault> fault_;
  std::vector<std::uint64_t> profile_;  // (layers, experts) or empty
  std::vector<std::uint32_t> recent_;   // (layers, experts)
  std::vector<std::uint64_t> total_;    // (layers, experts)
  std::vector<std::int32_t> last_;      // (layers, experts)
  std::vector<bool> seen_;              // (experts) scratch
  std::vector<std::int32_t> distinct_;  // scratch
  int slow_in_a_row_ = 0;
  std::uint64_t plans_ = 0;
  double plan_seconds_ = 0;
};

// What is wrong with a plan or a first fill, in words; empty when nothing is.
std::string plan_problem(const CacheShape& shape, const PlanOutput& plan);
std::string initial_problem(const CacheShape& shape,
                            const std::vector<std::vector<std::int32_t>>& initial);

// A promotion that has begun: the expert is to be copied into the line.
struct Promoting {
  std::int32_t layer, expert, line;
};

// Puts a plan into force between two steps: order and rule of every layer, then its promotions,
// first ones first, until `max_promotions` have begun. Those of experts that have a line already,
// and those for which no line can be given up, are passed over. `sequence` steps have run.
std::vector<Promoting> apply_plan(const PlanOutput& plan, std::span<Lines> layers,
                                  std::int32_t sequence, std::int32_t max_promotions);

}  // namespace flashnext::cache
