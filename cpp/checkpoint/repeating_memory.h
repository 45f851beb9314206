// Inside the room: memory that repeats in the address space, so that a little of it stands for a
// lot.
#pragma once

#include <cstddef>

namespace flashnext {

class RepeatingMemory {
 public:
  static constexpr std::size_t kPage = 4096;

  // `period` bytes (a multiple of kPage), mapped again and again over at least `length` bytes.
  // Throws OutOfMemory.
  RepeatingMemory(std::size_t period, std::size_t length);
  ~RepeatingMemory();
  RepeatingMemory(RepeatingMemory&& other) noexcept;
  RepeatingMemory(const RepeatingMemory&) = delete;
  RepeatingMemory& operator=(const RepeatingMemory&) = delete;
  RepeatingMemory& operator=(RepeatingMemory&&) = delete;

  // The first period may be written until seal().
  std::byte* data() const noexcept { return data_; }
  std::size_t period() const noexcept { return period_; }
  void seal() noexcept;

 private:
  std::byte* data_ = nullptr;
  std::size_t period_ = 0;
  std::size_t length_ = 0;
};

}  // namespace flashnext
