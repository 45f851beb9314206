// The trellis and the rotation inside a warp (spec/exl3.md 2, spec/numerics.md 1). Files that
// include this are compiled with -fmad=false; every fused multiply-add of the contract is written
// out.
//
// Lane l of a warp owns ring positions 8l..8l+7 of a 16x16 tile: inputs 2(l&3)+{0,1,8,9} of output
// l>>2, then of output (l>>2)+8. That is the A operand of the integer mma (outputs as rows), so
// decoded weights go from registers into the tensor core. Activations lie in the same order: within
// 16 inputs, byte 4t+i of a digit plane is input 2t+{0,1,8,9}[i].
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

namespace flashnext::cuda {

inline constexpr std::uint32_t kMul1 = 0x83DCD12Du;

// (hi:lo) >> shift, low word; shift < 32.
__device__ __forceinline__ std::uint32_t funnel_right(std::uint32_t lo, std::uint32_t hi,
                                                      std::uint32_t shift) {
  return __funnelshift_r(lo, hi, shift);
}

// Bits [kShift, kShift + 16) of a word. The shift to the left is a product, which runs on another
// pipe than the shift to the right.
template <int kShift>
__device__ __forceinline__ std::uint32_t window(std::uint32_t word) {
  if constexpr (kShift == 0) return word & 0xFFFFu;
  if constexpr (kShift == 16) return word >> 16;
  std::uint32_t up;
  asm("mul.lo.u32 %0, %1, %2;" : "=r"(up) : "r"(word), "n"(1 << (16 - kShift)));
  return up >> 16;
}

// What a lane reads of a tile of kWords u16 (a constant of the kernel; 0: known at run time).
template <int kWords>
struct TileLane {
  static constexpr int kBits = kWords / 2;  // of a lane, and u32 words of the tile
  // Bits from the start of the first window to the lane's end, plus the largest distance of that
  // end from a word's.
  static constexpr int kSpan = kBits - kWords / 16 + 16;
  static constexpr int kSlack =
      kBits % 32 == 0 ? 0 : 32 - (kBits % 8 == 0 ? (kBits % 16 == 0 ? 16 : 8) : 4);
  static constexpr bool kThird = kSpan + kSlack > 64;

  int word[3];  // the word with the lane's last bit and the two before it on the ring
  std::uint32_t shift;

  __device__ TileLane(int lane, int) {
    const int end = (lane + 1) * kBits;
    word[0] = (end - 1) >> 5;
    shift = static_cast<std::uint32_t>(32 * (word[0] + 1) - end);
    word[1] = word[0] >= 1 ? word[0] - 1 : word[0] - 1 + kBits;
    word[2] = word[0] >= 2 ? word[0] - 2 : word[0] - 2 + kBits;
  }

  template <int kPosition>
  __device__ __forceinline__ static std::uint32_t state(std::uint32_t r0, std::uint32_t r1,
                                                        std::uint32_t r2) {
    constexpr int kFromEnd = kBits - (((kPosition + 1) * kWords) >> 4);
    if constexpr (kFromEnd <= 16)
      return window<kFromEnd>(r0);
    else if constexpr (kFromEnd < 32)
      return funnel_right(r0, r1, kFromEnd) & 0xFFFFu;
    else if constexpr (kFromEnd <= 48)
      return window<kFromEnd - 32>(r1);
    else
      return funnel_right(r1, r2, kFromEnd - 32) & 0xFFFFu;
  }

  // The products state * kMul1 of the lane's eight weights.
  __device__ __forceinline__ void products(const std::uint32_t* tile, std::uint32_t (&x)[8]) const {
    std::uint32_t r0 = tile[word[0]];
    std::uint32_t r1 = tile[word[1]];
    std::uint32_t r2 = kThird ? tile[word[2]] : 0;
    if constexpr (kBits % 32 != 0) {
      r0 = funnel_right(r0, r1, shift);
      r1 = funnel_right(r1, r2, shift);
      r2 >>= shift;
    }
    x[0] = state<0>(r0, r1, r2) * kMul1;
    x[1] = state<1>(r0, r1, r2) * kMul1;
    x[2] = state<2>(r0, r1, r2) * kMul1;
    x[3] = state<3>(r0, r1, r2) * kMul1;
    x[4] = state<4>(r0, r1, r2) * kMul1;
    x[5] = state<5>(r0, r1, r2) * kMul1;
    x[6] = state<6>(r0, r1, r2) * kMul1;
    x[7] = state<7>(r0, r1, r2) * kMul1;
  }
};

// Any rate: two loads and a shift a window.
template <>
struct TileLane<0> {
  int lane;
  int words;

  __device__ TileLane(int lane, int words) : lane(lane), words(words) {}

  __device__ __forceinline__ void products(const std::uint32_t* tile, std::uint32_t (&x)[8]) const {
    const int ring = words / 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int end = (((8 * lane + j + 1) * words) >> 4) + 32 * ring;
      const int hi = (end - 1) >> 5;
      const int lo = (end - 16) >> 5;
      const std::uint32_t bits = funnel_right(tile[hi % ring], tile[lo % ring],
                                              static_cast<std::uint32_t>(32 * (hi + 1) - end));
      x[j] = (bits & 0xFFFFu) * kMul1;
    }
  }
};

// d += a b for 16 outputs, 32 bytes of k, 8 columns: unsigned weights, signed activations.
__device__ __forceinline__ void mma_u8s8(int (&d)[4], std::uint32_t a0, std::uint32_t a1,
                                         std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes past L1 to a shared address.
__device__ __forceinline__ void cp_async16_shared(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

inline constexpr float kRootEighth = 0.08838834764831845f;  // 1 / sqrt(128)

// Butterflies over 128 values, four consecutive ones a lane. An upper lane's other - v is fma(-1,
// v, other): one rounding of the same difference.
__device__ __forceinline__ void butterflies(float (&v)[4], int lane) {
  const float a = __fadd_rn(v[0], v[1]);
  const float b = __fsub_rn(v[0], v[1]);
  const float c = __fadd_rn(v[2], v[3]);
  const float d = __fsub_rn(v[2], v[3]);
  v[0] = __fadd_rn(a, c);
  v[1] = __fadd_rn(b, d);
  v[2] = __fsub_rn(a, c);
  v[3] = __fsub_rn(b, d);
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    const float sign = (lane & stride) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], stride);
      v[i] = __fmaf_rn(sign, v[i], other);
    }
  }
}

// What a transformed row carries besides its digits: q = m / L, S = sum of V. A row without numbers
// has q = 0 (all zero) or NaN (not finite), and V = 0.
struct RowScale {
  float q;
  std::int32_t sum;
};

// Step 6: the value of the affine weights, from the integer product.
__device__ __forceinline__ float affine(long long a, RowScale scale) {
  constexpr float kInv = 887.0f / 131072.0f;
  constexpr float kOffset = -238.0f / 131072.0f;
  const float tail = __fmul_rn(kOffset, __fmul_rn(scale.q, __int2float_rn(scale.sum)));
  return __fmaf_rn(kInv, __fmul_rn(scale.q, __ll2float_rn(a)), tail);
}

__device__ __forceinline__ void widen_halves(uint2 bits, float (&v)[4]) {
  const __half2 lo = *reinterpret_cast<const __half2*>(&bits.x);
  const __half2 hi = *reinterpret_cast<const __half2*>(&bits.y);
  v[0] = __low2float(lo);
  v[1] = __high2float(lo);
  v[2] = __low2float(hi);
  v[3] = __high2float(hi);
}

// Step 7 for one row and 128 outputs, four a lane: v holds step 6's values; svh, bias (or null) and
// y point at the first of the 128.
__device__ __forceinline__ void finish_row(float (&v)[4], float q, int lane, const __half* svh,
                                           const float* bias, float* y) {
  butterflies(v, lane);
  float scale[4];
  widen_halves(*reinterpret_cast<const uint2*>(svh + 4 * lane), scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], kRootEighth), scale[i]);
  if (!(q > 0.0f)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = q;
  }
  if (bias != nullptr && !(q != q)) {
    const float4 b = *reinterpret_cast<const float4*>(bias + 4 * lane);
    const float c[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = q > 0.0f ? __fadd_rn(v[i], c[i]) : c[i];
  }
  *reinterpret_cast<float4*>(y + 4 * lane) = make_float4(v[0], v[1], v[2], v[3]);
}

}  // namespace flashnext::cuda
