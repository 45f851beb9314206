// The rows of a step, as a pure function of what the sequences wait for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace flashnext {

// One sequence that has a lane.
struct Waiting {
  bool decoding = false;        // one row: its newest token
  std::int32_t left = 0;        // tokens of the prompt still to read, of one that does not decode
  std::int32_t until_mark = 0;  // where its part must end at the latest, 1..left
  bool every_logit = false;     // all its rows are outputs
};

struct StepBudget {
  std::int32_t rows = 0;         // of the step at most
  std::int32_t outputs = 0;      // rows whose logits may be asked for
  std::int32_t prompt_rows = 0;  // for prompts, while another sequence waits for its next token
};

struct StepShare {
  std::size_t sequence;  // index into what was given
  std::int32_t rows;
};

// Sequences in the order of arrival, at most budget.rows of them. Every decoding sequence gets its
// row. What is left goes to prompts: at least half of it to the one that came first, so that it
// ends, and then to those with the least left to read, so that short prompts do not wait for long
// ones. Sequences without rows are left out; empty when nothing waits.
std::vector<StepShare> plan_step(std::span<const Waiting> sequences, const StepBudget& budget);

}  // namespace flashnext
