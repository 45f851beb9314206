#include "cpp/model/state.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <limits>
#include <string>

namespace flashnext {

namespace {

std::size_t attention_layers(const ModelShape& shape, bool mtp) {
  const auto n =
      std::count(shape.layer_kinds.begin(), shape.layer_kinds.end(), LayerKind::kAttention);
  return static_cast<std::size_t>(n) + (mtp ? 1 : 0);
}

struct PageElements {
  std::size_t kv, pooled;
  explicit PageElements(const ModelShape& s)
      : kv(static_cast<std::size_t>(s.kv_dim()) * kPageTokens),
        pooled(static_cast<std::size_t>(s.index_dim) *
               static_cast<std::size_t>(kPageTokens / s.index_block)) {}
  std::size_t bytes() const { return 2 * kv * sizeof(std::uint16_t) + pooled * sizeof(float); }
};

}  // namespace

SlotLayout slot_layout(const ModelShape& shape, bool mtp) {
  SlotLayout layout;
  std::int64_t at = 0;
  const auto take = [&at](std::int64_t floats) {
    const std::int64_t begin = at;
    at += (floats + 63) / 64 * 64;
    return begin;
  };
  layout.gdn.resize(static_cast<std::size_t>(shape.layers), {-1, -1});
  for (std::size_t l = 0; l < layout.gdn.size(); ++l) {
    if (shape.layer_kinds[l] != LayerKind::kDeltaNet) continue;
    layout.gdn[l].state = take(std::int64_t{shape.gdn_v_heads} * 128 * 128);
    layout.gdn[l].window = take(std::int64_t{shape.gdn_kernel - 1} * shape.gdn_channels());
  }
  if (shape.ple_layer >= 0) {
    layout.ple_window =
        take(std::int64_t{shape.ngram_size} * (shape.ple_kernel - 1) * shape.stack());
  }
  const auto take_index_window = [&] {
    layout.index_windows.push_back(take(std::int64_t{shape.index_block - 1} * shape.index_dim));
  };
  for (std::size_t i = 0; i < attention_layers(shape, false); ++i) take_index_window();
  layout.mtp = at;
  if (mtp) {
    take_index_window();
    layout.carry = take(shape.stack());
  }
  layout.floats = at;
  return layout;
}

std::size_t page_bytes(const ModelShape& shape, bool mtp) {
  return PageElements(shape).bytes() * attention_layers(shape, mtp);
}

std::int32_t pool_pages(const ModelShape& shape, bool mtp, std::int32_t window, std::int32_t lanes,
                        std::uint64_t kv_bytes) {
  const std::int32_t whole = pages_for(window);
  if (kv_bytes == 0) return whole + (lanes - 1) * ((whole + 3) / 4) + 1;
  const std::uint64_t page = page_bytes(shape, mtp);
  const std::uint64_t pages = kv_bytes / page, least = static_cast<std::uint64_t>(whole) + 1;
  if (pages < least) {
    throw InputError("kv_bytes (kv_gb) = " + std::to_string(kv_bytes) +
                     ": a sequence that fills the window of " + std::to_string(window) +
                     " positions needs " + std::to_string(least * page) + " bytes (" +
                     std::to_string(least) + " pages of " + std::to_string(page) +
                     "); give it that many, or a smaller window");
  }
  return static_cast<std::int32_t>(
      std::min<std::uint64_t>(pages, std::numeric_limits<std::int32_t>::max()));
}

StatePool::StatePool(Device& device, const ModelShape& shape, bool mtp, std::int32_t num_slots,
                     std::int32_t num_pages)
    : layout_(slot_layout(shape, mtp)),
      slots_(device, Space::kDevice,
             std::max<std::size_t>(1, static_cast<std::size_t>(num_slots)) *
                 static_cast<std::size_t>(std::max<std::int64_t>(layout_.floats, 64)) *
                 sizeof(float),
             "recurrent state"),
      pages_(device, Space::kDevice, static_cast<std::size_t>(num_pages) * page_bytes(shape, mtp),
             "KV pages"),
      references_(static_cast<std::size_t>(num_pages), 0) {
  const PageElements page(shape);
  kv_page_ = page.kv;
  pooled_page_ = page.pooled;
  const auto n = static_cast<std::size_t>(num_pages);
  auto* at = pages_.as<std::byte>();
  const auto take = [&at](std::size_t bytes) {
    std::byte* begin = at;
    at += bytes;
    return begin;
  };
  for (std::size_t i = 0; i < attention_layers(shape, mtp); ++i) {
    KvPlanes planes{};
    planes.k = reinterpret_cast<std::uint16_t*>(take(n * kv_page_ * 2));
    planes.v = reinterpret_cast<std::uint16_t*>(take(n * kv_page_ * 2));
    planes.index_pooled = reinterpret_cast<float*>(take(n * pooled_page_ * sizeof(float)));
    planes_.push_back(planes);
  }
  for (std::int32_t p = num_pages - 1; p >= 0; --p) free_.push_back(p);
}

std::int32_t StatePool::take_page() {
  if (free_.empty()) return -1;
  const std::int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void StatePool::hold_page(std::int32_t page) {
  check(references(page) > 0, "a free page cannot be held");
  ++references_[static_cast<std::size_t>(page)];
}

void StatePool::drop_page(std::int32_t page) {
  check(references(page) > 0, "a page is dropped more often than it was taken");
  if (--references_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
}

std::int32_t StatePool::references(std::int32_t page) const {
  return references_.at(static_cast<std::size_t>(page));
}

void StatePool::copy_page(Device& device, StreamId stream, std::int32_t to,
                          std::int32_t from) const {
  const auto t = static_cast<std::size_t>(to), f = static_cast<std::size_t>(from);
  for (const KvPlanes& p : planes_) {
    device.copy_async(stream, p.k + t * kv_page_, p.k + f * kv_page_, kv_page_ * 2);
    device.copy_async(stream, p.v + t * kv_page_, p.v + f * kv_page_, kv_page_ * 2);
    device.copy_async(stream, p.index_pooled + t * pooled_page_, p.index_pooled + f * pooled_page_,
                      pooled_page_ * sizeof(float));
  }
}

void StatePool::check_integrity() const {
  std::vector<bool> seen(references_.size(), false);
  for (const std::int32_t page : free_) {
    const auto i = static_cast<std::size_t>(page);
    check(!seen[i] && references_[i] == 0, "the free list and the page references disagree");
    seen[i] = true;
  }
  for (std::size_t i = 0; i < references_.size(); ++i) {
    check(seen[i] == (references_[i] == 0), "a page is neither free nor held");
  }
}

}  // namespace flashnext
