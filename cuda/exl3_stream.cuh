// The weights of a strip on their way through shared memory: every warp of the GEMV fetches its own
// units (64 inputs, 64 outputs) into a ring of its own. And what is sent for ahead of its use.
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

// A unit in its ring slot: four rows of k-tiles, each of four tiles and 32 bytes of padding.
__host__ __device__ constexpr int row_bytes(int words) { return 8 * words + 32; }
__host__ __device__ constexpr int slot_bytes(int words) { return 4 * row_bytes(words); }

// Slots of a warp's ring. A fourth for 80 words costs more places for blocks than it hides latency
// (1.26 instead of 1.23 ms a token on an H200).
__host__ __device__ constexpr int ring_stages(int words) { return words < 80 ? 4 : 3; }

// The weights of one warp, units of 64 inputs by half of the strip's outputs: the half warp % 2, of
// the block's inputs units warp / 2, warp / 2 + kWarps / 2, ... A ring of its own.
template <int kWarps>
struct Stream {
  const std::byte* from;  // of the next unit, the lane's part: row lane / 8, 16 bytes of every 128
  std::int64_t step;
  std::uint32_t ring;  // shared address of the lane's part of slot 0
  std::uint32_t slot_size;
  int unit;  // next to fetch
  int units;

  // `first`: the block's first 64 inputs. memory: of the warp's ring.
  __device__ Stream(const Strip& strip, const uint4* memory, int first, int units, int warp,
                    int lane)
      : unit(warp >> 1), units(units) {
    from = strip.trellis + (4 * (first + unit) + (lane >> 3)) * strip.pitch +
           (warp & 1) * 8 * strip.words + 16 * (lane & 7);
    step = 2 * kWarps * strip.pitch;
    slot_size = static_cast<std::uint32_t>(slot_bytes(strip.words));
    ring = shared_address(memory) +
           static_cast<std::uint32_t>((lane >> 3) * row_bytes(strip.words) + 16 * (lane & 7));
  }

  template <int kWords>
  __device__ __forceinline__ void fetch(int slot, int words, int lane) {
    if (unit < units) {
      const std::uint32_t to = ring + static_cast<unsigned>(slot) * slot_size;
      if constexpr (kWords != 0 && kWords % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kWords / 16; ++i) cp_async16_shared(to + 128 * i, from + 128 * i);
      } else {
#pragma unroll 1
        for (int i = 0; (lane & 7) + 8 * i < words / 2; ++i) {
          cp_async16_shared(to + 128u * static_cast<unsigned>(i), from + 128 * i);
        }
      }
      from += step;
      unit += kWarps / 2;
    }
    cp_async_commit();
  }
};

}  // namespace flashnext::cuda
