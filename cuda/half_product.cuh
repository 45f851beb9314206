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

// Four consecutive activations, to 8 bytes of each plane.
__device__ __forceinline__ void split4(const float4& v, std::uint16_t* hi_to,
                                       std::uint16_t* lo_to) {
  std::uint16_t hi[4];
  std::uint16_t lo[4];
  split(v.x, hi[0], lo[0]);
  split(v.y, hi[1], lo[1]);
  split(v.z, hi[2], lo[2]);
  split(v.w, hi[3], lo[3]);
  *reinterpret_cast<uint2*>(hi_to) = {pack(hi[0], hi[1]), pack(hi[2], hi[3])};
  *reinterpret_cast<uint2*>(lo_to) = {pack(lo[0], lo[1]), pack(lo[2], lo[3])};
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

// The same of eight that lie in memory.
__device__ __forceinline__ void split8(const float* x, uint4& hi, uint4& lo) {
  split8(*reinterpret_cast<const float4*>(x), *reinterpret_cast<const float4*>(x + 4), hi, lo);
}

// c += a chunk that starts at k0, in order. load(k, hi, lo) fills in the activations k .. k + 7 of
// row g, or leaves the zeros.
template <class Load>
__device__ __forceinline__ void chunk_product(const uint4 (&top)[kChunkBlocks],
                                              const uint4 (&bottom)[kChunkBlocks], int k0, int t,
                                              const Load& load, float (&c)[4]) {
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    uint4 hi = {0, 0, 0, 0};
    uint4 lo = {0, 0, 0, 0};
    load(k0 + i * kBlockK + 8 * t, hi, lo);
    mma_block(c, top[i], bottom[i], hi, lo);
  }
}

// Of so few rows only some lanes need fragments: all lanes split a warp's activations and hand them
// on through shared memory, which takes one round of loads and a fraction of the instructions.
inline constexpr int kStagedRows = 4;

// A warp's chunk of every row.
template <int kRows>
struct ChunkPlanes {
  alignas(16) std::uint16_t hi[kRows][kChunkK];
  alignas(16) std::uint16_t lo[kRows][kChunkK];
};

// The chunk at k0 of x (rows, in) as planes; zeros past the end. Ends with __syncwarp(). From L2: a
// multiprocessor may still hold an older x.
template <int kRows>
__device__ __forceinline__ void stage_chunk(const float* x, int rows, int in, int k0, int lane,
                                            ChunkPlanes<kRows>& planes) {
  static_assert(kChunkK == 5 * 32, "five values a lane: four and one");
  float4 four[kRows];
  float one[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float* from = x + static_cast<std::size_t>(row) * static_cast<std::size_t>(in) + k0;
    four[row] = {0.0f, 0.0f, 0.0f, 0.0f};
    one[row] = 0.0f;
    if (row < rows && k0 + 4 * lane < in) {
      four[row] = __ldcg(reinterpret_cast<const float4*>(from + 4 * lane));
    }
    if (row < rows && k0 + 128 + lane < in) one[row] = __ldcg(from + 128 + lane);
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    split4(four[row], &planes.hi[row][4 * lane], &planes.lo[row][4 * lane]);
    split(one[row], planes.hi[row][128 + lane], planes.lo[row][128 + lane]);
  }
  __syncwarp();
}

// c += the chunk at k0 of x (rows, in), by a whole warp.
template <int kRows>
__device__ __forceinline__ void staged_product(const uint4 (&top)[kChunkBlocks],
                                               const uint4 (&bottom)[kChunkBlocks], const float* x,
                                               int rows, int in, int k0, int lane,
                                               ChunkPlanes<kRows>& planes, float (&c)[4]) {
  stage_chunk(x, rows, in, k0, lane, planes);
  const int g = lane / 4;
  chunk_product(
      top, bottom, 0, lane % 4,
      [&](int k, uint4& hi, uint4& lo) {
        if (g >= kRows) return;
        hi = *reinterpret_cast<const uint4*>(&planes.hi[g % kRows][k]);
        lo = *reinterpret_cast<const uint4*>(&planes.lo[g % kRows][k]);
      },
      c);
}

// ---- the tile form: 128 weight rows x 32 W activation rows a block of 8 warps, with W = 2 or 4. A
// warp has 16 W weight rows and 32 activation rows.

inline constexpr int kTileM = 128;
inline constexpr int kTileThreads = 256;
inline constexpr int kTileStages = 4;      // fit every GPU
inline constexpr int kDeepTileStages = 6;  // where there is room: weights and rows may lie in DRAM
template <int W>
inline constexpr int kTileN = 32 * W;
template <int W>
inline constexpr int kTileStageBytes = (kTileM + 2 * kTileN<W>)*kBlockK * 2;
template <int W>
inline constexpr int kTileSmem = kTileStages* kTileStageBytes<W>;
template <int W>
inline constexpr int kDeepTileSmem = kDeepTileStages* kTileStageBytes<W>;

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

// At most kPending groups of copies of this thread are still under way; kDeepPending if deep.
template <int kPending, int kDeepPending>
__device__ __forceinline__ void cp_wait(bool deep) {
  if (deep) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kDeepPending) : "memory");
  } else {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  }
}

__device__ __forceinline__ void cp_async16(std::uint32_t to, const void* from, bool present) {
  const int bytes = present ? 16 : 0;  // absent: zeros are written, nothing is read
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// sum[i][j]: m-tile i and n-tile j of the warp, as mma_block's c. Adds the chunks [chunk_begin,
// chunk_end) in order. row_of(m): weight row m of the tile, or null. `planes` has `rows` rows; the
// tile begins at n0. deep: `smem` has kDeepTileSmem bytes instead of kTileSmem.
//
// Fragments are read ahead, so that no MMA waits for shared memory: while a block's MMAs run, the
// activations of the next block are read, and the weights of the next m-tile. The barrier of a
// block therefore says that the block after it has arrived too.
template <int W, class RowOf>
__device__ __forceinline__ void tile_product(const RowOf& row_of, int in, Planes planes, int n0,
                                             int rows, int chunk_begin, int chunk_end, bool deep,
                                             char* smem, float (&sum)[W][4][4]) {
  constexpr int kB = W / 2;  // pieces of each plane a thread fetches
  constexpr int kRowBytes = kBlockK * 2;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int chunks = chunk_end - chunk_begin;
  const int ring = deep ? kDeepTileSmem<W> : kTileSmem<W>;

  // A piece is 16 bytes. Absent ones are written as zeros and their addresses are not read. The
  // last chunk is filled up with zeros.
  int k = chunk_begin * kChunkK + 8 * (tid % 4);  // of the step that is fetched next
  const int k_stop = chunk_end * kChunkK;
  const std::uint16_t* a_from[2];
  bool a_present[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint16_t* row = row_of(tid / 4 + 64 * i);
    a_present[i] = row != nullptr;
    a_from[i] = (a_present[i] ? row : planes.hi) + k;
  }
  const std::uint16_t* hi_from[kB];
  const std::uint16_t* lo_from[kB];
  bool b_present[kB];
#pragma unroll
  for (int i = 0; i < kB; ++i) {
    const int n = n0 + tid / 4 + 64 * i;
    b_present[i] = n < rows;
    const std::size_t offset =
        (b_present[i] ? static_cast<std::size_t>(n) * static_cast<std::size_t>(in) : 0) +
        static_cast<std::size_t>(k);
    hi_from[i] = planes.hi + offset;
    lo_from[i] = planes.lo + offset;
  }
  const std::uint32_t to_begin = static_cast<std::uint32_t>(__cvta_generic_to_shared(smem)) +
                                 static_cast<std::uint32_t>(tid) * 16;
  std::uint32_t to = to_begin;
  const auto fetch = [&]() {
    if (k < k_stop) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        cp_async16(to + static_cast<std::uint32_t>(64 * i * kRowBytes), a_from[i],
                   k < in && a_present[i]);
        a_from[i] += kBlockK;
      }
#pragma unroll
      for (int i = 0; i < kB; ++i) {
        const bool present = k < in && b_present[i];
        cp_async16(to + static_cast<std::uint32_t>((kTileM + 64 * i) * kRowBytes), hi_from[i],
                   present);
        cp_async16(to + static_cast<std::uint32_t>((kTileM + kTileN<W> + 64 * i) * kRowBytes),
                   lo_from[i], present);
        hi_from[i] += kBlockK;
        lo_from[i] += kBlockK;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    k += kBlockK;
    to += kTileStageBytes<W>;
    if (to == to_begin + static_cast<std::uint32_t>(ring)) to = to_begin;
  };

#pragma unroll
  for (int i = 0; i < W; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] = 0.0f;

  const int fragment = lane / 4 * kRowBytes + lane % 4 * 16;
  const char* a_at = smem + 16 * W * (warp / W) * kRowBytes + fragment;
  const char* b_at = smem + (kTileM + 32 * (warp % W)) * kRowBytes + fragment;
  const auto load_a = [&](uint4(&to_a)[2], int stage, int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      to_a[half] = *reinterpret_cast<const uint4*>(a_at + stage + (16 * i + 8 * half) * kRowBytes);
  };
  const auto load_b = [&](uint4(&to_b)[2], int stage, int j) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
      to_b[plane] =
          *reinterpret_cast<const uint4*>(b_at + stage + (8 * j + kTileN<W> * plane) * kRowBytes);
  };

#pragma unroll
  for (int s = 0; s < kTileStages - 1; ++s) fetch();
  for (int s = kTileStages; deep && s < kDeepTileStages; ++s) fetch();
  // An MMA takes four neighbouring registers, two of the top row and two of the bottom row, where a
  // load gives four of one row. Left alone the compiler copies them for every MMA anew; it cannot
  // do so with values computed from a zero that it does not know to be one.
  const std::uint32_t zero = static_cast<std::uint32_t>(in) >> 31;
  uint4 a[2];        // of the next m-tile: top and bottom rows
  uint4 b[2][4][2];  // blocks in turn; n-tiles; hi and lo
  cp_wait<kTileStages - 2, kDeepTileStages - 2>(deep);
  __syncthreads();
  int stage = 0;  // of the block whose MMAs run
  load_a(a, stage, 0);
#pragma unroll
  for (int j = 0; j < 4; ++j) load_b(b[0][j], stage, j);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    float acc[W][4][4] = {};
#pragma unroll
    for (int block = 0; block < kChunkBlocks; ++block) {
      cp_wait<kTileStages - 3, kDeepTileStages - 3>(deep);
      __syncthreads();
      fetch();
      // After the last block this is a stage of old data that no MMA uses.
      const int next = stage + kTileStageBytes<W> == ring ? 0 : stage + kTileStageBytes<W>;
#pragma unroll
      for (int i = 0; i < W; ++i) {
        const std::uint32_t a0[4] = {a[0].x | zero, a[1].x | zero, a[0].y | zero, a[1].y | zero};
        const std::uint32_t a1[4] = {a[0].z | zero, a[1].z | zero, a[0].w | zero, a[1].w | zero};
        load_a(a, i + 1 < W ? stage : next, (i + 1) % W);
#pragma unroll
        for (int j = 4 * i / W; j < 4 * (i + 1) / W; ++j) load_b(b[(block + 1) % 2][j], next, j);
          // The parts of mma_part, in its order.
#pragma unroll
        for (int part = 0; part < 4; ++part)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint4& v = b[block % 2][j][part % 2];
            if (part < 2) {
              mma(acc[i][j], a0[0], a0[1], a0[2], a0[3], v.x, v.y);
            } else {
              mma(acc[i][j], a1[0], a1[1], a1[2], a1[3], v.z, v.w);
            }
          }
      }
      stage = next;
    }
    static_assert(kChunkBlocks % 2 == 1, "the next chunk begins with the other b");
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) b[0][j][plane] = b[1][j][plane];
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

// Launches a tile kernel with as many stages as the GPU has room for.
template <int W, class Params>
void launch_tiles(cudaStream_t stream, void (*kernel)(Params), dim3 grid, Params params) {
  int device = 0;
  int room = 0;
  FN_CUDA(cudaGetDevice(&device));
  FN_CUDA(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  params.deep = room >= kDeepTileSmem<W>;
  const int bytes = params.deep ? kDeepTileSmem<W> : kTileSmem<W>;
  allow_smem(kernel, bytes);
  launch_pdl(stream, kernel, grid, dim3(kTileThreads), static_cast<std::size_t>(bytes), params);
}

#endif  // __CUDACC__

// ---- the shared launches (dense.cu)

struct ProductArgs {
  RowCount rows;
  std::int32_t row0;  // rows [row0, row0 + group) of the op
  std::int32_t group;
  StackedWeights w;
  const float* x;         // (rows, in), or null when planes are given
  Planes planes;          // (group, in), row row0 first
  float* y[kMaxLinears];  // out (rows, out_i); used when there is one slice
  float* partial;         // out (slices, group, rows of w): totals still times 16
  bool deep;              // set by launch_tiles
};

// y or partial. Decode form: at most kDecodeRows rows in the group, reads x or planes.
void product_decode(cudaStream_t stream, const ProductArgs& args);
// Tile form: reads planes.
void product_tiles(cudaStream_t stream, const ProductArgs& args);

}  // namespace flashnext::cuda
