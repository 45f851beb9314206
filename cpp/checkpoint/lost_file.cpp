#include "cpp/checkpoint/lost_file.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <unistd.h>

namespace flashnext {

// One place of a list that only grows; places are used again. `end` is 0 where nothing is mapped,
// is written last and read first.
struct MappedRange {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
  std::array<char, 1024> path{};  // longer names are cut
  MappedRange* next = nullptr;
};

namespace {

std::mutex mutex;  // of writers
std::atomic<MappedRange*> ranges{nullptr};
struct sigaction before {};  // what was installed first

static_assert(std::atomic<std::uintptr_t>::is_always_lock_free);

void say(const char* text) noexcept {
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, text, std::strlen(text));
}

// Async-signal-safe: atomics, write() and sigaction() alone.
void on_bus_error(int signal, siginfo_t* info, void* context) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const MappedRange* r = ranges.load(); r != nullptr; r = r->next) {
    const std::uintptr_t end = r->end.load();
    if (end == 0 || at >= end || at < r->begin.load()) continue;
    say("flashnext: ");
    say(r->path.data());
    say(": the file was cut or cannot be read any more while it is in use, so the process ends. "
        "Never change a checkpoint that is open: restore the file and start again\n");
    break;
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
    before.sa_sigaction(signal, info, context);
    return;
  }
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
    return;
  }
  // The access is tried again after this, and ends the process as it would have without us.
  struct sigaction plain {};
  plain.sa_handler = SIG_DFL;
  ::sigaction(signal, &plain, nullptr);
}

void install() {
  struct sigaction ours {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGBUS, nullptr, &before);
  ::sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

MappedRange* remember_mapping(const std::byte* data, std::size_t bytes, const std::string& path) {
  const std::lock_guard lock(mutex);
  static const bool installed = (install(), true);
  static_cast<void>(installed);
  MappedRange* range = ranges.load();
  while (range != nullptr && range->end.load() != 0) range = range->next;
  const bool fresh = range == nullptr;
  if (fresh) range = new MappedRange;  // for ever: the handler may be looking at it
  const std::size_t length = std::min(path.size(), range->path.size() - 1);
  std::memcpy(range->path.data(), path.data(), length);
  range->path[length] = '\0';
  range->begin.store(reinterpret_cast<std::uintptr_t>(data));
  range->end.store(reinterpret_cast<std::uintptr_t>(data) + bytes);
  if (fresh) {
    range->next = ranges.load();
    ranges.store(range);
  }
  return range;
}

void forget_mapping(MappedRange* range) noexcept {
  if (range != nullptr) range->end.store(0);
}

}  // namespace flashnext
