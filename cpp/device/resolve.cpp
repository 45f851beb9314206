#include "cpp/device/resolve.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <array>

namespace flashnext {

namespace {

// Smaller goes first.
std::array<std::int32_t, 4> victim_key(const CacheTables& t, std::int32_t line) {
  const std::int32_t expert = t.expert_of[line];
  if (expert == kFreeLine) return {0, 0, 0, line};
  return {1, t.order[expert], t.stamp[line], line};
}

// The line to be given up, or -1.
std::int32_t next_victim(const CacheTables& t, std::int32_t sequence) {
  std::int32_t best = -1;
  for (std::int32_t line = 0; line < t.lines; ++line) {
    const bool is_free = t.expert_of[line] == kFreeLine;
    if (t.expert_of[line] == kFillingLine || (!is_free && t.stamp[line] == sequence)) continue;
    if (best < 0 || victim_key(t, line) < victim_key(t, best)) best = line;
  }
  return best;
}

void install(const CacheTables& t, std::int32_t expert, std::int32_t line, std::int32_t sequence) {
  if (t.expert_of[line] != kFreeLine) t.line_of[t.expert_of[line]] = -1;
  t.expert_of[line] = expert;
  t.line_of[expert] = line;
  t.stamp[line] = sequence;
}

// Of the reachable misses, the one that the processor takes next: seen longest ago, then the last.
Resolved* next_for_cpu(const CacheTables& t, Resolved* begin, Resolved* end) {
  Resolved* best = nullptr;
  for (Resolved* r = begin; r < end; ++r) {
    if (r->group != kGroupFetched) continue;
    if (best == nullptr || t.seen[r->expert] <= t.seen[best->expert]) best = r;
  }
  return best;
}

}  // namespace

std::int32_t resolve(const CacheTables& t, const std::int32_t* ids, std::int32_t rows,
                     std::int32_t slots, std::int32_t sequence, Resolved* out) {
  std::int32_t count = 0;
  for (std::int32_t i = 0; i < rows * slots; ++i) {
    const std::int32_t expert = ids[i];
    check(expert >= 0 && expert < t.experts, "resolve: expert id out of range");
    const bool seen =
        std::any_of(out, out + count, [expert](const Resolved& r) { return r.expert == expert; });
    if (seen) continue;
    const std::int32_t line = t.line_of[expert];
    if (line >= 0) t.stamp[line] = sequence;
    out[count++] = {expert, line >= 0 ? kGroupHit : kGroupFetched, line, -1};
  }
  std::int32_t fetchable = 0;
  for (Resolved* r = out; r < out + count; ++r) {
    if (r->group != kGroupFetched) continue;
    if (t.reachable != nullptr && t.reachable[r->expert] == 0) {
      r->group = kGroupCpu;
    } else {
      ++fetchable;
    }
  }
  const std::int32_t to_cpu = t.cpu_of != nullptr ? std::min(t.cpu_of[fetchable], fetchable) : 0;
  for (std::int32_t i = 0; i < to_cpu; ++i) next_for_cpu(t, out, out + count)->group = kGroupCpu;
  std::int32_t staging = 0;
  for (Resolved* r = out; r < out + count; ++r) {
    t.seen[r->expert] = sequence;
    if (r->group != kGroupFetched) continue;
    if (t.rule[0] != 0) r->line = next_victim(t, sequence);
    if (r->line >= 0) {
      install(t, r->expert, r->line, sequence);
    } else {
      r->staging = staging++;
    }
  }
  return count;
}

}  // namespace flashnext
