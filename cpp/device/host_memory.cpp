#include "cpp/device/host_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace flashnext {

namespace {
constexpr std::size_t kAlign = 256;
constexpr int kPoison = 0xFF;

// An empty block still needs an address of its own.
std::size_t padded(std::size_t bytes) { return std::max<std::size_t>(bytes, 1); }
}  // namespace

HostMemory::~HostMemory() {
  while (!blocks_.empty()) release(const_cast<std::byte*>(blocks_.begin()->first));
}

void* HostMemory::allocate(Space space, std::size_t bytes, std::string_view what) {
  if (sealed_) {
    throw LogicError("host device: allocation of '" + std::string(what) + "' (" +
                     std::to_string(bytes) + " bytes) after seal()");
  }
  const std::int64_t index = calls_++;
  if (index == fail_at_) refuse(space, bytes, what, "a failure was injected at this call");
  if (bytes > limit_ || used_ > limit_ - bytes) {
    refuse(space, bytes, what, "the limit is " + std::to_string(limit_) + " bytes");
  }
  void* data = ::operator new (padded(bytes), std::align_val_t{kAlign}, std::nothrow);
  if (data == nullptr) refuse(space, bytes, what, "the system has no more memory");
  if (poison_) std::memset(data, kPoison, padded(bytes));
  blocks_[static_cast<std::byte*>(data)] = {{space, std::string(what), bytes}, index};
  used_ += bytes;
  return data;
}

void HostMemory::refuse(Space space, std::size_t bytes, std::string_view what,
                        const std::string& reason) const {
  // Parts of one name are shown once, with their number.
  std::vector<std::pair<Allocated, int>> parts;
  for (const Allocated& block : list()) {
    const auto same = std::find_if(parts.begin(), parts.end(), [&](const auto& part) {
      return part.first.space == block.space && part.first.what == block.what;
    });
    if (same == parts.end()) {
      parts.emplace_back(block, 1);
    } else {
      same->first.bytes += block.bytes;
      ++same->second;
    }
  }
  std::string message = "out of " + std::string(to_string(space)) + " memory: '" +
                        std::string(what) + "' needs " + std::to_string(bytes) + " bytes; " +
                        reason + "; in use " + std::to_string(used_) + " bytes";
  const char* separator = ": ";
  for (const auto& [part, count] : parts) {
    message.append(separator).append("'").append(part.what).append("'");
    if (count > 1) message.append(" x").append(std::to_string(count));
    message.append(" ").append(std::to_string(part.bytes));
    message.append(" (").append(to_string(part.space)).append(")");
    separator = ", ";
  }
  message += "; sum with this part " + std::to_string(used_ + bytes) + " bytes";
  throw OutOfMemory(to_string(space), bytes, message);
}

std::vector<Allocated> HostMemory::list() const {
  std::vector<const Entry*> entries;
  entries.reserve(blocks_.size());
  for (const auto& [begin, entry] : blocks_) entries.push_back(&entry);
  std::sort(entries.begin(), entries.end(),
            [](const Entry* a, const Entry* b) { return a->index < b->index; });
  std::vector<Allocated> list;
  list.reserve(entries.size());
  for (const Entry* entry : entries) list.push_back(entry->info);
  return list;
}

const Allocated* HostMemory::find(const void* block) const noexcept {
  const auto it = blocks_.find(static_cast<const std::byte*>(block));
  return it == blocks_.end() ? nullptr : &it->second.info;
}

HostMemory::Range HostMemory::range(const void* block) const noexcept {
  const Allocated* info = find(block);
  if (info == nullptr) return {};
  const auto* begin = static_cast<const std::byte*>(block);
  return {begin, begin + padded(info->bytes)};
}

void HostMemory::release(void* block) noexcept {
  const auto it = blocks_.find(static_cast<const std::byte*>(block));
  if (it == blocks_.end()) return;
  const std::size_t bytes = it->second.info.bytes;
  used_ -= bytes;
  blocks_.erase(it);
  if (poison_) {
    std::memset(block, kPoison, padded(bytes));
    // Keeps the compiler from dropping the store to memory that is about to be freed.
    asm volatile("" : : "r"(block) : "memory");
  }
  ::operator delete (block, std::align_val_t{kAlign});
}

}  // namespace flashnext
