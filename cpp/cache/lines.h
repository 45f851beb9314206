// Lines: what the host knows of one layer's expert lines.
//
// Holds the very tables that kResolve reads and changes (ops.h), so that resolving a step's ids
// here gives what the device got: as the mirror of a cache, or alone in the replay of a trace. A
// line is free, filling (a copy into it is under way) or ready; its generation counts changes of
// its content, so that a LineId tells whether a line still holds what it held. Threads: one at a
// time.
#pragma once

#include "cpp/device/resolve.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flashnext::cache {

enum class LineState : std::uint8_t { kFree, kFilling, kReady };
const char* to_string(LineState state) noexcept;

struct LineId {
  std::int32_t line;
  std::uint32_t generation;
  bool operator==(const LineId&) const = default;
};

// Distinct experts of one layer in one step, as CacheCounters has them.
struct StepCounts {
  std::int32_t hits = 0, fetched = 0, installed = 0, on_cpu = 0;
  bool operator==(const StepCounts&) const = default;
};

class Lines {
 public:
  // All lines free, misses installed, no order, nothing for the processor. `what` names the layer
  // in errors.
  Lines(std::int32_t experts, std::int32_t lines, std::string what = "lines");

  std::int32_t num_experts() const noexcept { return static_cast<std::int32_t>(line_of_.size()); }
  std::int32_t num_lines() const noexcept { return static_cast<std::int32_t>(expert_of_.size()); }
  std::span<const std::int32_t> line_of() const noexcept { return line_of_; }      // (experts)
  std::span<const std::int32_t> expert_of() const noexcept { return expert_of_; }  // (lines)
  std::span<const std::int32_t> stamp() const noexcept { return stamp_; }          // (lines)
  std::span<const std::int32_t> seen() const noexcept { return seen_; }            // (experts)
  std::span<const std::int32_t> order() const noexcept { return order_; }          // (experts)
  bool installs() const noexcept { return rule_[0] != 0; }
  LineState state(std::int32_t line) const;
  LineId id(std::int32_t line) const { return {line, generation_.at(index(line))}; }
  bool holds(LineId id) const { return this->id(id.line) == id; }
  // The tables, as long as this object lives; what resolve() changes through them stays known here
  // only when it is called by resolve() below.
  CacheTables view() noexcept;

  // Lets `experts`, best first, be ready, and no expert have been seen; no line may be in use.
  // Those that are given up first, the last ones, get the lowest lines: expert i of n is in line n
  // - 1 - i.
  void fill(std::span<const std::int32_t> experts);

  // What the policy says: experts in the order in which they are given up, and whether misses are
  // installed.
  void set_order(std::span<const std::int32_t> evict);
  void set_install(bool on) noexcept { rule_[0] = on ? 1 : 0; }
  // Of m misses the processor takes cpu_of[m]: (max misses + 1), or empty for none.
  void set_cpu_share(std::span<const std::int32_t> cpu_of);
  // (experts) 0: only the processor reaches it; empty: all may be fetched.
  void set_reachable(std::span<const std::int32_t> reachable);

  // Applies the rule of resolution to the ids (rows, slots) of a step.
  StepCounts resolve(const std::int32_t* ids, std::int32_t rows, std::int32_t slots,
                     std::int32_t sequence);
  // The distinct experts of the last resolve(), until the next one.
  std::span<const Resolved> resolved() const noexcept { return {resolved_.data(), num_resolved_}; }

  // A promotion: takes the line that a miss would take, marks it filling and returns it; -1 when
  // the expert has a line or is on its way, or when no line can be given up. Lines that step
  // `sequence` used are spared (0: no step). The line's stamp becomes `sequence`: a promotion
  // counts as a use.
  std::int32_t begin_fill(std::int32_t expert, std::int32_t sequence);
  // The copy is done. False when a miss installed the expert meanwhile: the line is free then.
  bool finish_fill(std::int32_t line, std::int32_t expert);
  // The copy will not be done; the line is free.
  void abort_fill(std::int32_t line);
  std::int32_t num_filling() const noexcept { return num_filling_; }

  // Throws LogicError unless both maps agree, no expert is held or awaited twice, and the states
  // are consistent.
  void check_integrity() const;

 private:
  static std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }
  std::int32_t victim(std::int32_t sequence) const;
  [[noreturn]] void fail(const std::string& problem) const;

  std::string what_;
  std::vector<std::int32_t> line_of_;      // (experts)
  std::vector<std::int32_t> expert_of_;    // (lines)
  std::vector<std::int32_t> stamp_;        // (lines)
  std::vector<std::int32_t> seen_;         // (experts)
  std::vector<std::int32_t> order_;        // (experts)
  std::vector<std::int32_t> rule_;         // (1)
  std::vector<std::int32_t> cpu_of_;       // (max misses + 1) or empty
  std::vector<std::int32_t> reachable_;    // (experts) or empty
  std::vector<std::int32_t> filling_;      // (lines) expert that is on its way, or -1
  std::vector<std::uint32_t> generation_;  // (lines)
  std::vector<Resolved> resolved_;
  std::size_t num_resolved_ = 0;
  std::int32_t num_filling_ = 0;
};

}  // namespace flashnext::cache
