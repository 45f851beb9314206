#include "cpp/sched/prefix_cache.h"

#include <algorithm>
#include <iterator>

namespace flashnext {

namespace {

bool begins(const Snapshot& s, std::span<const std::int32_t> ids) {
  return s.ids.size() <= ids.size() && std::equal(s.ids.begin(), s.ids.end(), ids.begin());
}

}  // namespace

const Snapshot* PrefixCache::find(std::span<const std::int32_t> ids) {
  if (ids.empty()) return nullptr;
  const auto usable = ids.first(ids.size() - 1);
  auto best = entries_.end();
  for (auto e = entries_.begin(); e != entries_.end();) {
    const auto at = e++;
    if (!begins(at->snapshot, usable)) continue;
    if (best == entries_.end() || at->snapshot.ids.size() > best->snapshot.ids.size()) best = at;
    if (at->shared) entries_.splice(entries_.begin(), entries_, at);
  }
  if (best == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, best);
  return &entries_.front().snapshot;
}

std::int32_t PrefixCache::length_of(std::span<const std::int32_t> ids) const {
  std::size_t longest = 0;
  for (const Entry& e : entries_) {
    if (e.snapshot.ids.size() > longest && e.snapshot.ids.size() < ids.size() &&
        begins(e.snapshot, ids)) {
      longest = e.snapshot.ids.size();
    }
  }
  return static_cast<std::int32_t>(longest);
}

void PrefixCache::keep(std::int32_t lane, bool shared) {
  if (engine_.options().snapshots == 0 || engine_.length(lane) == 0) return;
  for (auto e = entries_.begin(); e != entries_.end(); ++e) {
    if (e->snapshot.ids == engine_.ids(lane)) {
      e->shared = e->shared || shared;
      entries_.splice(entries_.begin(), entries_, e);
      return;
    }
  }
  while (engine_.free_snapshots() == 0 && drop_oldest()) {
  }
  if (engine_.free_snapshots() == 0) return;  // somebody else holds them all
  entries_.push_front({engine_.snapshot(lane), shared});
}

bool PrefixCache::drop_oldest() {
  if (entries_.empty()) return false;
  const auto shared =
      std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.shared; });
  auto victim = std::prev(entries_.end());
  if (2 * static_cast<std::size_t>(shared) <= entries_.size()) {
    const auto own =
        std::find_if(entries_.rbegin(), entries_.rend(), [](const Entry& e) { return !e.shared; });
    if (own != entries_.rend()) victim = std::prev(own.base());
  }
  engine_.release(victim->snapshot);
  entries_.erase(victim);
  return true;
}

void PrefixCache::forget(std::span<const std::int32_t> ids) {
  for (auto e = entries_.begin(); e != entries_.end();) {
    const auto at = e++;
    if (!begins(at->snapshot, ids)) continue;
    engine_.release(at->snapshot);
    entries_.erase(at);
  }
}

void PrefixCache::clear() {
  while (drop_oldest()) {
  }
}

}  // namespace flashnext
