// A fixed pool of threads that share loops. The caller takes part, so a pool of one runs everything
// in place. Threads: one caller at a time. A loop body must not throw and must not call back into
// the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace flashnext {

class ThreadPool {
 public:
  // threads = 0: one a core the process may run on.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(begin, end) on disjoint pieces that cover [0, n), each of `grain` items (the last
  // may be shorter). Returns when all have run. Which thread runs which piece is not defined:
  // bodies must not depend on it.
  template <class Body>
  void parallel_for(std::int64_t n, std::int64_t grain, Body&& body) {
    if (n <= 0) return;
    if (workers_.empty() || n <= grain) {
      for (std::int64_t i = 0; i < n; i += grain) body(i, i + grain < n ? i + grain : n);
      return;
    }
    using Fn = std::remove_reference_t<Body>;
    run(
        n, grain,
        [](void* self, std::int64_t i, std::int64_t j) { (*static_cast<Fn*>(self))(i, j); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  using Call = void (*)(void*, std::int64_t, std::int64_t);
  void run(std::int64_t n, std::int64_t grain, Call call, void* self);
  void work();
  void take_pieces();

  std::vector<std::thread> workers_;
  // The current loop: its number in the upper half, kOpen while it may be joined, and the workers
  // inside below. A worker joins by adding itself while the loop is open, so the caller never waits
  // for one that the system has not let run.
  static constexpr std::uint64_t kOpen = std::uint64_t{1} << 31;
  std::atomic<std::uint64_t> state_{0};
  std::atomic<std::uint32_t> loop_{0};  // number of the current loop: what sleepers wait for
  std::atomic<bool> stop_{false};
  std::atomic<std::int64_t> next_{0};
  std::int64_t n_ = 0;
  std::int64_t grain_ = 1;
  Call call_ = nullptr;
  void* self_ = nullptr;
};

// Cores the process may run on (its affinity mask), at least 1.
int available_cores() noexcept;

}  // namespace flashnext
