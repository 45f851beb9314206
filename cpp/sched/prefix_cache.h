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
  // none. It becomes the most recently used, and stays valid until the next call of keep() or
  // drop_oldest().
  const Snapshot* find(std::span<const std::int32_t> ids);
  // Keeps the lane's present state, unless a snapshot of the same ids exists or the engine holds
  // none.
  void keep(std::int32_t lane);
  // Gives back the pages of the least recently used snapshot; false when there is none.
  bool drop_oldest();
  void clear();
  std::size_t size() const noexcept { return entries_.size(); }

 private:
  Engine& engine_;
  std::list<Snapshot> entries_;  // most recently used first
};

}  // namespace flashnext
