// Lays parts into one block of scratch. With no block it only counts, so that one function sizes
// and places.
#pragma once

#include <cstddef>

namespace flashnext::cuda {

class Scratch {
 public:
  explicit Scratch(void* block) : block_(static_cast<std::byte*>(block)) {}

  template <class T>
  T* take(std::size_t n) {
    const std::size_t at = used_;
    used_ += (n * sizeof(T) + 255) / 256 * 256;
    return block_ != nullptr ? reinterpret_cast<T*>(block_ + at) : nullptr;
  }
  std::size_t used() const noexcept { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace flashnext::cuda
