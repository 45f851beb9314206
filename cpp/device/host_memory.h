// Memory of the host device: every live block by address, what it is for, and the sum. Fresh and
// released bytes are poisoned with 0xFF (NaN as fp32, fp16 and bf16; -1 as an integer).
#pragma once

#include "cpp/device/device.h"
#include "cpp/device/host_device.h"

#include <map>

namespace flashnext {

class HostMemory {
 public:
  struct Range {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
  };

  explicit HostMemory(const HostDeviceOptions& options)
      : limit_(options.memory_limit), fail_at_(options.fail_allocation), poison_(options.poison) {}
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  void* allocate(Space space, std::size_t bytes, std::string_view what);
  void seal() noexcept { sealed_ = true; }
  std::size_t available() const noexcept { return limit_ - used_; }
  std::vector<Allocated> list() const;  // in order of allocation

  // Null when `block` is not the start of a live block.
  const Allocated* find(const void* block) const noexcept;
  Range range(const void* block) const noexcept;
  void release(void* block) noexcept;

 private:
  struct Entry {
    Allocated info;
    std::int64_t index;
  };
  [[noreturn]] void refuse(Space space, std::size_t bytes, std::string_view what,
                           const std::string& reason) const;

  std::map<const std::byte*, Entry> blocks_;
  std::size_t used_ = 0;
  std::int64_t calls_ = 0;
  const std::size_t limit_;
  const std::int64_t fail_at_;
  const bool poison_;
  bool sealed_ = false;
};

}  // namespace flashnext
