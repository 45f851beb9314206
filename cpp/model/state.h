// Sequence state on a device: KV pages from one pool, and slots of recurrent state.
//
// A page holds kPageTokens tokens of every attention layer (the MTP head's included); a lane's
// pages stand in its row of the page table in position order. Pages are counted references: a
// snapshot may hold pages that a lane still reads. A slot is one contiguous block with everything
// recurrent (DeltaNet M and windows, the n-gram window, raw index keys of the unfinished block), so
// that a snapshot is one copy. Neither needs clearing: a segment at position 0 takes its old state
// as zero.
#pragma once

#include "cpp/checkpoint/model_shape.h"
#include "cpp/device/device.h"

#include <cstdint>
#include <vector>

namespace flashnext {

// Offsets in floats inside a slot.
struct SlotLayout {
  struct Gdn {
    std::int64_t state;   // (v_heads, 128, 128)
    std::int64_t window;  // (kernel - 1, channels)
  };
  std::vector<Gdn> gdn;          // a layer; unused entries for attention layers
  std::int64_t ple_window = -1;  // (dilation * (kernel - 1), streams * hidden)
  // (index_block - 1, index_dim) an attention layer in layer order; the MTP head's comes last.
  std::vector<std::int64_t> index_windows;
  // (streams * hidden): the trunk's streams at the last position, for the MTP head.
  std::int64_t carry = -1;
  std::int64_t mtp = 0;     // from here on the slot holds the state of the MTP head
  std::int64_t floats = 0;  // of one slot, a multiple of 64
};
SlotLayout slot_layout(const ModelShape& shape, bool mtp);

// Bytes of one page over all attention layers.
std::size_t page_bytes(const ModelShape& shape, bool mtp);

// Pages that a sequence of so many positions takes.
constexpr std::int32_t pages_for(std::int64_t positions) {
  return static_cast<std::int32_t>((positions + kPageTokens - 1) / kPageTokens);
}

// Pages of a pool that `lanes` sequences share by need. Lanes seldom fill their windows at once, so
// that a pool of kv_bytes = 0 holds one whole window and a quarter more for every further lane.
// There is always a page to spare, into which a restored sequence copies its last one. Throws
// InputError when kv_bytes hold less than one window.
std::int32_t pool_pages(const ModelShape& shape, bool mtp, std::int32_t window, std::int32_t lanes,
                        std::uint64_t kv_bytes);

class StatePool {
 public:
  StatePool(Device& device, const ModelShape& shape, bool mtp, std::int32_t num_slots,
            std::int32_t num_pages);

  const SlotLayout& layout() const noexcept { return layout_; }
  float* slots() const noexcept { return slots_.as<float>(); }
  float* slot(std::int32_t index) const noexcept { return slots() + index * layout_.floats; }
  std::size_t slot_bytes() const noexcept {
    return static_cast<std::size_t>(layout_.floats) * sizeof(float);
  }

  // Planes of the i-th attention layer in layer order; the MTP head's come last.
  const KvPlanes& planes(std::size_t i) const { return planes_.at(i); }

  std::int32_t num_pages() const noexcept { return static_cast<std::int32_t>(references_.size()); }
  std::size_t bytes_per_page() const noexcept { return pages_.bytes() / references_.size(); }
  std::int32_t free_pages() const noexcept { return static_cast<std::int32_t>(free_.size()); }
  // A page with one reference, or -1 when none is free.
  std::int32_t take_page();
  void hold_page(std::int32_t page);
  void drop_page(std::int32_t page);
  std::int32_t references(std::int32_t page) const;
  // Enqueues a copy of everything in a page.
  void copy_page(Device& device, StreamId stream, std::int32_t to, std::int32_t from) const;
  // Throws LogicError unless free pages and references agree.
  void check_integrity() const;

 private:
  SlotLayout layout_;
  Block slots_;
  Block pages_;
  std::vector<KvPlanes> planes_;
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;
  std::size_t kv_page_ = 0, pooled_page_ = 0;  // elements of one page of one plane
};

}  // namespace flashnext
