// One tile of attention: 64 tokens of one kv head against the query heads of one row.
//
// The heads are the 16 rows of the tensor core product. Queries and probabilities, fp32, are split
// into two fp16 numbers each (high part, rest), so that with exact fp16 keys and values a product
// loses only the accumulator's rounding. A tile's maximum, sum and weighted values come from the
// tile alone, and tiles are joined in order by one formula: whether one block walks the tiles or
// each has its own, the bits are the same.
//
// Four warps. For the scores warp w takes the half w / 2 of the dims (the halves are added in
// order) and the half w % 2 of the tokens; for the values, dims 64 w .. 64 w + 63.
#pragma once

#include "cpp/base/math.h"
#include "cuda/attention.cuh"
#include "cuda/cp_async.cuh"

#include <cuda_fp16.h>

namespace flashnext::cuda::attn {

inline constexpr int kTile = kPageTokens;  // 64
inline constexpr int kTileQuads = kTile / kBlock;
inline constexpr int kTileWarps = 4;
inline constexpr int kTileThreads = kTileWarps * 32;
inline constexpr int kPartialStride = kTile + 4;  // floats: rows of 16 bytes on different banks
inline constexpr int kHalves = 2;                 // of the dims, whose partial scores are added

struct TileShared {
  // Rows of 32 pieces of 16 bytes; piece c of row r lies at c ^ (r % 8), so that eight rows of one
  // piece are on different banks.
  std::uint16_t k[kTile * kHeadDim];  // fp16 (64, 256)
  std::uint16_t v[kTile * kHeadDim];  // fp16 (64, 256)
  // Scores, fp32 (2 halves of the dims, 16 heads, 64 and padding). Once they are read, a row of the
  // first half holds the probabilities of its head, fp16 (high 64, rest 64), and in the padding
  // what the join needs: every head has one warp, so nobody else is in the way.
  float partial[kHalves * kMmaHeads * kPartialStride];

  __device__ float* row(int head) { return partial + head * kPartialStride; }
  __device__ float& keep(int head) { return row(head)[kTile]; }       // of what was joined so far
  __device__ float& take(int head) { return row(head)[kTile + 1]; }   // of this tile
  __device__ float& total(int head) { return row(head)[kTile + 2]; }  // sum of all tiles
};

// What a row reads: `tokens` list entries in quads of four neighbours, the last maybe partial.
struct TokenList {
  std::int32_t tokens;
  std::int32_t selected;  // quads that come from the list of blocks; the rest follow from `base`
  std::int32_t base;      // first position of quad `selected`
  const std::int32_t* blocks;
};

__device__ __forceinline__ TokenList token_list(const AttentionArgs& a, int r, int pos, int count) {
  if (count < 0) return {pos + 1, 0, 0, nullptr};
  const int tail = (pos + 1) / kBlock * kBlock;
  return {count * kBlock + pos + 1 - tail, count, tail,
          a.blocks + static_cast<std::int64_t>(r) * a.dims.max_blocks};
}

// Position of quad i of the list where it is not a selected block.
__device__ __forceinline__ int list_tail(const TokenList& list, int i) {
  return list.base + (i - list.selected) * kBlock;
}

// Token row of the planes at a position.
__device__ __forceinline__ std::int32_t token_row(const AttentionArgs& a, int page_lane,
                                                  int kv_head, int pos) {
  const std::int32_t page =
      a.step.pages[static_cast<std::int64_t>(page_lane) * a.step.max_pages + pos / kPageTokens];
  return (page * a.dims.kv_heads + kv_head) * kPageTokens + pos % kPageTokens;
}

// Copies 64 token rows of a plane; entries past the list become zeros. `quads` (16) of this tile.
__device__ __forceinline__ void fetch_rows(std::uint32_t to, const std::uint16_t* plane,
                                           const std::int32_t* quads, int valid) {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int i = 0; i < kTileQuads / kTileWarps; ++i) {
    const int quad = warp + kTileWarps * i;
    const int row = quad * kBlock;
    const std::int64_t from = row < valid ? quads[quad] : 0;
    const std::uint16_t* source = plane + from * kHeadDim + 8 * lane;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      cp_async16_or_zero(
          to + static_cast<std::uint32_t>((row + j) * 512 + ((lane ^ ((row + j) & 7)) << 4)),
          source + j * kHeadDim, row + j < valid);
    }
  }
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4],
                                                         std::uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x = high + rest, both fp16.
__device__ __forceinline__ void split(float2 x, std::uint32_t& high, std::uint32_t& rest) {
  const __half2 h = __floats2half2_rn(x.x, x.y);
  const float2 back = __half22float2(h);
  const __half2 l = __floats2half2_rn(x.x - back.x, x.y - back.y);
  high = *reinterpret_cast<const std::uint32_t*>(&h);
  rest = *reinterpret_cast<const std::uint32_t*>(&l);
}

// The queries of a row's kv group, this warp's half of the dims, as fragments of eight k-steps.
struct Query {
  std::uint32_t high[8][4];
  std::uint32_t rest[8][4];
};

__device__ __forceinline__ void load_query(Query& query, const float* q, int heads) {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane / 4 + 8 * (i & 1);
      const int dim = 128 * (warp / 2) + 16 * step + 2 * (lane & 3) + 8 * (i >> 1);
      const float2 x = head < heads ? *reinterpret_cast<const float2*>(q + head * kHeadDim + dim)
                                    : float2{0.0f, 0.0f};
      split(x, query.high[step][i], query.rest[step][i]);
    }
  }
}

// This warp's part of the scores, to shared.partial. Keys must be there.
__device__ __forceinline__ void tile_scores(TileShared& shared, const Query& query) {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int token = 32 * (warp & 1);
  const std::uint32_t keys =
      shared_address(shared.k) + static_cast<std::uint32_t>((token + (lane & 7)) * 512);
  constexpr int kColumns = 4;  // times 8 tokens: independent sums, so that no product waits
  float s[kColumns][4] = {};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    std::uint32_t b[kColumns][4];
    const int piece = (warp / 2) * 16 + part * 4 + (lane >> 3);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      load_matrices(b[n],
                    keys + static_cast<std::uint32_t>(n * 8 * 512 + ((piece ^ (lane & 7)) << 4)));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        mma(s[n], query.high[2 * part + step], b[n][2 * step], b[n][2 * step + 1]);
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        mma(s[n], query.rest[2 * part + step], b[n][2 * step], b[n][2 * step + 1]);
      }
    }
  }
  float* to = shared.partial + ((warp / 2) * kMmaHeads + lane / 4) * kPartialStride + token +
              2 * (lane & 3);
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    *reinterpret_cast<float2*>(to + 8 * n) = float2{s[n][0], s[n][1]};
    *reinterpret_cast<float2*>(to + 8 * n + 8 * kPartialStride) = float2{s[n][2], s[n][3]};
  }
}

struct TileStats {
  float max;
  float sum;
};

// Probabilities against the tile's own maximum, to shared.row(head). Eight threads share head
// threadIdx.x / 8 and all return its statistics. `valid` >= 1 entries count.
__device__ __forceinline__ TileStats tile_softmax(TileShared& shared, int valid) {
  const int head = static_cast<int>(threadIdx.x >> 3);
  const int part = static_cast<int>(threadIdx.x & 7);
  const float infinity = __int_as_float(0x7F800000);
  float x[8];
  float top = -infinity;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 4 * part + 32 * half;
    const float* from = shared.partial + head * kPartialStride + token;
    float4 s = *reinterpret_cast<const float4*>(from);
    const float4 more = *reinterpret_cast<const float4*>(from + kMmaHeads * kPartialStride);
    s.x += more.x;
    s.y += more.y;
    s.z += more.z;
    s.w += more.w;
    const float values[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[4 * half + i] = token + i < valid ? values[i] * 0.0625f : -infinity;  // 256^-0.5
      top = fmaxf(top, x[4 * half + i]);
    }
  }
#pragma unroll
  for (int bit = 1; bit < 8; bit <<= 1) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, bit));
  __syncwarp();  // the scores of the warp's heads are read
  std::uint16_t* out = reinterpret_cast<std::uint16_t*>(shared.row(head));
  float sum = 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 4 * part + 32 * half;
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = token + i < valid ? math::exp(x[4 * half + i] - top) : 0.0f;
      sum += p[i];
    }
    uint2 high, rest;
    split(float2{p[0], p[1]}, high.x, rest.x);
    split(float2{p[2], p[3]}, high.y, rest.y);
    *reinterpret_cast<uint2*>(out + token) = high;
    *reinterpret_cast<uint2*>(out + kTile + token) = rest;
  }
#pragma unroll
  for (int bit = 1; bit < 8; bit <<= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, bit);
  return {top, sum};
}

// acc[n] = values of this warp's dims 8 n .. 8 n + 7 weighted by the probabilities: rows lane / 4
// and lane / 4 + 8, columns 2 (lane % 4) + 0, 1.
__device__ __forceinline__ void tile_values(TileShared& shared, float (&acc)[8][4]) {
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int low_row = (lane & 7) + ((lane >> 3) & 1) * 8;
  const std::uint32_t p_row = shared_address(shared.row(low_row));
  const std::uint32_t values = shared_address(shared.v) + static_cast<std::uint32_t>(low_row * 512);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kTile / 16; ++step) {
    std::uint32_t high[4], rest[4];
    const std::uint32_t at = p_row + static_cast<std::uint32_t>((2 * step + (lane >> 4)) << 4);
    load_matrices(high, at);
    load_matrices(rest, at + kTile * 2);
    std::uint32_t b[4][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int piece = warp * 8 + 2 * pair + (lane >> 4);
      load_matrices_transposed(
          b[pair],
          values + static_cast<std::uint32_t>(step * 16 * 512 + ((piece ^ (lane & 7)) << 4)));
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) mma(acc[n], high, b[n / 2][2 * (n & 1)], b[n / 2][2 * (n & 1) + 1]);
#pragma unroll
    for (int n = 0; n < 8; ++n) mma(acc[n], rest, b[n / 2][2 * (n & 1)], b[n / 2][2 * (n & 1) + 1]);
  }
}

// The join: what was joined so far is scaled by keep, the tile by take.
struct Join {
  float keep;
  float take;
};

__device__ __forceinline__ Join join_factors(float max_before, float tile_max) {
  const float top = fmaxf(max_before, tile_max);
  return {math::exp(max_before - top), math::exp(tile_max - top)};
}

__device__ __forceinline__ float join(float before, float tile, float keep, float take) {
  return fmaf(before, keep, tile * take);
}

__device__ __forceinline__ float finish(float joined, float total, float gate) {
  return math::div(joined, total) * math::sigmoid(gate);
}

}  // namespace flashnext::cuda::attn
