// What the two kernels of `mix` for few rows share (mix_decode.cu, mix_up.cu): weights that are
// fetched before the wait for the predecessor.
//
// Where a multiprocessor has the room they wait in shared memory, and blocks are so thin that both
// kernels lie beside the blocks of a predecessor: all their bytes travel while it computes.
// Elsewhere they wait in registers, and the first kernel asks for the weights of the second too,
// whose blocks find no place beside its own.
#pragma once

#include "cuda/cp_async.cuh"
#include "cuda/mix.cuh"

namespace flashnext::cuda {

__device__ __forceinline__ void fetch_piece(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}

// A thread's weights of one chunk, fetched ahead. In shared memory a thread reads only what it has
// copied itself, so that its own wait is enough.
template <bool kStaged>
struct Chunk;

template <>
struct Chunk<false> {
  uint4 a[kChunkBlocks];
  uint4 b[kChunkBlocks];

  __device__ __forceinline__ void fetch(const std::uint16_t* top_row,
                                        const std::uint16_t* bottom_row, int in, int k0, int t,
                                        uint4*, int) {
    load_chunk(top_row, bottom_row, in, k0, t, a, b);
  }
  __device__ __forceinline__ uint4 top(int i) const { return a[i]; }
  __device__ __forceinline__ uint4 bottom(int i) const { return b[i]; }
};

template <>
struct Chunk<true> {
  const uint4* mine;  // the thread's first of `pitch` threads' pieces
  int pitch;

  __device__ __forceinline__ void fetch(const std::uint16_t* top_row,
                                        const std::uint16_t* bottom_row, int in, int k0, int t,
                                        uint4* to, int threads) {
    mine = to;
    pitch = threads;
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const int k = k0 + i * kBlockK + 8 * t;
      copy(to + 2 * i * threads, top_row, k, in);
      copy(to + (2 * i + 1) * threads, bottom_row, k, in);
    }
  }
  __device__ __forceinline__ uint4 top(int i) const { return mine[2 * i * pitch]; }
  __device__ __forceinline__ uint4 bottom(int i) const { return mine[(2 * i + 1) * pitch]; }

  // Zeros where there is nothing; no address is read then.
  static __device__ __forceinline__ void copy(uint4* to, const std::uint16_t* row, int k, int in) {
    const bool present = row != nullptr && k < in;
    if (!present) {
      *to = {0, 0, 0, 0};
      return;
    }
    fetch_piece(to, row + k);
  }
};

constexpr int kChunkPieces = 2 * kChunkBlocks;  // of a thread and chunk

// Whether at least three blocks that stage their weights fit on a multiprocessor.
// FN_MIX_VARIANT 1: never.
inline bool has_room([[maybe_unused]] std::size_t block_bytes) {
#if defined(FN_MIX_VARIANT) && FN_MIX_VARIANT == 1
  return false;
#else
  int device = 0;
  int room = 0;
  int reserved = 0;
  FN_CUDA(cudaGetDevice(&device));
  FN_CUDA(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  FN_CUDA(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  return 3 * (block_bytes + static_cast<std::size_t>(reserved)) <= static_cast<std::size_t>(room);
#endif
}

// Nothing is worth keeping in L1; several blocks are to fit.
inline void prefer_shared(void (*kernel)(MixParams)) {
  FN_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared));
}

}  // namespace flashnext::cuda
