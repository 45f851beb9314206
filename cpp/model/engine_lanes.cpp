// The parts of the engine that move sequences about: rewind, pages, snapshots.
#include "cpp/model/engine.h"

#include <algorithm>
#include <utility>

namespace flashnext {

void Engine::rewind(std::int32_t index, std::int32_t keep) {
  LaneState& l = lane(index);
  check(last_ != nullptr && keep >= 0 && keep <= l.last.rows,
        "rewind keeps more rows than the step had");
  if (keep == l.last.rows) return;
  check(l.rewindable, "the lane's last step cannot be rewound");
  l.rewindable = false;
  std::swap(l.slot, l.spare);  // the state before the step
  settle(l.spare);
  if (keep > 0) {
    // The kept rows again, from the old state into the spare slot, by the same ops on the same
    // inputs. They find their rows by the segment alone.
    const StepBuffer& b = *rewind_;
    Segment segment = l.last;
    segment.rows = keep;
    segment.state_in = l.slot;
    segment.state_out = l.spare;
    b.head() = {segment.row0 + keep, 1, 0, 0};
    b.segments()[0] = segment;
    run(*last_, last_->rewind_program, last_->rewind_graphs, segment.row0 + keep);
    device_.synchronize(streams_.main());
    std::swap(l.slot, l.spare);
  }
  l.last.rows = keep;
  l.ids.resize(static_cast<std::size_t>(l.last.pos0 + keep));
  ++counters_.rewinds;
}

bool Engine::reserve(std::int32_t index, std::int32_t tokens) {
  LaneState& l = lane(index);
  const std::int32_t needed = pages_for(static_cast<std::int64_t>(l.ids.size()) + tokens);
  const auto missing = std::min(needed, max_pages_) - static_cast<std::int32_t>(l.pages.size());
  if (missing > state_->free_pages()) return false;
  for (std::int32_t i = 0; i < missing; ++i) l.pages.push_back(state_->take_page());
  return true;
}

bool Engine::could_hold(std::int32_t tokens) const {
  std::vector<bool> used(static_cast<std::size_t>(state_->num_pages()), false);
  for (const LaneState& l : lanes_) {
    for (const std::int32_t page : l.pages) used[static_cast<std::size_t>(page)] = true;
  }
  const auto taken = std::count(used.begin(), used.end(), true);
  return pages_for(tokens) + taken <= state_->num_pages();
}

void Engine::reset(std::int32_t index) {
  LaneState& l = lane(index);
  for (const std::int32_t page : l.pages) state_->drop_page(page);
  l.pages.clear();
  l.ids.clear();
  l.stepped = l.rewindable = false;
  l.mtp_length = 0;
}

LaneLease::~LaneLease() {
  if (engine_ != nullptr) engine_->give_back(lane_);
}

std::optional<LaneLease> Engine::borrow() {
  if (free_lanes_.empty()) return std::nullopt;
  const std::int32_t index = free_lanes_.back();
  free_lanes_.pop_back();
  reset(index);
  return LaneLease(*this, index);
}

void Engine::give_back(std::int32_t index) noexcept {
  reset(index);
  const auto before =
      std::find_if(free_lanes_.begin(), free_lanes_.end(), [index](auto l) { return l < index; });
  free_lanes_.insert(before, index);
}

std::int32_t Engine::free_snapshots() const noexcept {
  return static_cast<std::int32_t>(free_snapshots_.size());
}

void* Engine::snapshot_block(std::int32_t block) const {
  return snapshots_.as<std::byte>() + static_cast<std::size_t>(block) * state_->slot_bytes();
}

// Whether a copy to a snapshot may still read the slot.
bool Engine::copied_out(std::int32_t slot) {
  SlotCopy& copy = copy_of(slot);
  if (copy.kind != SlotCopy::Kind::kNone && device_.reached(copy.done.id())) {
    copy.kind = SlotCopy::Kind::kNone;
  }
  return copy.kind == SlotCopy::Kind::kOut;
}

// The next work of the main stream comes after the copy of a slot that it will write, or read after
// a restore.
void Engine::settle(std::int32_t slot) {
  SlotCopy& copy = copy_of(slot);
  if (copy.kind == SlotCopy::Kind::kNone) return;
  device_.wait(streams_.main(), copy.done.id());
  copy.kind = SlotCopy::Kind::kNone;
}

// Steps were waited for, so that the slot holds still. One stream carries all copies: a block or a
// slot that is used again is used in the order of the calls.
void Engine::copy_slot(std::int32_t slot, SlotCopy::Kind kind, void* to, const void* from) {
  device_.copy_async(copies_.id(), to, from, state_->slot_bytes());
  device_.record(copy_of(slot).done.id(), copies_.id());
  copy_of(slot).kind = kind;
}

Snapshot Engine::snapshot(std::int32_t index) {
  const LaneState& l = lane(index);
  check(!free_snapshots_.empty(), "no snapshot block is free");
  Snapshot s;
  s.ids = l.ids;
  s.mtp_length = l.mtp_length;
  const std::size_t pages = (l.ids.size() + kPageTokens - 1) / kPageTokens;
  s.pages.assign(l.pages.begin(), l.pages.begin() + static_cast<std::ptrdiff_t>(pages));
  s.block = free_snapshots_.back();
  free_snapshots_.pop_back();
  // The slot may hold what a restore is still bringing: that copy comes first in the same stream.
  copy_slot(
      l.slot,
      copy_of(l.slot).kind == SlotCopy::Kind::kIn ? SlotCopy::Kind::kIn : SlotCopy::Kind::kOut,
      snapshot_block(s.block), state_->slot(l.slot));
  for (const std::int32_t page : s.pages) state_->hold_page(page);
  ++counters_.snapshots;
  return s;
}

bool Engine::restore(std::int32_t index, const Snapshot& snapshot) {
  reset(index);
  LaneState& l = lane(index);
  for (const std::int32_t page : snapshot.pages) {
    state_->hold_page(page);
    l.pages.push_back(page);
  }
  // A last page that is not full will be written: the lane needs its own.
  if (snapshot.ids.size() % kPageTokens != 0) {
    const std::int32_t copy = state_->take_page();
    if (copy < 0) {
      reset(index);
      return false;
    }
    state_->copy_page(device_, streams_.main(), copy, l.pages.back());
    state_->drop_page(l.pages.back());
    l.pages.back() = copy;
  }
  l.ids = snapshot.ids;
  l.mtp_length = snapshot.mtp_length;
  copy_slot(l.slot, SlotCopy::Kind::kIn, state_->slot(l.slot), snapshot_block(snapshot.block));
  ++counters_.restores;
  return true;
}

void Engine::release(Snapshot& snapshot) {
  if (snapshot.block < 0) return;
  for (const std::int32_t page : snapshot.pages) state_->drop_page(page);
  free_snapshots_.push_back(snapshot.block);
  snapshot = {};
}

}  // namespace flashnext
