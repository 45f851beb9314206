#include "cpp/cache/lines.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace flashnext::cache {

const char* to_string(LineState state) noexcept {
  switch (state) {
    case LineState::kFree:
      return "free";
    case LineState::kFilling:
      return "filling";
    case LineState::kReady:
      return "ready";
  }
  return "unknown";
}

Lines::Lines(std::int32_t experts, std::int32_t lines, std::string what)
    : what_(std::move(what)), rule_{1} {
  check(experts >= 1 && lines >= 0, "lines: a layer has at least one expert");
  line_of_.assign(index(experts), -1);
  seen_.assign(index(experts), 0);
  order_.assign(index(experts), kUnordered);
  expert_of_.assign(index(lines), kFreeLine);
  stamp_.assign(index(lines), 0);
  filling_.assign(index(lines), -1);
  generation_.assign(index(lines), 0);
}

void Lines::fail(const std::string& problem) const { throw LogicError(what_ + ": " + problem); }

LineState Lines::state(std::int32_t line) const {
  const std::int32_t expert = expert_of_.at(index(line));
  if (expert == kFreeLine) return LineState::kFree;
  return expert == kFillingLine ? LineState::kFilling : LineState::kReady;
}

CacheTables Lines::view() noexcept {
  CacheTables t{};
  t.line_of = line_of_.data();
  t.expert_of = expert_of_.data();
  t.stamp = stamp_.data();
  t.seen = seen_.data();
  t.order = order_.data();
  t.rule = rule_.data();
  t.cpu_of = cpu_of_.empty() ? nullptr : cpu_of_.data();
  t.reachable = reachable_.empty() ? nullptr : reachable_.data();
  t.experts = num_experts();
  t.lines = num_lines();
  return t;
}

void Lines::fill(std::span<const std::int32_t> experts) {
  if (num_filling_ > 0) fail("filled while a copy is under way");
  if (experts.size() > expert_of_.size()) fail("filled with more experts than lines");
  std::fill(line_of_.begin(), line_of_.end(), -1);
  std::fill(expert_of_.begin(), expert_of_.end(), kFreeLine);
  std::fill(stamp_.begin(), stamp_.end(), 0);
  std::fill(seen_.begin(), seen_.end(), 0);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::int32_t expert = experts[i];
    if (expert < 0 || expert >= num_experts()) fail("filled with an expert that does not exist");
    if (line_of_[index(expert)] >= 0) fail("filled with an expert twice");
    const std::size_t line = experts.size() - 1 - i;
    line_of_[index(expert)] = static_cast<std::int32_t>(line);
    expert_of_[line] = expert;
  }
  for (std::uint32_t& generation : generation_) ++generation;
}

void Lines::set_order(std::span<const std::int32_t> evict) {
  std::fill(order_.begin(), order_.end(), kUnordered);
  std::int32_t place = 0;
  for (const std::int32_t expert : evict) order_.at(index(expert)) = place++;
}

void Lines::set_cpu_share(std::span<const std::int32_t> cpu_of) {
  cpu_of_.assign(cpu_of.begin(), cpu_of.end());
}

void Lines::set_reachable(std::span<const std::int32_t> reachable) {
  if (!reachable.empty() && reachable.size() != line_of_.size()) fail("reachable has another size");
  reachable_.assign(reachable.begin(), reachable.end());
}

StepCounts Lines::resolve(const std::int32_t* ids, std::int32_t rows, std::int32_t slots,
                          std::int32_t sequence) {
  const std::size_t pairs = index(rows) * index(slots);
  if (!cpu_of_.empty() && cpu_of_.size() <= std::min(pairs, line_of_.size())) {
    fail("more misses than the processor's share is known for");
  }
  if (resolved_.size() < pairs) resolved_.resize(pairs);
  num_resolved_ = index(flashnext::resolve(view(), ids, rows, slots, sequence, resolved_.data()));
  StepCounts counts;
  for (const Resolved& r : resolved()) {
    counts.hits += r.group == kGroupHit;
    counts.on_cpu += r.group == kGroupCpu;
    if (r.group != kGroupFetched) continue;
    ++counts.fetched;
    if (r.line < 0) continue;
    ++counts.installed;
    ++generation_[index(r.line)];
  }
  return counts;
}

std::int32_t Lines::victim(std::int32_t sequence) const {
  // The order of resolve.h: free lines first, then by order, stamp and number.
  const auto key = [this](std::size_t line) {
    const std::int32_t expert = expert_of_[line];
    return expert == kFreeLine ? std::tuple(0, 0, 0)
                               : std::tuple(1, order_[index(expert)], stamp_[line]);
  };
  std::int32_t best = -1;
  for (std::size_t line = 0; line < expert_of_.size(); ++line) {
    if (expert_of_[line] == kFillingLine) continue;
    if (expert_of_[line] >= 0 && sequence > 0 && stamp_[line] == sequence) continue;
    if (best < 0 || key(line) < key(index(best))) best = static_cast<std::int32_t>(line);
  }
  return best;
}

std::int32_t Lines::begin_fill(std::int32_t expert, std::int32_t sequence) {
  if (expert < 0 || expert >= num_experts()) fail("promotion of an expert that does not exist");
  if (line_of_[index(expert)] >= 0) return -1;
  if (num_filling_ > 0 && std::find(filling_.begin(), filling_.end(), expert) != filling_.end()) {
    return -1;
  }
  const std::int32_t line = victim(sequence);
  if (line < 0) return -1;
  const std::int32_t old = std::exchange(expert_of_[index(line)], kFillingLine);
  if (old >= 0) line_of_[index(old)] = -1;
  filling_[index(line)] = expert;
  stamp_[index(line)] = sequence;
  ++generation_[index(line)];
  ++num_filling_;
  return line;
}

bool Lines::finish_fill(std::int32_t line, std::int32_t expert) {
  if (state(line) != LineState::kFilling || filling_[index(line)] != expert) {
    fail("line " + std::to_string(line) + " does not wait for expert " + std::to_string(expert));
  }
  if (line_of_[index(expert)] >= 0) {
    abort_fill(line);
    return false;
  }
  filling_[index(line)] = -1;
  --num_filling_;
  expert_of_[index(line)] = expert;
  line_of_[index(expert)] = line;
  ++generation_[index(line)];
  return true;
}

void Lines::abort_fill(std::int32_t line) {
  if (state(line) != LineState::kFilling) {
    fail("line " + std::to_string(line) + " waits for no expert");
  }
  filling_[index(line)] = -1;
  --num_filling_;
  expert_of_[index(line)] = kFreeLine;
  ++generation_[index(line)];
}

void Lines::check_integrity() const {
  std::vector<bool> awaited(line_of_.size(), false);
  std::int32_t filling = 0;
  std::int32_t ready = 0;
  for (std::int32_t line = 0; line < num_lines(); ++line) {
    const std::string where = "line " + std::to_string(line);
    const std::int32_t expert = expert_of_[index(line)];
    const std::int32_t next = filling_[index(line)];
    if (expert < kFillingLine || expert >= num_experts()) fail(where + " holds no expert's id");
    if ((expert == kFillingLine) != (next >= 0)) fail(where + " is filling with nothing");
    if (stamp_[index(line)] < 0) fail(where + " has a negative stamp");
    if (expert >= 0) {
      ++ready;
      if (line_of_[index(expert)] != line) {
        fail(where + " holds expert " + std::to_string(expert) + ", whose line is another");
      }
    }
    if (next < 0) continue;
    ++filling;
    if (next >= num_experts()) fail(where + " waits for no expert's id");
    if (awaited[index(next)]) fail("expert " + std::to_string(next) + " is awaited twice");
    awaited[index(next)] = true;
  }
  if (filling != num_filling_) fail("the number of filling lines is wrong");
  for (const std::int32_t line : line_of_) {
    if (line < -1 || line >= num_lines()) fail("an expert's line does not exist");
    ready -= line >= 0;
  }
  for (const std::int32_t seen : seen_) {
    if (seen < 0) fail("an expert was seen at a negative sequence");
  }
  // Every ready line is its expert's, so equal numbers leave no expert with a line of another.
  if (ready != 0) fail("an expert points to a line that does not hold it");
}

}  // namespace flashnext::cache
