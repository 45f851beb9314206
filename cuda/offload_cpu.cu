// cpu_post and cpu_join: the device's half of the mailbox (cpp/device/mailbox.h has the protocol).
//
// The mailbox lies in pinned memory, microseconds away, and more while lines are fetched: what does
// not depend on each other is asked for at once, and everything is read past the caches.
#include "cpp/base/errors.h"
#include "cuda/device_clock.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

constexpr int kPostThreads = 640;  // 16-byte pieces of a row of 2,560
static_assert(kMaxPairs <= kPostThreads, "a thread a pair");
constexpr int kJoinThreads = 1024;
constexpr int kFlight = 4;  // loads that a thread has under way
constexpr unsigned kPollNs = 250;

__device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

// Of what lies on the device and is changed by an op before.
__device__ __forceinline__ MailSequence load_sequence(const MailSequence* from) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
  return {v.x, v.y};
}

__device__ __forceinline__ void store_release(std::uint32_t* to, std::uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// One block. The writes of all threads are ordered before `posted` by the barrier and the release
// of one thread, which is cumulative.
__global__ void __launch_bounds__(kPostThreads) cpu_post_kernel(const CpuPostArgs args) {
  __shared__ std::int32_t cpu[kMaxPairs];
  __shared__ std::int32_t turn[kMaxPairs];  // place of a pair's expert in `cpu`, or `experts`
  pdl_trigger();
  pdl_wait();
  const int experts = *args.num_cpu;
  const MailSequence last = load_sequence(args.sequence);
  if (experts == 0 || last.stalled != 0) return;
  const int t = static_cast<int>(threadIdx.x);
  const int rows = rows_now(args.rows);
  const int pairs = rows * args.slots;
  if (t < experts) cpu[t] = args.cpu[t];
  const std::int32_t id = t < pairs ? args.ids[t] : -1;
  const int pieces = rows * (args.dim / 4);
#pragma unroll 1
  for (int first = t; first < pieces; first += kFlight * kPostThreads) {
    uint4 v[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int piece = first + i * kPostThreads;
      if (piece < pieces) v[i] = reinterpret_cast<const uint4*>(args.x)[piece];
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int piece = first + i * kPostThreads;
      if (piece < pieces) reinterpret_cast<uint4*>(args.mail.x)[piece] = v[i];
    }
  }
  __syncthreads();
  if (t < pairs) {
    int place = experts;
    for (int i = 0; i < experts; ++i) place = cpu[i] == id ? i : place;
    turn[t] = place;
  }
  __syncthreads();
  bool posted = false;
  if (t < pairs && turn[t] < experts) {
    int place = 0;
    for (int j = 0; j < pairs; ++j) {
      place += turn[j] < turn[t] || (turn[j] == turn[t] && j < t) ? 1 : 0;
    }
    args.mail.jobs[place] = {cpu[turn[t]], t};
    posted = true;
  }
  const int jobs = __syncthreads_count(posted ? 1 : 0);
  if (t != 0) return;
  std::uint32_t sequence = last.posted + 1;
  if (sequence == 0) sequence = 1;
  args.sequence->posted = sequence;
  args.mail.head->layer = args.layer;
  args.mail.head->num_jobs = jobs;
  store_release(&args.mail.head->posted, sequence);
}

// Whether the posting was done before the deadline. Looks now and then, without an acquire each
// time: the lines that are fetched meanwhile come over the same link.
__device__ bool wait_for_processor(const CpuJoinArgs& args, std::uint32_t sequence,
                                   std::int64_t start) {
  MailboxHead* head = args.mail.head;
  while (load_relaxed(&head->done) != sequence) {
    if (device_clock() - start > args.deadline_ns) {
      args.sequence->stalled = sequence;
      head->stalled_layer = args.layer;
      store_release(&head->stalled, sequence);
      return false;
    }
    __nanosleep(kPollNs);
  }
  asm volatile("fence.acq_rel.sys;" ::: "memory");
  return true;
}

// One block, since it stays while others work. Beside the wait, other warps fetch what was posted:
// at least a job an expert.
__global__ void __launch_bounds__(kJoinThreads) cpu_join_kernel(const CpuJoinArgs args) {
  __shared__ std::int32_t pair_of[kMaxPairs];
  __shared__ std::int32_t num_jobs;
  __shared__ bool done;
  pdl_wait();
  const int experts = *args.num_cpu;
  const MailSequence last = load_sequence(args.sequence);
  if (experts == 0 || last.stalled != 0) return;
  const MailboxHead* head = args.mail.head;
  const int t = static_cast<int>(threadIdx.x);
  const auto read = [](const std::int32_t* from) {
    return static_cast<std::int32_t>(load_relaxed(reinterpret_cast<const std::uint32_t*>(from)));
  };
  if (t == 0) {
    const std::int64_t start = device_clock();
    done = wait_for_processor(args, last.posted, start);
    if (done) args.counters->wait_ns = device_clock() - start;
  } else if (t >= 32) {
    const int n = read(&head->num_jobs);
    if (t == 32) num_jobs = n;
    for (int i = t - 32; i < kMaxPairs && i < (experts > n ? experts : n); i += kJoinThreads - 32) {
      pair_of[i] = read(&args.mail.jobs[i].pair);
    }
  }
  __syncthreads();
  if (!done) return;
  pdl_trigger();
  const int row_pieces = args.dim / 4;
  const int pieces = num_jobs * row_pieces;
#pragma unroll 1
  for (int first = t; first < pieces; first += kFlight * kJoinThreads) {
    uint4 v[kFlight];
    std::int64_t at[kFlight];  // of a 16-byte piece in y
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int piece = first + i * kJoinThreads;
      if (piece >= pieces) continue;
      const int job = piece / row_pieces;
      at[i] = std::int64_t{pair_of[job]} * row_pieces + (piece - job * row_pieces);
      v[i] = load_relaxed(reinterpret_cast<const uint4*>(args.mail.y) + at[i]);
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      if (first + i * kJoinThreads < pieces) reinterpret_cast<uint4*>(args.y)[at[i]] = v[i];
    }
  }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

void cpu_post(cudaStream_t stream, const CpuPostArgs& args) {
  check(args.rows.max >= 1 && args.slots >= 1 && args.rows.max * args.slots <= kMaxPairs,
        "cpu_post: rows and slots");
  check(args.dim > 0 && args.dim % 4 == 0, "cpu_post: dim must be a multiple of 4");
  check(aligned(args.x) && aligned(args.mail.x), "cpu_post: alignment of x");
  launch_pdl(stream, cpu_post_kernel, dim3(1), dim3(kPostThreads), 0, args);
}

void cpu_join(cudaStream_t stream, const CpuJoinArgs& args) {
  check(args.dim > 0 && args.dim % 4 == 0, "cpu_join: dim must be a multiple of 4");
  check(aligned(args.y) && aligned(args.mail.y), "cpu_join: alignment of y");
  launch_pdl(stream, cpu_join_kernel, dim3(1), dim3(kJoinThreads), 0, args);
}

}  // namespace flashnext::cuda
