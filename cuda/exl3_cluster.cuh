// Blocks of a cluster push 32-bit maxima and sums into each other's shared memory. The receiver
// counts bytes with a barrier of its own: a push is one way, and nobody fences or waits for all.
//
// Order: a block initialises its barriers and targets, arrives at the cluster barrier, and calls
// await_cluster() before its first push; a receiver expects its bytes once and awaits them once; a
// block that receives nothing more may end.
#pragma once

#include "cuda/cp_async.cuh"

#include <cstdint>

namespace flashnext::cuda {

// The other half of the arrival at a kernel's start: all blocks of the cluster have initialised
// what others push to.
__device__ __forceinline__ void await_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barriers in shared memory that complete when one thread has arrived with a number of bytes and as
// many bytes were pushed.
__device__ __forceinline__ void init_barrier(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void expect_bytes(std::uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void await(std::uint64_t* barrier) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
  }
}
__device__ __forceinline__ std::uint32_t address_at(const void* p, int rank) {
  std::uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  return there;
}
// *p += value in this block, while others may push to it.
__device__ __forceinline__ void add_here(std::int32_t* p, std::int32_t value) {
  asm volatile("red.relaxed.cluster.shared::cta.add.s32 [%0], %1;" ::"r"(shared_address(p)),
               "r"(value)
               : "memory");
}
// *p = max(*p, value) or *p += value in the block of that rank; four bytes for its barrier.
__device__ __forceinline__ void push_max(std::uint32_t* p, std::uint32_t value,
                                         std::uint64_t* barrier, int rank) {
  asm volatile(
      "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.u32 [%0], %1, "
      "[%2];" ::"r"(address_at(p, rank)),
      "r"(value), "r"(address_at(barrier, rank))
      : "memory");
}
__device__ __forceinline__ void push_sum(std::int32_t* p, std::int32_t value,
                                         std::uint64_t* barrier, int rank) {
  asm volatile(
      "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.s32 [%0], %1, "
      "[%2];" ::"r"(address_at(p, rank)),
      "r"(value), "r"(address_at(barrier, rank))
      : "memory");
}

}  // namespace flashnext::cuda
