// Products of fp16 weights with fp32 activations on tensor cores: the one arithmetic behind `dense`
// and `mix`, for any number of rows.
//
// An activation is scaled by 16 and split into two fp16 parts, hi + lo (relative error 2^-22,
// absolute 2^-29); each MMA m16n8k16 has 16 weight rows and 8 activation rows as its columns, and a
// column never mixes with another. The sum over k is fixed by `in` alone:
//   block   32 of k: lane t of a quad holds k = 8t .. 8t+7; MMA 0 takes the first four, MMA 1 the
//   last;
//           hi before lo
//   chunk   5 blocks, one chain of MMAs from zero
//   slice   up to 16 chunks (8 when there are more than 16), added in order
//   total   the slices, added in order, divided by 16 (exact)
// Decode kernels give a warp a chunk; tile kernels walk the chunks of a slice. Both give the same
// bits.
#pragma once

#include "cpp/device/ops.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

#include <cstdint>
#include <cuda_fp16.h>

namespace flashnext::cuda {

inline constexpr int kBlockK = 32;
inline constexpr int kChunkBlocks = 5;
inline constexpr int kChunkK = kBlockK * kChunkBlocks;
inline constexpr int kDecodeRows = 8;      // columns of one MMA
inline constexpr int kMaxDecodeRows = 32;  // more rows than these take the tile form
inline constexpr int kGroupRows = 2048;    // rows that share a workspace at a time in the tile form
inline constexpr float kSplitScale = 16.0f;
inline constexpr float kSplitUnscale = 1.0f / 16.0f;

// How k is partitioned: a function of `in` alone.
struct KSplit {
  int chunks;
  int slice_chunks;  // chunks a slice, at most 16
  int slices;
};
__host__ __device__ inline KSplit split_k(int in) {
  const int chunks = (in + kChunkK - 1) / kChunkK;
  const int per = chunks <= 16 ? chunks : 8;
  return {chunks, per, (chunks + per - 1) / per};
}

// Up to four weights of equal `in`, stacked: row v is row v - first[i] of weight i.
struct StackedWeights {
  const std::uint16_t* w[kMaxLinears];  // fp16 (out_i, in)
  std::int32_t first[kMaxLinears + 1];  // first[n] = rows in all
  std::int32_t n;
  std::int32_t in;

  __host__ __device__ int rows() const { return first[n]; }
  __device__ int find(int v) const {
    int i = 0;
    while (i + 1 < n && v >= first[i + 1]) ++i;
    return i;
  }
  // Row v, or null past the end.
  __device__ const std::uint16_t* row(int v) const {
    if (v >= first[n]) return nullptr;
    const int i = find(v);
    return w[i] + static_cast<std::size_t>(v - first[i]) * static_cast<std::size_t>(in);
  }
};

// Activations as two fp16 planes (rows, in).
struct Planes {
  std::uint16_t* hi;
  std::uint16_t* lo;
};

inline std::size_t align_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

#if defined(__CUDACC__)

__device__ __forceinline__ void split(float x, std::uint16_t& hi, std::uint16_t& lo) {
  const float scaled = x * kSplitScale;
  const __half h = __float2half_rn(scaled);
  hi = __half_as_ushort(h);
  lo = __half_as_ushort(__float2half_rn(scaled - __half2float(h)));
}

__device__ __forceinline__ float unsplit(std::uint16_t hi, std::uint16_t lo) {
  return (__half2float(__ushort_as_half(hi)) + __half2float(__ushort_as_half(lo))) * kSplitUnscale;
}

__device__ __forceinline__ std::uint32_t pack(std::uint16_t a, std::uint16_t b) {
  return static_cast<std::uint32_t>(a) | (static_cast<std::uint32_t>(b) << 16);
}

// Eight consecutive activations as two times four registers of fp16 pairs.
__device__ __forceinline__ void split8(const float4& a, const float4& b, uint4& hi, uint4& lo) {
  std::uint16_t h[8];
  std::uint16_t l[8];
  split(a.x, h[0], l[0]);
  split(a.y, h[1], l[1]);
  split(a.z, h[2], l[2]);
  split(a.w, h[3], l[3]);
  split(b.x, h[4], l[4]);
  split(b.y, h[5], l[5]);
  split(b.z, h[6], l[6]);
  split(b.w, h[7], l[7]);
  hi = {pack(h[0], h[1]), pack(h[2], h[3]), pack(h[4], h[5]), pack(h[6], h[7])};
  lo = {pack(l[0], l[1]), pack(l[2], l[3]), pack(l[4], l[5]), pack(l[6], l[7])};
}

__device__ __forceinline__ void mma(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                    std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four MMAs make one block of k; `part` numbers them. `top` and `bottom`: weights of rows g and g +
// 8; `hi`, `lo`: activation row g; all at k = 8t .. 8t+7, with g = lane / 4 and t = lane % 4. c:
// (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
__device__ __forceinline__ void mma_part(float (&c)[4], int part, const uint4& top,
                                         const uint4& bottom, const uint4& hi, const uint4& lo) {
  const uint4& b = part % 2 == 0 ? hi : lo;
  if (part < 2) {
    mma(c, top.x, bottom.x, top.y, bottom.y, b.x, b.y);
  } else {
    mma(c, top.z, bottom.z, top.w, bottom.w, b.z, b.w);
  }
}

__device__ __forceinline__ void mma_block(float (&c)[4], const uint4& top, const uint4& bottom,
                                          const uint4& hi, const uint4& lo) {
#pragma unroll
  for (int part = 0; part < 4; ++part) mma_part(c, part, top, bottom, hi, lo);
}

// A weight read once: not kept in L1.
__device__ __forceinline__ uint4 load_weight(const std::uint16_t* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The lane's weights of one chunk that starts at k0, rows `top` and `bottom` (null: zeros).
__device__ __forceinline__ void load_chunk(const std::uint16_t* top, const std::uint16_t* bottom,
                                           int in, int k0, int t, uint4 (&a)[kChunkBlocks],
                                           uint4 (&b)[kChunkBlocks]) {
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    const int k = k0 + i * kBlockK + 8 * t;
    a[i] = top != nullptr && k < in ? load_weight(top + k) : uint4{0, 0, 0, 0};
    b[i] = bottom != nullptr && k < in ? load_weight(bottom + k) : uint4{0, 0, 0, 0};
  }
}

// ---- the tile form: 128 weight rows x 32 W activation rows a block of 8 warps, with W = 2 or 4. A
// warp has 16 W weight rows and 32 activation rows.

inline constexpr int kTileM = 128;
inline constexpr int kTileThreads = 256;
inline constexpr int kTileStages = 4;
template <int W>
inline constexpr int kTileN = 32 * W;
template <int W>
inline constexpr int kTileStageBytes = (kTileM + 2 * kTileN<W>)*kBlockK * 2;
template <int W>
inline constexpr int kTileSmem = kTileStages* kTileStageBytes<W>;

// Where an element of a thread's sums lies in the tile.
template <int W>
__device__ __forceinline__ int tile_row(int i, int e) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return 16 * W * (warp / W) + 16 * i + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * (e / 2);
}
template <int W>
__device__ __forceinline__ int tile_column(int j, int e) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  return 32 * (warp % W) + 8 * j + 2 * (static_cast<int>(threadIdx.x) % 4) + e % 2;
}

__device__ __forceinline__ void cp_async16(std::uint32_t to, const void* from, bool present) {
  const int bytes = present ? 16 : 0;  // absent: zeros are written, nothing is read
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// sum[i][j]: m-tile i and n-tile j of the warp, as mma_block's c. Adds the chunks [chunk_begin,
// chunk_end) in order. row_of(m): weight row m of the tile, or null. `planes` has `rows` rows; the
// tile begins at n0.
template <int W, class RowOf>
__device__ __forceinline__ void tile_product(const RowOf& row_of, int in, Planes planes, int n0,
                                             int rows, int chunk_begin, int chunk_end, char* smem,
                                             float (&sum)[W][4][4]) {
  constexpr int kB = W / 2;  // pieces of each plane a thread fetches
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int k_begin = chunk_begin * kChunkK;
  const int k_end = min(chunk_end * kChunkK, in);
  const int steps = (k_end - k_begin + kBlockK - 1) / kBlockK;

  // A piece is 16 bytes. Absent ones are written as zeros; their addresses need only be valid.
  int k = k_begin + 8 * (tid % 4);  // of the step that is fetched next
  const std::uint16_t* a_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) a_row[i] = row_of(tid / 4 + 64 * i);
  const std::uint16_t* hi_row[kB];
  const std::uint16_t* lo_row[kB];
#pragma unroll
  for (int i = 0; i < kB; ++i) {
    const int n = n0 + tid / 4 + 64 * i;
    const std::size_t offset = static_cast<std::size_t>(n) * static_cast<std::size_t>(in);
    hi_row[i] = n < rows ? planes.hi + offset : nullptr;
    lo_row[i] = planes.lo + offset;
  }
  const std::uint32_t to_begin = static_cast<std::uint32_t>(__cvta_generic_to_shared(smem)) +
                                 static_cast<std::uint32_t>(tid) * 16;
  std::uint32_t to = to_begin;
  const auto fetch = [&]() {
    if (k < k_end + kBlockK) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool present = k < k_end && a_row[i] != nullptr;
        cp_async16(to + static_cast<std::uint32_t>(64 * i * kBlockK * 2),
                   present ? a_row[i] + k : planes.hi, present);
      }
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const bool present = k < k_end && hi_row[i] != nullptr;
        cp_async16(to + static_cast<std::uint32_t>((kTileM + 64 * i) * kBlockK * 2),
                   present ? hi_row[i] + k : planes.hi, present);
        cp_async16(to + static_cast<std::uint32_t>((kTileM + kTileN<W> + 64 * i) * kBlockK * 2),
                   present ? lo_row[i] + k : planes.hi, present);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    k += kBlockK;
    to += kTileStageBytes<W>;
    if (to == to_begin + kTileSmem<W>) to = to_begin;
  };

#pragma unroll
  for (int i = 0; i < W; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;

#pragma unroll
  for (int s = 0; s < kTileStages - 1; ++s) fetch();
  const int fragment = lane / 4 * kBlockK * 2 + lane % 4 * 16;
  const char* a_at = smem + 16 * W * (warp / W) * kBlockK * 2 + fragment;
  const char* b_at = smem + (kTileM + 32 * (warp % W)) * kBlockK * 2 + fragment;
  int stage = 0;
  for (int left = steps; left > 0; left -= kChunkBlocks) {
    const int blocks = min(left, kChunkBlocks);
    float acc[W][4][4] = {};
    for (int block = 0; block < blocks; ++block) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kTileStages - 2) : "memory");
      __syncthreads();
      fetch();
      uint4 a[W][2];
#pragma unroll
      for (int i = 0; i < W; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          a[i][half] =
              *reinterpret_cast<const uint4*>(a_at + stage + (16 * i + 8 * half) * kBlockK * 2);
          // Pairs of n-tiles: their chains advance together, each in mma_block's order.
#pragma unroll
      for (int pair = 0; pair < 4; pair += 2) {
        uint4 hi[2];
        uint4 lo[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const char* at = b_at + stage + 8 * (pair + j) * kBlockK * 2;
          hi[j] = *reinterpret_cast<const uint4*>(at);
          lo[j] = *reinterpret_cast<const uint4*>(at + kTileN<W> * kBlockK * 2);
        }
#pragma unroll
        for (int part = 0; part < 4; ++part)
#pragma unroll
          for (int i = 0; i < W; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j)
              mma_part(acc[i][pair + j], part, a[i][0], a[i][1], hi[j], lo[j]);
      }
      stage = stage + kTileStageBytes<W> == kTileSmem<W> ? 0 : stage + kTileStageBytes<W>;
    }
#pragma unroll
    for (int i = 0; i < W; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] += acc[i][j][e];
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();  // the caller may use the shared memory
}

#endif  // __CUDACC__

// ---- the shared launches (dense.cu)

struct ProductArgs {
  RowCount rows;
  std::int32_t row0;   // rows [row0, row0 + group) of the op
  std::int32_t group;  // at most kGroupRows
  StackedWeights w;
  const float* x;         // (rows, in), or null when planes are given
  Planes planes;          // (group, in), row row0 first
  float* y[kMaxLinears];  // out (rows, out_i); used when there is one slice
  float* partial;         // out (slices, group, rows of w): totals still times 16
};

// y or partial. Decode form: at most kDecodeRows rows in the group, reads x or planes.
void product_decode(cudaStream_t stream, const ProductArgs& args);
// Tile form: reads planes.
void product_tiles(cudaStream_t stream, const ProductArgs& args);

}  // namespace flashnext::cuda
