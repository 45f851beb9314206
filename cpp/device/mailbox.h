// The mailbox between a device that misses an expert and the processor that computes it (design.md
// 4). All of it is pinned memory that both read and write; one posting is open at a time.
//
//   device (kCpuPost): writes layer, num_jobs, jobs and x; then, with release at system scope,
//                      posted = sequence (1, 2, ..; never 0).
//   workers:           see posted change (acquire), compute every job, write y; then done =
//                      sequence (release).
//   device (kCpuJoin): waits for done == sequence (acquire) and reads y. When the deadline passes
//                      it writes stalled_layer, then stalled = sequence, and never waits again.
//
// The device reads of it only what it must, since it lies microseconds away: what the device alone
// changes it keeps in memory of its own (MailSequence).
//
// The next posting is written only after the join of the one before, which a stream's order grants.
// The workers make no call of the device and wait for nobody who launches.
#pragma once

#include <cstdint>

namespace flashnext {

struct alignas(64) MailboxHead {
  std::int32_t layer;
  std::int32_t num_jobs;
  alignas(64) std::uint32_t posted;
  alignas(64) std::uint32_t done;
  alignas(64) std::uint32_t stalled;  // 0: never
  std::int32_t stalled_layer;
};

// One (row, slot) pair: pair = row * slots + slot. Jobs of one expert stand side by side.
struct MailJob {
  std::int32_t expert;
  std::int32_t pair;
};

// What the device alone changes of the mailbox, in its own memory.
struct MailSequence {
  std::uint32_t posted;   // of the last posting, counted up by each
  std::uint32_t stalled;  // as in the head
};

struct MailView {
  MailboxHead* head;  // (1)
  MailJob* jobs;      // (max pairs)
  float* x;           // (max rows, dim)
  float* y;           // (max pairs, dim): row `pair`
};

}  // namespace flashnext
