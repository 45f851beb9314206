// Places data in one arena, front to back. Run once without memory it counts; run again with memory
// it places: the two totals must agree, so sizes are never computed twice in two ways.
#pragma once

#include "cpp/checkpoint/checkpoint.h"
#include "cpp/device/device.h"

#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

namespace flashnext {

class Placer {
 public:
  static constexpr std::size_t kAlign = 256;

  // Counts.
  Placer() = default;
  // Places into `arena`. Host memory is written directly, other memory through pinned staging and
  // `stream`.
  Placer(Device& device, std::byte* arena, std::size_t bytes, const Progress& progress);

  bool counting() const noexcept { return arena_ == nullptr; }
  std::size_t bytes() const noexcept { return offset_; }

  // Copies `bytes` from host memory (any alignment); null while counting.
  std::byte* put(const void* from, std::size_t bytes);
  // `produce(void* host)` writes the bytes; it is not called while counting.
  template <class Produce>
  std::byte* produce(std::size_t bytes, Produce&& write) {
    if (counting()) return reserve(bytes);
    scratch_.resize(bytes);
    write(static_cast<void*>(scratch_.data()));
    return put(scratch_.data(), bytes);
  }
  // Waits for what is in flight.
  void finish();

 private:
  std::byte* reserve(std::size_t bytes);
  void send(std::byte* to, const std::byte* from, std::size_t bytes);

  struct Staging {
    Block block[2];
    Event done[2];
    bool used[2] = {false, false};
    int turn = 0;
    explicit Staging(Device& device);
  };

  Device* device_ = nullptr;
  std::byte* arena_ = nullptr;
  std::size_t size_ = 0;
  std::size_t offset_ = 0;
  Progress progress_;
  std::vector<std::byte> scratch_;
  std::optional<Stream> stream_;
  std::optional<Staging> staging_;
};

}  // namespace flashnext
