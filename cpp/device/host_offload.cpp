// The ops of experts in host memory (kGuess, kResolve, kFetch, kCpuPost, kCpuJoin, kPace) on the
// host.
#include "cpp/base/errors.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/resolve.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

namespace flashnext::host {

namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void sleep_until(std::int64_t ns) {
  const std::int64_t left = ns - now_ns();
  if (left > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(left));
}

// Where a guess put the expert's line, or null.
const std::byte* line_ahead(const FetchArgs& args, std::int32_t expert) {
  if (args.ahead == nullptr) return nullptr;
  for (const Fetch& f : std::span(args.ahead, static_cast<std::size_t>(*args.num_ahead))) {
    if (f.expert == expert) return f.to;
  }
  return nullptr;
}

}  // namespace

void guess(const GuessArgs& args, Context&) {
  const std::int32_t rows = rows_of(args.rows);
  const std::int32_t most = *args.most;
  check(most >= 0 && most <= kMaxGuesses, "guess: more lines than kMaxGuesses");
  std::int32_t n = 0;
  for (std::int32_t i = 0; i < args.slots * rows && n < most; ++i) {
    const std::int32_t expert = args.ids[i % rows * args.slots + i / rows];
    if (args.line_of[expert] >= 0) continue;
    if (args.reachable != nullptr && args.reachable[expert] == 0) continue;
    const auto same = [&](const Fetch& f) { return f.expert == expert; };
    if (std::any_of(args.fetches, args.fetches + n, same)) continue;
    args.fetches[n] = {args.lines + n * args.line_bytes, expert, 0};
    ++n;
  }
  *args.num_fetches = n;
  CacheCounters counters{};
  counters.guessed = n;
  counters.resolved_at = now_ns();
  *args.counters = counters;
}

void resolve(const ResolveArgs& args, Context&) {
  const std::int32_t rows = rows_of(args.rows);
  std::vector<Resolved> all(static_cast<std::size_t>(args.rows.max * args.slots));
  const std::int32_t count =
      flashnext::resolve(args.tables, args.ids, rows, args.slots, args.head->sequence, all.data());
  CacheCounters counters{};
  *args.num_fetches = *args.num_cpu = 0;
  for (const Resolved& r : std::span(all).first(static_cast<std::size_t>(count))) {
    args.group[r.expert] = r.group;
    if (r.group == kGroupCpu) {
      args.cpu[(*args.num_cpu)++] = r.expert;
      ++counters.on_cpu;
      continue;
    }
    std::byte* line = r.line >= 0 ? args.pool + r.line * args.layout.bytes
                                  : args.staging + r.staging * args.layout.bytes;
    args.experts[r.expert] = expert_in_line(args.layout, line);
    if (r.group == kGroupHit) {
      ++counters.hits;
      continue;
    }
    args.fetches[(*args.num_fetches)++] = {line, r.expert, 0};
    ++counters.fetched;
    if (r.line >= 0) ++counters.installed;
  }
  counters.resolved_at = now_ns();
  *args.counters = counters;
}

void fetch(const FetchArgs& args, Context& context) {
  const std::int32_t n = *args.count;
  check(n >= 0 && n <= args.max_fetches, "fetch: more lines than max_fetches");
  std::vector<const std::byte*> from;
  std::int32_t banked = 0;
  if (args.ahead != nullptr) {
    check(*args.num_ahead >= 0 && *args.num_ahead <= kMaxGuesses,
          "fetch: more lines ahead than kMaxGuesses");
  }
  for (const Fetch& f : std::span(args.fetches, static_cast<std::size_t>(n))) {
    from.push_back(line_ahead(args, f.expert));
    if (from.back() != nullptr) continue;
    from.back() = args.bank + f.expert * args.line_bytes;
    ++banked;
  }
  if (args.ahead != nullptr) {
    args.counters->guessed = *args.num_ahead;
    args.counters->guessed_in = n - banked;
  }
  if (n == 0) return;
  context.pool.parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::memcpy(args.fetches[i].to, from[static_cast<std::size_t>(i)],
                  static_cast<std::size_t>(args.line_bytes));
    }
  });
  if (args.ns_per_line > 0 && banked > 0) {
    std::int64_t free_at = args.counters->resolved_at;  // of the link
    if (args.ahead != nullptr) {
      const CacheCounters& ahead = *args.ahead_counters;
      free_at = std::max(free_at, ahead.resolved_at + ahead.fetch_ns);
    }
    sleep_until(free_at + banked * args.ns_per_line);
  }
  args.counters->fetch_ns = now_ns() - args.counters->resolved_at;
}

void cpu_post(const CpuPostArgs& args, Context&) {
  if (*args.num_cpu == 0) return;
  MailboxHead& head = *args.mail.head;
  if (std::atomic_ref(head.stalled).load() != 0) return;
  const std::int32_t rows = rows_of(args.rows);
  std::int32_t jobs = 0;
  for (std::int32_t i = 0; i < *args.num_cpu; ++i) {
    for (std::int32_t pair = 0; pair < rows * args.slots; ++pair) {
      if (args.ids[pair] == args.cpu[i]) args.mail.jobs[jobs++] = {args.cpu[i], pair};
    }
  }
  std::copy_n(args.x, static_cast<std::int64_t>(rows) * args.dim, args.mail.x);
  head.layer = args.layer;
  head.num_jobs = jobs;
  ++*args.sequence;
  if (*args.sequence == 0) *args.sequence = 1;
  std::atomic_ref(head.posted).store(*args.sequence, std::memory_order_release);
}

void cpu_join(const CpuJoinArgs& args, Context&) {
  if (*args.num_cpu == 0) return;
  MailboxHead& head = *args.mail.head;
  const std::atomic_ref<std::uint32_t> stalled(head.stalled);
  if (stalled.load() != 0) return;
  const std::int64_t start = now_ns();
  const std::atomic_ref<std::uint32_t> done(head.done);
  while (done.load(std::memory_order_acquire) != *args.sequence) {
    if (now_ns() - start > args.deadline_ns) {
      head.stalled_layer = args.layer;
      stalled.store(*args.sequence, std::memory_order_release);
      return;
    }
    std::this_thread::yield();
  }
  args.counters->wait_ns = now_ns() - start;
  for (std::int32_t i = 0; i < head.num_jobs; ++i) {
    const std::int64_t at = std::int64_t{args.mail.jobs[i].pair} * args.dim;
    std::copy_n(args.mail.y + at, args.dim, args.y + at);
  }
}

void pace(const PaceArgs& args, Context&) {
  if (args.ns == 0) {
    *args.start = now_ns();
  } else {
    sleep_until(*args.start + args.ns);
  }
}

}  // namespace flashnext::host
