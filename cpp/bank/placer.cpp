#include "cpp/bank/placer.h"

#include <algorithm>

namespace flashnext {

namespace {
constexpr std::size_t kStagingBytes = std::size_t{32} << 20;
}

Placer::Staging::Staging(Device& device)
    : block{Block(device, Space::kPinned, kStagingBytes, "load staging"),
            Block(device, Space::kPinned, kStagingBytes, "load staging")},
      done{Event(device), Event(device)} {}

Placer::Placer(Device& device, std::byte* arena, std::size_t bytes, const Progress& progress)
    : device_(&device), arena_(arena), size_(bytes), progress_(progress) {
  if (device.kind() != "host") {
    stream_.emplace(device);
    staging_.emplace(device);
  }
}

std::byte* Placer::reserve(std::size_t bytes) {
  const std::size_t begin = offset_;
  offset_ += (bytes + kAlign - 1) / kAlign * kAlign;
  if (counting()) return nullptr;
  check(offset_ <= size_, "the place pass needs more than the count pass found");
  return arena_ + begin;
}

std::byte* Placer::put(const void* from, std::size_t bytes) {
  std::byte* to = reserve(bytes);
  if (to == nullptr || bytes == 0) return to;
  if (!staging_) {
    std::memcpy(to, from, bytes);
  } else {
    send(to, static_cast<const std::byte*>(from), bytes);
  }
  if (progress_) progress_("weights", offset_, size_);
  return to;
}

void Placer::send(std::byte* to, const std::byte* from, std::size_t bytes) {
  while (bytes > 0) {
    Staging& s = *staging_;
    const std::size_t piece = std::min(bytes, kStagingBytes);
    const auto turn = static_cast<std::size_t>(s.turn);
    if (s.used[turn]) {
      // The buffer is free once its last copy has run: wait for that copy alone.
      Stream waiter(*device_);
      device_->wait(waiter.id(), s.done[turn].id());
      device_->synchronize(waiter.id());
    }
    std::memcpy(s.block[turn].data(), from, piece);
    device_->copy_async(stream_->id(), to, s.block[turn].data(), piece);
    device_->record(s.done[turn].id(), stream_->id());
    s.used[turn] = true;
    s.turn ^= 1;
    to += piece;
    from += piece;
    bytes -= piece;
  }
}

void Placer::finish() {
  if (stream_) device_->synchronize(stream_->id());
  if (!counting()) check(offset_ == size_, "the place pass needs less than the count pass found");
}

}  // namespace flashnext
