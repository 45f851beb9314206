// Experts that the processor computes: threads that serve the mailbox of a device (mailbox.h).
//
// All memory and all threads are made at construction. Between arm() and disarm() the threads watch
// the mailbox; otherwise they sleep. Whoever sees a posting first reads it, then all claim its
// units by one counter (cpu_posting.h), and who finishes the last one sets done. No lock is taken,
// no call of the device is made, and nobody is waited for who launches.
//
//   ticket_     units of the open posting (upper half), next one to claim (lower half)
//   opened_     sequence of the posting read last; changed by whoever reads the next
//   remaining_  units not yet finished
// A posting follows only when the one before is done, so at that time nobody owns a unit; a thread
// that comes late finds no unit left, or one of the new posting, and either is right.
#pragma once

#include "cpp/cache/cpu_posting.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace flashnext::cache {

struct CpuOptions {
  int threads = 0;  // 0: one a core the process may run on, less one for whoever launches
  exl3::Isa isa = exl3::best_isa();
  std::vector<int> cores;            // thread i stays on cores[i % size]; empty: anywhere
  std::int64_t linger_ns = 500'000;  // awake after disarm(), for the step that follows at once
};

struct CpuCounters {
  std::uint64_t postings = 0;
  std::uint64_t jobs = 0;
  std::uint64_t experts = 0;
  std::uint64_t bytes = 0;     // of weights
  std::uint64_t busy_ns = 0;   // from a posting seen to done
  std::uint32_t sequence = 0;  // of the last posting done
};

class CpuExperts {
 public:
  // A posting that is open already is computed once armed.
  CpuExperts(const MailView& mail, std::vector<LayerExperts> layers, const CpuShape& shape,
             const CpuOptions& options);
  // Waits for the units at work, not for the rest of an open posting.
  ~CpuExperts();
  CpuExperts(const CpuExperts&) = delete;
  CpuExperts& operator=(const CpuExperts&) = delete;

  // Around the steps that may post. A posting seen before disarm() is still computed.
  void arm() noexcept;
  void disarm() noexcept;
  // For tests of the deadline: takes no further posting while on.
  void stall(bool on) noexcept { stalled_.store(on, std::memory_order_relaxed); }

  int threads() const noexcept { return static_cast<int>(threads_.size()); }
  CpuCounters counters() const noexcept;
  // Why the threads gave up, or empty. From then on no posting is done: the join's deadline ends
  // the wait.
  std::string fault() const;

 private:
  void run(int core) noexcept;
  bool take_posting() noexcept;
  void claim_units() noexcept;
  void finish_posting() noexcept;
  void fail(const char* why) noexcept;
  void stop() noexcept;

  MailboxHead& head_;
  CpuPosting posting_;
  const std::int64_t linger_ns_;
  const int awake_turns_;
  const std::uint32_t last_units_;  // of a posting, which are claimed one at a time

  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<std::uint32_t> remaining_{0};
  alignas(64) std::atomic<std::uint32_t> opened_;
  alignas(64) std::atomic<std::uint32_t> armed_{0};  // what sleepers wait for
  std::atomic<bool> abandon_{false};
  std::atomic<bool> stalled_{false};

  // Written by whoever finishes a posting.
  alignas(64) std::int64_t started_ns_ = 0;
  std::atomic<std::uint64_t> postings_{0}, jobs_{0}, experts_{0}, bytes_{0}, busy_ns_{0};
  std::atomic<std::uint32_t> sequence_{0};

  mutable std::mutex fault_mutex_;
  std::string fault_;
  std::vector<std::thread> threads_;
};

}  // namespace flashnext::cache
