#include "cpp/cache/cpu_experts.h"

#include "cpp/base/errors.h"
#include "cpp/base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <pthread.h>
#include <sched.h>
#include <utility>

namespace flashnext::cache {

namespace {

constexpr int kNoCore = -1;
// Turns of waiting for a posting before the core is offered to others, which on a busy machine keep
// it for milliseconds: longer than the layers of a step are apart, unless others of us need it.
constexpr int kPatient = 20'000;
constexpr int kBrief = 500;

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

int thread_count(const CpuOptions& options) {
  return options.threads > 0 ? options.threads : std::max(1, available_cores() - 1);
}

bool has_units(std::uint64_t ticket) noexcept {
  return static_cast<std::uint32_t>(ticket) < static_cast<std::uint32_t>(ticket >> 32);
}

void add(std::atomic<std::uint64_t>& counter, std::int64_t n) noexcept {
  counter.fetch_add(static_cast<std::uint64_t>(n), std::memory_order_relaxed);
}

// A core that the system refuses (it went offline, a smaller mask) leaves the thread where it is.
void stay_on(int core) noexcept {
  if (core < 0 || core >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(core), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

CpuExperts::CpuExperts(const MailView& mail, std::vector<LayerExperts> layers,
                       const CpuShape& shape, const CpuOptions& options)
    : head_(*mail.head),
      posting_(mail, std::move(layers), shape, options.isa, thread_count(options)),
      linger_ns_(options.linger_ns),
      awake_turns_(thread_count(options) < available_cores() ? kPatient : kBrief),
      last_units_(static_cast<std::uint32_t>(thread_count(options))),
      opened_(std::atomic_ref(head_.done).load(std::memory_order_acquire)) {
  const int count = thread_count(options);
  threads_.reserve(static_cast<std::size_t>(count));
  try {
    for (int i = 0; i < count; ++i) {
      const std::size_t cores = options.cores.size();
      const int core = cores == 0 ? kNoCore : options.cores[static_cast<std::size_t>(i) % cores];
      threads_.emplace_back([this, core] { run(core); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

CpuExperts::~CpuExperts() { stop(); }

void CpuExperts::stop() noexcept {
  abandon_.store(true);
  arm();
  for (std::thread& t : threads_) t.join();
}

void CpuExperts::arm() noexcept {
  armed_.store(1, std::memory_order_release);
  armed_.notify_all();
}

void CpuExperts::disarm() noexcept { armed_.store(0, std::memory_order_release); }

CpuCounters CpuExperts::counters() const noexcept {
  constexpr auto relaxed = std::memory_order_relaxed;
  return {postings_.load(relaxed), jobs_.load(relaxed),    experts_.load(relaxed),
          bytes_.load(relaxed),    busy_ns_.load(relaxed), sequence_.load(relaxed)};
}

std::string CpuExperts::fault() const {
  const std::lock_guard lock(fault_mutex_);
  return fault_;
}

void CpuExperts::fail(const char* why) noexcept {
  try {
    const std::lock_guard lock(fault_mutex_);
    if (fault_.empty()) fault_ = why;
  } catch (const std::exception&) {
    // Without memory for the text the threads still end.
  }
  abandon_.store(true);
}

void CpuExperts::run(int core) noexcept {
  stay_on(core);
  std::int64_t disarmed_at = 0;
  for (int turn = 0; !abandon_.load(std::memory_order_relaxed); ++turn) {
    if (has_units(ticket_.load(std::memory_order_relaxed)) || take_posting()) {
      claim_units();
      turn = 0;
      disarmed_at = 0;
      continue;
    }
    wait_turn(turn, awake_turns_);
    if (armed_.load(std::memory_order_acquire) != 0) {
      disarmed_at = 0;
    } else if (disarmed_at == 0) {
      disarmed_at = now_ns();
    } else if (turn % 16 == 0 && now_ns() - disarmed_at > linger_ns_) {
      armed_.wait(0, std::memory_order_acquire);
      turn = 0;
    }
  }
}

bool CpuExperts::take_posting() noexcept {
  // NOTE: opened_ before posted. Whoever sees a posting opened then sees it posted too, and does
  // not take an older sequence for a new one.
  std::uint32_t opened = opened_.load(std::memory_order_acquire);
  const std::uint32_t posted = std::atomic_ref(head_.posted).load(std::memory_order_acquire);
  if (posted == opened || stalled_.load(std::memory_order_relaxed)) return false;
  if (!opened_.compare_exchange_strong(opened, posted, std::memory_order_acq_rel)) return false;
  try {
    started_ns_ = now_ns();
    const std::uint32_t units = posting_.open();
    remaining_.store(units, std::memory_order_relaxed);
    if (units == 0) {
      finish_posting();
      return true;
    }
    ticket_.store(std::uint64_t{units} << 32, std::memory_order_release);
  } catch (const std::exception& e) {
    fail(e.what());
  }
  return true;
}

// A thread claims the unit after the one at hand with it, so that its weights are on their way when
// it comes. Not of the last units: others would stand idle and leave them to it.
void CpuExperts::claim_units() noexcept {
  const auto claim = [this] { return ticket_.fetch_add(1, std::memory_order_acq_rel); };
  const auto unit_of = [](std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket); };
  std::uint64_t ticket = claim();
  while (has_units(ticket)) {
    const bool is_last = unit_of(ticket) + last_units_ >= static_cast<std::uint32_t>(ticket >> 32);
    const std::uint64_t next = is_last ? ticket : claim();
    if (!posting_.run(unit_of(ticket), has_units(next) ? unit_of(next) : unit_of(ticket),
                      abandon_)) {
      return;
    }
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish_posting();
    ticket = is_last || !has_units(next) ? claim() : next;
  }
}

void CpuExperts::finish_posting() noexcept {
  const std::uint32_t sequence = opened_.load(std::memory_order_relaxed);
  add(postings_, 1);
  add(jobs_, posting_.jobs());
  add(experts_, posting_.experts());
  add(bytes_, posting_.bytes());
  add(busy_ns_, now_ns() - started_ns_);
  sequence_.store(sequence, std::memory_order_relaxed);
  // NOTE: last. From here on the next posting may be read, by another thread.
  std::atomic_ref(head_.done).store(sequence, std::memory_order_release);
}

}  // namespace flashnext::cache
