// fetch: lines from pinned memory, read in place over the link, or from where they were copied
// ahead. pace: a slower link is played.
#include "cpp/base/errors.h"
#include "cuda/device_clock.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr int kMaxFetches = 128;
// A few blocks keep the link full and leave room for the kernels of a parallel branch.
constexpr int kBlocks = 80;
constexpr int kThreads = 256;
constexpr int kNearBlocks = 48;  // more of them, for what was copied ahead
constexpr unsigned kAll = 0xFFFFFFFFu;

// Read once: not kept in L1.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// What lies near is read from L2 or device memory; past L1, where an older line may be left.
__device__ __forceinline__ uint4 load_near(const void* from) {
  return __ldcg(static_cast<const uint4*>(from));
}

struct Line {
  const std::byte* from;
  std::byte* to;
};

// A run of 16-byte pieces: the lines in order, shared by `threads` threads.
struct Run {
  const Line* lines;
  std::uint32_t pieces;
  std::uint32_t pieces_of_line;

  __device__ __forceinline__ std::int64_t locate(std::uint32_t piece, std::uint32_t* line) const {
    *line = piece / pieces_of_line;
    return 16 * static_cast<std::int64_t>(piece - *line * pieces_of_line);
  }
};

__device__ __forceinline__ void copy_far(const Run& run, std::uint32_t first,
                                         std::uint32_t threads) {
#pragma unroll 1
  for (std::uint32_t piece = first; piece < run.pieces; piece += threads) {
    std::uint32_t line;
    const std::int64_t at = run.locate(piece, &line);
    *reinterpret_cast<uint4*>(run.lines[line].to + at) = load_once(run.lines[line].from + at);
  }
}

__device__ __forceinline__ void copy_near(const Run& run, std::uint32_t first,
                                          std::uint32_t threads) {
#pragma unroll 1
  for (std::uint32_t piece = first; piece < run.pieces; piece += 2 * threads) {
    const bool two = piece + threads < run.pieces;
    std::uint32_t line;
    std::int64_t at = run.locate(piece, &line);
    uint4* to = reinterpret_cast<uint4*>(run.lines[line].to + at);
    const uint4 v = load_near(run.lines[line].from + at);
    if (two) {
      at = run.locate(piece + threads, &line);
      const uint4 w = load_near(run.lines[line].from + at);
      *reinterpret_cast<uint4*>(run.lines[line].to + at) = w;
    }
    *to = v;
  }
}

// The lines out of the bank in order as one run of pieces, which kBlocks walk with all their
// threads: early lines are complete early, and one line is shared by every block. The grid is that
// of the most lines, since a graph fixes it.
//
// One load a thread, 320 KB in all, fills a link of 50 GB/s. More would only stand in line, and
// with them whatever else goes over the link or asks the same memory, such as the processor's
// share.
//
// What was copied ahead is a run of its own for blocks of its own, so that the link does not wait
// for it; for all of them when nothing comes from the bank.
//
// The next kernel starts when this one ends, not before: waiting for the link it would only take
// room.
__global__ void __launch_bounds__(kThreads, 6)
    fetch_kernel(const FetchArgs args, std::uint32_t pieces_of_line) {
  __shared__ Line lines[kMaxFetches];  // those of the bank, then those ahead
  __shared__ std::uint32_t near_bits[kMaxFetches / 32];
  pdl_wait();
  const int t = static_cast<int>(threadIdx.x);
  const bool guesses = args.ahead != nullptr;
  // All that may be needed is asked for at once.
  Fetch fetch{}, there{};
  if (t < args.max_fetches) fetch = args.fetches[t];
  if (guesses && t % 32 < kMaxGuesses) there = args.ahead[t % 32];
  int ahead = guesses ? *args.num_ahead : 0;
  int count = *args.count;
  ahead = ahead < kMaxGuesses ? ahead : kMaxGuesses;
  count = count < args.max_fetches ? count : args.max_fetches;
  const bool reports = blockIdx.x == 0 && t == 0;
  if (reports && guesses) args.counters->guessed = ahead;
  if (count <= 0) {
    if (reports && guesses) args.counters->guessed_in = 0;
    return;
  }
  Line mine{args.bank + fetch.expert * args.line_bytes, fetch.to};
  bool near = false;
  for (int i = 0; i < ahead; ++i) {
    const std::int32_t expert = __shfl_sync(kAll, there.expert, i);
    const auto from = __shfl_sync(kAll, reinterpret_cast<unsigned long long>(there.to), i);
    if (t >= count || expert != fetch.expert) continue;
    mine.from = reinterpret_cast<const std::byte*>(from);
    near = true;
  }
  if (t < kMaxFetches) {
    const unsigned bits = __ballot_sync(kAll, near);
    if (t % 32 == 0) near_bits[t / 32] = bits;
  }
  __syncthreads();
  int before = 0, num_near = 0;
#pragma unroll
  for (int w = 0; w < kMaxFetches / 32; ++w) {
    const unsigned mask = w < t / 32 ? kAll : w == t / 32 ? (1u << (t % 32)) - 1u : 0;
    before += __popc(near_bits[w] & mask);
    num_near += __popc(near_bits[w]);
  }
  const int num_far = count - num_near;
  if (t < count) lines[near ? num_far + before : t - before] = mine;
  __syncthreads();
  const std::uint32_t first = blockIdx.x * kThreads + threadIdx.x;
  if (num_far > 0 && blockIdx.x < kBlocks) {
    copy_far({lines, static_cast<std::uint32_t>(num_far) * pieces_of_line, pieces_of_line}, first,
             kBlocks * kThreads);
  } else {
    const unsigned others = num_far > 0 ? kBlocks : 0;
    copy_near(
        {lines + num_far, static_cast<std::uint32_t>(num_near) * pieces_of_line, pieces_of_line},
        first - others * kThreads, (gridDim.x - others) * kThreads);
  }
  __syncthreads();
  if (t != 0) return;
  const std::int64_t start = args.counters->resolved_at;
  if (reports) {
    if (guesses) args.counters->guessed_in = num_near;
    if (args.ns_per_line > 0 && num_far > 0) {
      std::int64_t free_at = start;  // of the link
      if (guesses) {
        const std::int64_t end = args.ahead_counters->resolved_at + args.ahead_counters->fetch_ns;
        free_at = end > free_at ? end : free_at;
      }
      sleep_until(free_at + num_far * args.ns_per_line);
    }
  }
  atomicMax(reinterpret_cast<long long*>(&args.counters->fetch_ns),
            static_cast<long long>(device_clock() - start));
}

__global__ void pace_kernel(const PaceArgs args) {
  pdl_wait();
  if (args.ns == 0) {
    *args.start = device_clock();
  } else {
    sleep_until(*args.start + args.ns);
  }
}

}  // namespace

void fetch(cudaStream_t stream, const FetchArgs& args) {
  check(args.max_fetches >= 0 && args.max_fetches <= kMaxFetches, "fetch: number of lines");
  check(args.line_bytes > 0 && args.line_bytes % 16 == 0 &&
            args.line_bytes / 16 <= 0x7fffffff / kMaxFetches,
        "fetch: bytes of a line");
  check(reinterpret_cast<std::uintptr_t>(args.bank) % 16 == 0, "fetch: alignment of the bank");
  check(args.ahead == nullptr || (args.num_ahead != nullptr && args.ahead_counters != nullptr),
        "fetch: lines ahead without their number or counters");
  if (args.max_fetches == 0) return;
  launch_pdl(stream, fetch_kernel, dim3(args.ahead == nullptr ? kBlocks : kBlocks + kNearBlocks),
             dim3(kThreads), 0, args, static_cast<std::uint32_t>(args.line_bytes / 16));
}

void pace(cudaStream_t stream, const PaceArgs& args) {
  launch_pdl(stream, pace_kernel, dim3(1), dim3(1), 0, args);
}

}  // namespace flashnext::cuda
