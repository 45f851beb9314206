// Snapshots of sequences that were processed before, found again by their ids. Least recently used
// goes first.
#pragma once

#include "cpp/model/engine.h"

#include <cstdint>
#include <list>
#include <span>

namespace flashnext {

class PrefixCache {
 public:
  explicit PrefixCache(Engine& engine) : engine_(engine) {}
  ~PrefixCache() { clear(); }
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The longest snapshot whose ids begin `ids` and leave at least one of them; null when there is
  // none. It becomes the most recently used, and what `ids` shares with other conversations the
  // next. Valid until the next call of keep(), drop_oldest(), forget() or clear().
  const Snapshot* find(std::span<const std::int32_t> ids);
  // How many tokens find() would spare; changes nothing.
  std::int32_t length_of(std::span<const std::int32_t> ids) const;
  // Keeps the lane's present state, unless a snapshot of the same ids exists or the engine holds
  // none. `shared`: other conversations begin with it too.
  void keep(std::int32_t lane, bool shared = false);
  // Gives back the pages of the least recently used snapshot; false when there is none. What
  // conversations share stays longest, as long as that is not most of what is kept.
  bool drop_oldest();
  // Drops every snapshot that begins `ids`.
  void forget(std::span<const std::int32_t> ids);
  void clear();
  std::size_t size() const noexcept { return entries_.size(); }

 private:
  struct Entry {
    Snapshot snapshot;
    bool shared;
  };
  Engine& engine_;
  std::list<Entry> entries_;  // most recently used first
};

}  // namespace flashnext
