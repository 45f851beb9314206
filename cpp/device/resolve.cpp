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
  const auto is_reachable = [&](const Resolved& r) {
    return t.reachable == nullptr || t.reachable[r.expert] != 0;
  };
  const auto fetchable =
      static_cast<std::int32_t>(std::count_if(out, out + count, [&](const Resolved& r) {
        return r.group == kGroupFetched && is_reachable(r);
      }));
  const std::int32_t fetched =
      fetchable - (t.cpu_of != nullptr ? std::min(t.cpu_of[fetchable], fetchable) : 0);
  std::int32_t taken = 0, staging = 0;
  for (Resolved* r = out; r < out + count; ++r) {
    if (r->group != kGroupFetched) continue;
    if (!is_reachable(*r) || taken == fetched) {
      r->group = kGroupCpu;
      continue;
    }
    ++taken;
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
