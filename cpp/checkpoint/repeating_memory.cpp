#include "cpp/checkpoint/repeating_memory.h"

#include "cpp/base/errors.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

namespace flashnext {
namespace {

[[noreturn]] void fail(std::size_t bytes, const char* what) {
  throw OutOfMemory("host", bytes,
                    std::string("synthetic weights: ") + what + " of " + std::to_string(bytes) +
                        " bytes failed (" + std::strerror(errno) +
                        "). Free memory, or raise the "
                        "limits (ulimit -v, the memory limit of the container)");
}

}  // namespace

RepeatingMemory::RepeatingMemory(std::size_t period, std::size_t length) : period_(period) {
  check(period > 0 && period % kPage == 0, "repeating memory: the period must be whole pages");
  length_ = (length + period - 1) / period * period;
  const int file = ::memfd_create("flashnext-synthetic", MFD_CLOEXEC);
  if (file < 0) fail(period, "a memory file");
  // Populated here, so that missing memory is an error now and no signal later.
  void* all = MAP_FAILED;
  const bool room = ::ftruncate(file, static_cast<off_t>(period)) == 0 &&
                    ::posix_fallocate(file, 0, static_cast<off_t>(period)) == 0;
  if (room)
    all = ::mmap(nullptr, length_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  bool ok = all != MAP_FAILED;
  for (std::size_t at = 0; ok && at < length_; at += period) {
    const int access = at == 0 ? PROT_READ | PROT_WRITE : PROT_READ;
    ok = ::mmap(static_cast<std::byte*>(all) + at, period, access, MAP_SHARED | MAP_FIXED, file,
                0) != MAP_FAILED;
  }
  const int error = errno;
  ::close(file);
  if (!ok) {
    if (all != MAP_FAILED) ::munmap(all, length_);
    errno = error;
    fail(room ? length_ : period, room ? "a mapping" : "a block");
  }
  data_ = static_cast<std::byte*>(all);
}

RepeatingMemory::RepeatingMemory(RepeatingMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      period_(std::exchange(other.period_, 0)),
      length_(std::exchange(other.length_, 0)) {}

RepeatingMemory::~RepeatingMemory() {
  if (data_ != nullptr) ::munmap(data_, length_);
}

void RepeatingMemory::seal() noexcept { ::mprotect(data_, period_, PROT_READ); }

}  // namespace flashnext
