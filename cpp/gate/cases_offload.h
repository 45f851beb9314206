// Cases of experts in host memory. Several steps follow each other on the same tables and the same
// mailbox; what a step leaves behind is compared after each.
#pragma once

#include "cpp/gate/case.h"

#include <vector>

namespace flashnext::gate {

// Where the ids of a resolve case come from.
enum class Ask { kHeld, kAbsent, kAny };

struct ResolveShape {
  std::int32_t rows, max_rows, slots, experts, lines;
  Ask ask = Ask::kAny;
  std::int32_t rule = 1;
  bool gaps = false;         // free and filling lines
  bool cpu = false;          // a share for the processor
  bool unreachable = false;  // every third expert
};
Case resolve_case(const ResolveShape& s);

// `count` lines out of a pinned bank, in a graph for twice as many.
Case fetch_case(std::int32_t count, std::int64_t line_bytes);

// Postings to a thread that plays the processor: of some experts, of none, of all, of one. `op`:
// which of the two ops the case is counted for.
Case mail_case(Op op, std::int32_t rows, std::int32_t slots, std::int32_t dim);
// Nobody answers: the first join gives up, then nothing is posted and nothing waits.
Case stall_case(std::int32_t rows, std::int32_t slots, std::int32_t dim);

// Only its neighbours can be compared: a clock shows another time on every run.
Case pace_case();

}  // namespace flashnext::gate
