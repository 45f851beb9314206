#include "cpp/sched/prefix_cache.h"

#include <algorithm>

namespace flashnext {

const Snapshot* PrefixCache::find(std::span<const std::int32_t> ids) {
  auto best = entries_.end();
  for (auto e = entries_.begin(); e != entries_.end(); ++e) {
    if (e->ids.size() >= ids.size()) continue;
    if (best != entries_.end() && e->ids.size() <= best->ids.size()) continue;
    if (std::equal(e->ids.begin(), e->ids.end(), ids.begin())) best = e;
  }
  if (best == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, best);
  return &entries_.front();
}

void PrefixCache::keep(std::int32_t lane) {
  if (engine_.options().snapshots == 0 || engine_.length(lane) == 0) return;
  for (auto e = entries_.begin(); e != entries_.end(); ++e) {
    if (e->ids == engine_.ids(lane)) {
      entries_.splice(entries_.begin(), entries_, e);
      return;
    }
  }
  while (engine_.free_snapshots() == 0 && drop_oldest()) {
  }
  if (engine_.free_snapshots() == 0) return;  // somebody else holds them all
  entries_.push_front(engine_.snapshot(lane));
}

bool PrefixCache::drop_oldest() {
  if (entries_.empty()) return false;
  engine_.release(entries_.back());
  entries_.pop_back();
  return true;
}

void PrefixCache::clear() {
  while (drop_oldest()) {
  }
}

}  // namespace flashnext
