// Where the weights and results of one strip (128 outputs of one projection) lie.
#pragma once

#include "cuda/exl3_jobs.h"

namespace flashnext::cuda {

struct Strip {
  const std::byte* trellis;  // of k-tile 0
  std::int64_t pitch;        // bytes from one k-tile to the next
  const __half* suh;         // (in)
  const __half* svh;         // (128)
  const float* bias;         // (128) or null
  float* y;                  // column 0 of the strip in row 0
  int out;                   // row length of y
  int words;
  int plane;
};

__device__ __forceinline__ int projection_of(const Jobs& jobs, int strip) {
  int p = 0;
  while (p + 1 < jobs.n + jobs.shared_n && strip >= jobs.projection[p + 1].strip0) ++p;
  return p;
}

__device__ __forceinline__ int words_of(const Jobs& jobs, int strip) {
  return jobs.projection[projection_of(jobs, strip)].words;
}

// Other kernels may rewrite the table between launches, so it is read past L1.
template <class T>
__device__ __forceinline__ const T* read_table(const std::byte* const* entry) {
  static_assert(sizeof(unsigned long long) == sizeof entry);
  return reinterpret_cast<const T*>(__ldcg(reinterpret_cast<const unsigned long long*>(entry)));
}

// `ref`: the expert, unless the launch is of linears.
__device__ __forceinline__ Strip locate(const Jobs& jobs, int strip, const ExpertRef* ref) {
  const Projection& projection = jobs.projection[projection_of(jobs, strip)];
  const int column = 128 * (strip - projection.strip0);
  const std::byte* trellis = projection.trellis;
  const __half* suh = projection.suh;
  const __half* svh = projection.svh;
  if (jobs.experts != nullptr) {
    trellis = read_table<std::byte>(ref->trellis + projection.member);
    suh = read_table<__half>(ref->suh + projection.member);
    svh = read_table<__half>(ref->svh + projection.member);
  }
  Strip s;
  s.trellis = trellis + column / 16 * projection.words * 2;
  s.pitch = static_cast<std::int64_t>(projection.out / 16) * projection.words * 2;
  s.suh = suh;
  s.svh = svh + column;
  s.bias = projection.bias != nullptr ? projection.bias + column : nullptr;
  s.y = projection.y + column;
  s.out = projection.out;
  s.words = projection.words;
  s.plane = projection.plane;
  return s;
}

}  // namespace flashnext::cuda
