// Shared by the attention kernels: the dims that they are built for.
#pragma once

#include "cpp/base/errors.h"
#include "cpp/device/ops.h"

namespace flashnext::cuda::attn {

inline constexpr int kHeadDim = 256;
inline constexpr int kRotary = 64;
inline constexpr int kIndexHeads = 4;
inline constexpr int kIndexDim = 128;
inline constexpr int kBlock = 4;      // tokens of a selection block
inline constexpr int kMmaHeads = 16;  // query heads of a kv head, padded to the MMA rows

inline void check_dims(const AttnDims& d) {
  check(d.head_dim == kHeadDim && d.rotary == kRotary,
        "attention: the CUDA kernels are built for heads of 256 with 64 rotated dims");
  check(d.index_heads == kIndexHeads && d.index_dim == kIndexDim && d.block == kBlock,
        "attention: the CUDA kernels are built for 4 index heads of 128 and blocks of 4 tokens");
  check(d.kv_heads > 0 && d.heads % d.kv_heads == 0 && d.heads / d.kv_heads <= kMmaHeads,
        "attention: the CUDA kernels take at most 16 query heads a kv head");
  check(d.max_blocks > 0, "attention: no block may be selected");
}

}  // namespace flashnext::cuda::attn
