#include "cpp/cache/planner.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>

namespace flashnext::cache {

namespace {

using Clock = std::chrono::steady_clock;

std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

std::string text(std::int64_t n) { return std::to_string(n); }

std::string milliseconds(double seconds) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%.1f ms", seconds * 1e3);
  return buffer;
}

// A list of experts of one layer: ids in range and none twice; empty when that holds.
std::string list_problem(const CacheShape& s, std::span<const std::int32_t> experts,
                         const std::string& where) {
  std::vector<bool> seen(index(s.experts), false);
  for (const std::int32_t expert : experts) {
    if (expert < 0 || expert >= s.experts) {
      return where + " names expert " + text(expert) + "; ids are 0 to " + text(s.experts - 1);
    }
    if (seen[index(expert)]) return where + " names expert " + text(expert) + " twice";
    seen[index(expert)] = true;
  }
  return {};
}

// Calls into code that is not ours; what it throws, in words, or nothing.
template <class Call>
std::optional<std::string> attempt(Call&& call) {
  try {
    call();
    return std::nullopt;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of an unknown kind";
  }
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

std::string PolicyFault::message() const {
  const std::string when =
      is_first_fill ? "at the first fill" : "before step " + text(sequence + 1);
  return "policy \"" + policy + "\" failed " + when + ": " + reason +
         "; recency took over for the rest of the run";
}

std::string plan_problem(const CacheShape& s, const PlanOutput& plan) {
  std::vector<bool> promoted(index(s.layers) * index(s.experts), false);
  std::vector<std::int32_t> count(index(s.layers), 0);
  for (std::size_t i = 0; i < plan.promote.size(); ++i) {
    const auto [layer, expert] = plan.promote[i];
    const std::string where = "promote[" + std::to_string(i) + "]";
    if (layer < 0 || layer >= s.layers) {
      return where + " names layer " + text(layer) + "; layers are 0 to " + text(s.layers - 1);
    }
    if (expert < 0 || expert >= s.experts) {
      return where + " names expert " + text(expert) + "; ids are 0 to " + text(s.experts - 1);
    }
    const std::string which = " expert " + text(expert) + " of layer " + text(layer);
    const std::size_t at = index(layer) * index(s.experts) + index(expert);
    if (promoted[at]) return where + " names" + which + " again";
    promoted[at] = true;
    if (++count[index(layer)] > s.lines) {
      return "promote has more experts of layer " + text(layer) + " than the " + text(s.lines) +
             " lines that a layer has";
    }
  }
  if (!plan.evict.empty() && plan.evict.size() != index(s.layers)) {
    return "evict has " + std::to_string(plan.evict.size()) + " lists; it must be empty or have " +
           text(s.layers) + ", one a layer";
  }
  for (std::size_t layer = 0; layer < plan.evict.size(); ++layer) {
    std::string problem =
        list_problem(s, plan.evict[layer], "evict[" + std::to_string(layer) + "]");
    if (!problem.empty()) return problem;
  }
  return {};
}

std::string initial_problem(const CacheShape& s,
                            const std::vector<std::vector<std::int32_t>>& initial) {
  if (initial.size() != index(s.layers)) {
    return "initial gave " + std::to_string(initial.size()) + " lists, expected " + text(s.layers) +
           ", one a layer";
  }
  for (std::size_t layer = 0; layer < initial.size(); ++layer) {
    std::string problem = list_problem(s, initial[layer], "initial[" + std::to_string(layer) + "]");
    if (!problem.empty()) return problem;
  }
  return {};
}

Planner::Planner(const CacheShape& shape, std::shared_ptr<Policy> policy,
                 std::span<const std::uint64_t> profile, PlannerOptions options)
    : shape_(shape),
      options_(options),
      policy_(std::move(policy)),
      profile_(profile.begin(), profile.end()) {
  check(shape.layers >= 1 && shape.experts >= 1 && shape.lines >= 0, "planner: no shape");
  const std::size_t size = index(shape.layers) * index(shape.experts);
  check(profile.empty() || profile.size() == size, "planner: a profile of another shape");
  if (policy_ == nullptr) {
    policy_ = make_policy("recency");
    is_default_ = true;
  }
  recent_.assign(size, 0);
  total_ = profile_;
  total_.resize(size, 0);
  last_.assign(size, 0);
  seen_.assign(index(shape.experts), false);
}

void Planner::replace(std::string reason, std::int32_t sequence, bool is_first_fill) {
  check(!is_default_, "planner: the default policy failed");
  std::string name;
  if (attempt([&] { name = policy_->name(); })) name = "without a name";
  fault_ = PolicyFault{std::move(name), std::move(reason), sequence, is_first_fill};
  policy_ = make_policy("recency");
  is_default_ = true;
}

void Planner::judge_time(double seconds, std::int32_t sequence) {
  plan_seconds_ += seconds;
  ++plans_;
  if (is_default_) return;
  slow_in_a_row_ = seconds > options_.plan_limit ? slow_in_a_row_ + 1 : 0;
  if (slow_in_a_row_ < 2 && seconds <= 10 * options_.plan_limit) return;
  replace("its plan took " + milliseconds(seconds) + ", and the limit is " +
              milliseconds(options_.plan_limit),
          sequence);
}

void Planner::forget() {
  std::fill(recent_.begin(), recent_.end(), 0u);
  std::fill(last_.begin(), last_.end(), 0);
  std::fill(total_.begin(), total_.end(), std::uint64_t{0});
  std::copy(profile_.begin(), profile_.end(), total_.begin());
}

std::vector<std::vector<std::int32_t>> Planner::initial() {
  std::vector<std::vector<std::int32_t>> out;
  std::optional<std::string> problem = attempt([&] { out = policy_->initial(shape_, profile_); });
  if (!problem) {
    std::string found = initial_problem(shape_, out);
    if (!found.empty()) problem = std::move(found);
  }
  if (problem) {
    replace(std::move(*problem), 0, true);
    out = policy_->initial(shape_, profile_);
  }
  for (std::vector<std::int32_t>& layer : out) {
    layer.resize(std::min(layer.size(), index(shape_.lines)));
  }
  return out;
}

void Planner::count(std::int32_t layer, std::span<const std::int32_t> experts,
                    std::int32_t sequence) {
  check(layer >= 0 && layer < shape_.layers, "planner: layer out of range");
  for (const std::int32_t expert : experts) {
    check(expert >= 0 && expert < shape_.experts, "planner: expert out of range");
    const std::size_t at = index(layer) * index(shape_.experts) + index(expert);
    ++recent_[at];
    ++total_[at];
    last_[at] = std::max(sequence, 1);  // a prompt before the first step is a use as well
  }
}

void Planner::count_choices(std::int32_t layer, std::span<const std::int32_t> ids,
                            std::int32_t sequence) {
  distinct_.clear();
  for (const std::int32_t expert : ids) {
    check(expert >= 0 && expert < shape_.experts, "planner: expert out of range");
    if (seen_[index(expert)]) continue;
    seen_[index(expert)] = true;
    distinct_.push_back(expert);
  }
  for (const std::int32_t expert : distinct_) seen_[index(expert)] = false;
  count(layer, distinct_, sequence);
}

PlanOutput Planner::next(std::int32_t sequence, std::span<const std::int32_t> expert_of) {
  check(expert_of.size() == index(shape_.layers) * index(shape_.lines),
        "planner: expert_of of another shape");
  const PolicyInput input{shape_, sequence, recent_, total_, last_, expert_of};
  PlanOutput out;
  const Clock::time_point start = Clock::now();
  std::optional<std::string> problem = attempt([&] { out = policy_->plan(input); });
  const double seconds = seconds_since(start);
  if (!problem) {
    std::string found = plan_problem(shape_, out);
    if (!found.empty()) problem = std::move(found);
  }
  if (problem) {
    replace(std::move(*problem), sequence);
    out = policy_->plan(input);
  } else {
    judge_time(seconds, sequence);
  }
  std::fill(recent_.begin(), recent_.end(), 0);
  return out;
}

std::vector<Promoting> apply_plan(const PlanOutput& plan, std::span<Lines> layers,
                                  std::int32_t sequence, std::int32_t max_promotions) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i].set_order(plan.evict.empty() ? std::span<const std::int32_t>{} : plan.evict[i]);
    layers[i].set_install(plan.install);
  }
  std::vector<Promoting> begun;
  for (const auto& [layer, expert] : plan.promote) {
    if (begun.size() >= index(std::max(max_promotions, 0))) break;
    const std::int32_t line = layers[index(layer)].begin_fill(expert, sequence);
    if (line >= 0) begun.push_back({layer, expert, line});
  }
  return begun;
}

}  // namespace flashnext::cache
