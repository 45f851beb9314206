// The weights of a strip on their way through shared memory: every warp of the GEMV fetches its own
// units (32 inputs, 128 outputs) into a ring of its own. And what is sent for ahead of its use.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/exl3_locate.cuh"
#include "cuda/exl3_trellis.cuh"

namespace flashnext::cuda {

// A line that nobody writes, towards L2.
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// The table of experts, shared out over the blocks.
__device__ __forceinline__ void prefetch_table(const Jobs& jobs) {
  const int step = static_cast<int>(gridDim.x * gridDim.y);
  const int lines = jobs.num_experts * static_cast<int>(sizeof(ExpertRef)) / 128;
#pragma unroll 1
  for (int line = static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y); line < lines;
       line += step) {
    prefetch_line(reinterpret_cast<const std::byte*>(jobs.experts) + 128 * line);
  }
}

// What the transform and the end read of the strip. Read there, it would come from memory.
__device__ __forceinline__ void prefetch_scales(const Strip& strip, int first, int blocks) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 2 * blocks) prefetch_line(strip.suh + first + 64 * thread);
  if (thread < 2) prefetch_line(strip.svh + 64 * thread);
  if (thread < 4 && strip.bias != nullptr) prefetch_line(strip.bias + 32 * thread);
}

// One unit: two k-tiles of the strip, to the lane's part of a ring slot.
template <int kWords>
__device__ __forceinline__ void fetch_unit(std::uint32_t to, const std::byte* row0,
                                           const std::byte* row1, int words, int lane) {
  const int w = kWords != 0 ? kWords : words;
#pragma unroll
  for (int i = 0; i < (2 * w + 31) / 32; ++i) {
    if (kWords == 0 || 2 * kWords % 32 != 0) {
      if (lane + 32 * i >= 2 * w) break;
    }
    const std::byte* from = lane + 32 * i < w ? row0 : row1;
    cp_async16_shared(to + 512u * static_cast<unsigned>(i), from + 512 * i);
  }
}

// The weights of one warp: units warp, warp + kWarps, ... of the block, through a ring of its own.
template <int kWarps>
struct Stream {
  const std::byte* row0;  // of the next unit, the lane's part
  const std::byte* row1;
  std::int64_t step;
  std::uint32_t ring;  // shared address of the lane's part of slot 0
  std::uint32_t slot_bytes;
  int unit;  // next to fetch
  int units;

  // `first`: the block's first unit. memory: the rings of all warps.
  __device__ Stream(const Strip& strip, const uint4* memory, int stages, int first, int units,
                    int warp, int lane)
      : unit(warp), units(units) {
    row0 = strip.trellis + 2 * (first + warp) * strip.pitch + 16 * lane;
    row1 = row0 + strip.pitch - 16 * strip.words;
    step = 2 * kWarps * strip.pitch;
    slot_bytes = static_cast<std::uint32_t>(32 * strip.words);
    ring = shared_address(memory) + static_cast<std::uint32_t>(warp * stages) * slot_bytes +
           16u * static_cast<unsigned>(lane);
  }

  template <int kWords>
  __device__ __forceinline__ void fetch(int slot, int words, int lane) {
    if (unit < units) {
      fetch_unit<kWords>(ring + static_cast<unsigned>(slot) * slot_bytes, row0, row1, words, lane);
      row0 += step;
      row1 += step;
      unit += kWarps;
    }
    cp_async_commit();
  }
};

}  // namespace flashnext::cuda
