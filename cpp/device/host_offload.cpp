// The ops of experts in host memory (kResolve, kFetch, kCpuPost, kCpuJoin, kPace) on the host.
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

}  // namespace

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
  if (n == 0) return;
  context.pool.parallel_for(n, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Fetch& f = args.fetches[i];
      std::memcpy(f.to, args.bank + f.expert * args.line_bytes,
                  static_cast<std::size_t>(args.line_bytes));
    }
  });
  if (args.ns_per_line > 0) sleep_until(args.counters->resolved_at + n * args.ns_per_line);
  args.counters->fetch_ns = now_ns() - args.counters->resolved_at;
}

void cpu_post(const CpuPostArgs& args, Context&) {
  if (*args.num_cpu == 0) return;
  MailboxHead& head = *args.mail.head;
  if (args.sequence->stalled != 0) return;
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
  std::uint32_t& posted = args.sequence->posted;
  if (++posted == 0) posted = 1;
  std::atomic_ref(head.posted).store(posted, std::memory_order_release);
}

void cpu_join(const CpuJoinArgs& args, Context&) {
  if (*args.num_cpu == 0) return;
  MailboxHead& head = *args.mail.head;
  MailSequence& sequence = *args.sequence;
  if (sequence.stalled != 0) return;
  const std::int64_t start = now_ns();
  const std::atomic_ref<std::uint32_t> done(head.done);
  while (done.load(std::memory_order_acquire) != sequence.posted) {
    if (now_ns() - start > args.deadline_ns) {
      sequence.stalled = sequence.posted;
      head.stalled_layer = args.layer;
      std::atomic_ref(head.stalled).store(sequence.posted, std::memory_order_release);
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
