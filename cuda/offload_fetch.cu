// fetch: lines from pinned memory, read in place over the link. pace: a slower link is played.
#include "cpp/base/errors.h"
#include "cuda/device_clock.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

// A few blocks keep the link full and leave room for the kernels of a parallel branch.
constexpr int kBlocks = 80;
constexpr int kThreads = 256;
// Read once: not kept in L1.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// The lines in order as one run of 16-byte pieces, which the grid walks with all its threads: early
// lines are complete early, and one line is shared by every block. The grid is that of the most
// lines, since a graph fixes it.
//
// One load a thread, 320 KB in all, fills a link of 50 GB/s. More would only stand in line, and
// with them whatever else goes over the link or asks the same memory, such as the processor's
// share.
//
// The next kernel starts when this one ends, not before: waiting for the link it would only take
// room.
__global__ void __launch_bounds__(kThreads, 4)
    fetch_kernel(const FetchArgs args, std::uint32_t pieces_of_line) {
  __shared__ Fetch fetches[kMaxPairs];
  pdl_wait();
  const int count = *args.count < args.max_fetches ? *args.count : args.max_fetches;
  if (count <= 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    fetches[i] = args.fetches[i];
  }
  __syncthreads();
  const std::uint32_t pieces = static_cast<std::uint32_t>(count) * pieces_of_line;
  for (std::uint32_t piece = blockIdx.x * kThreads + threadIdx.x; piece < pieces;
       piece += kBlocks * kThreads) {
    const std::uint32_t line = piece / pieces_of_line;
    const std::int64_t at = 16 * static_cast<std::int64_t>(piece - line * pieces_of_line);
    const Fetch& fetch = fetches[line];
    *reinterpret_cast<uint4*>(fetch.to + at) =
        load_once(args.bank + fetch.expert * args.line_bytes + at);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const std::int64_t start = args.counters->resolved_at;
  if (blockIdx.x == 0 && args.ns_per_line > 0) sleep_until(start + count * args.ns_per_line);
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
  check(args.max_fetches >= 0 && args.max_fetches <= kMaxPairs, "fetch: number of lines");
  check(args.line_bytes > 0 && args.line_bytes % 16 == 0 &&
            args.line_bytes / 16 <= 0x7fffffff / kMaxPairs,
        "fetch: bytes of a line");
  check(reinterpret_cast<std::uintptr_t>(args.bank) % 16 == 0, "fetch: alignment of the bank");
  if (args.max_fetches == 0) return;
  launch_pdl(stream, fetch_kernel, dim3(kBlocks), dim3(kThreads), 0, args,
             static_cast<std::uint32_t>(args.line_bytes / 16));
}

void pace(cudaStream_t stream, const PaceArgs& args) {
  launch_pdl(stream, pace_kernel, dim3(1), dim3(1), 0, args);
}

}  // namespace flashnext::cuda
