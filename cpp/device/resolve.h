// The rule by which a step finds its experts: pure integer arithmetic on the tables of one layer.
// The host op kResolve, the cache's mirror on the host and the replay of traces call this very
// function, and the kernel computes the same, so that a count of hits means the same everywhere.
#pragma once

#include "cpp/device/ops.h"

#include <cstdint>

namespace flashnext {

// Where one distinct expert of a step is computed.
struct Resolved {
  std::int32_t expert;
  std::int32_t group;    // kGroupHit, kGroupFetched, kGroupCpu
  std::int32_t line;     // groups 0 and 1: its line, or -1 when it passes through staging
  std::int32_t staging;  // its staging line, or -1
};

// ids (rows, slots) -> out (at most rows * slots), in order of first appearance; returns how many.
//
// 1. A distinct expert with a line is a hit: its line's stamp becomes `sequence`.
// 2. Of the misses, those that are not reachable go to the processor; of the m others cpu_of[m]
//    too: those that were seen longest ago, of equals the last in order. What is asked for again
//    and again thus gets a line, though the processor takes most of the misses.
// 3. The rest is fetched, in order. Where rule[0] is 1 each takes the next victim: the lines that
//    this step does not use and that are not filling, by (free first, then the order of the expert
//    it holds, then its stamp, then its number). Tables and stamp follow. Without a victim, or
//    where rule[0] is 0, it takes the next staging line, from 0.
// 4. All of them have been seen at `sequence`.
std::int32_t resolve(const CacheTables& tables, const std::int32_t* ids, std::int32_t rows,
                     std::int32_t slots, std::int32_t sequence, Resolved* out);

// The members of an expert whose line begins at `line`.
constexpr ExpertRef expert_in_line(const LineLayout& layout, const std::byte* line) {
  ExpertRef ref{};
  for (int i = 0; i < 3; ++i) {
    ref.trellis[i] = line + layout.trellis[i];
    ref.suh[i] = line + layout.suh[i];
    ref.svh[i] = line + layout.svh[i];
  }
  return ref;
}

}  // namespace flashnext
