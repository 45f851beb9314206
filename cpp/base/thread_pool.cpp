#include "cpp/base/thread_pool.h"

#include <algorithm>
#include <sched.h>

namespace flashnext {

namespace {
// Loops of one token follow each other within microseconds: wait that long awake before sleeping.
constexpr int kSpins = 2000;

inline void pause_cpu() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
}  // namespace

int available_cores() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

ThreadPool::ThreadPool(int threads) {
  const int n = threads > 0 ? threads : available_cores();
  workers_.reserve(static_cast<std::size_t>(n - 1));
  for (int i = 1; i < n; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  loop_.fetch_add(1);
  loop_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::int64_t n, std::int64_t grain, Call call, void* self) {
  n_ = n;
  grain_ = grain;
  call_ = call;
  self_ = self;
  next_.store(0, std::memory_order_relaxed);
  const std::uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  state_.store(std::uint64_t{loop} << 32 | kOpen, std::memory_order_release);
  loop_.store(loop, std::memory_order_release);
  loop_.notify_all();
  take_pieces();
  // NOTE: the fields above may change only when the loop is closed and every worker has left it.
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spin = 0; (state_.load(std::memory_order_acquire) & (kOpen - 1)) != 0; ++spin) {
    if (spin < kSpins) {
      pause_cpu();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::take_pieces() {
  for (;;) {
    const std::int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) return;
    call_(self_, begin, std::min(begin + grain_, n_));
  }
}

void ThreadPool::work() {
  std::uint32_t seen = 0;
  for (;;) {
    for (int spin = 0; loop_.load(std::memory_order_acquire) == seen; ++spin) {
      if (spin < kSpins) {
        pause_cpu();
      } else {
        loop_.wait(seen, std::memory_order_acquire);
      }
    }
    seen = loop_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    std::uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) != 0) {
      if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
      take_pieces();
      state_.fetch_sub(1, std::memory_order_acq_rel);
      break;
    }
  }
}

}  // namespace flashnext
