// One EXL3 linear as pointers (spec/exl3.md 1.1). A plain struct: host code, op arguments and
// kernels share it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashnext {

// On the host the pointers may be unaligned (in place in a mapped file); on CUDA every member is
// 16-byte aligned.
struct Exl3Weight {
  const std::byte* trellis;  // u16 (in/16, out/16, words)
  const std::byte* suh;      // fp16 (in)
  const std::byte* svh;      // fp16 (out)
  const float* bias;         // fp32 (out), or null
  std::int32_t in;           // multiple of 128
  std::int32_t out;          // multiple of 128
  std::int32_t words;        // u16 words a tile = 16 K; also 24, 40, 56 for K = 1.5, 2.5, 3.5
  std::int32_t reserved;
};

}  // namespace flashnext
