// Internal to the AVX-512 kernels: one row times tiles of 2 to 3.5 bits (avx512_quads.h), by one
// block of columns or by several at once.
#pragma once

#include "cpp/exl3/avx512_quads.h"
#include "cpp/exl3/avx512_split.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace flashnext::exl3::internal {

constexpr int kQuadFoldTiles = 8;  // a dword of quads takes half the products of a tile

// sums (16): columns 4 G + i + 8 h of a tile from the dwords of quads, less 510 total.
template <int G>
FN_AVX512_INLINE void widen_quads(std::int64_t* sums, const Split& sum, std::int64_t total) {
  alignas(64) std::int64_t even[16];
  widen_split(even, sum, 0);
  const __m512i both = _mm512_add_epi64(_mm512_load_si512(even), _mm512_load_si512(even + 8));
  const __m512i columns =
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                               _mm512_add_epi64(both, _mm512_set1_epi64(-kCentre * total)));
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(sums + 4 * G), _mm512_castsi512_si256(columns));
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(sums + 4 * G + 8),
                      _mm512_extracti64x4_epi64(columns, 1));
}

FN_AVX512_INLINE __m512i broadcast_pairs(const std::int16_t* v) {
  std::int64_t pairs;
  std::memcpy(&pairs, v, sizeof pairs);
  return _mm512_set1_epi64(pairs);
}

// acc gains the products of a tile's rows with v (16).
FN_AVX512_INLINE void add_quads(Lanes& acc, const __m512i (&b)[4], const std::int16_t* v) {
  add_product(acc, b[0], broadcast_pairs(v));
  add_product(acc, b[1], broadcast_pairs(v + 8));
  add_product(acc, b[2], broadcast_pairs(v + 4));
  add_product(acc, b[3], broadcast_pairs(v + 12));
}

// One row times tiles that Quads fits.
template <int HB, bool Multishift>
FN_AVX512 void row_by_quads(const Exl3Weight& w, const Prepared& p, std::int32_t row,
                            std::int32_t block, std::int64_t* sums) noexcept {
  constexpr int bytes = Quads<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int16_t* v = p.v + row * static_cast<std::int64_t>(p.in);
  Split split[kTiles][2] = {};
  const std::int32_t k_tiles = w.in / kTile;
  for (std::int32_t a = 0; a < k_tiles; a += kQuadFoldTiles) {
    // Fetch what the next round reads, as in few_rows.
    const std::int64_t ahead =
        a + kQuadFoldTiles < k_tiles ? kQuadFoldTiles * stride : kTiles * bytes - a * stride;
    for (int n = 0; n < kTiles; ++n) {
      const std::byte* tile = tiles + a * stride + n * bytes;
      Lanes lower{};
      Lanes upper{};
#pragma GCC unroll 1
      for (int i = 0; i < kQuadFoldTiles; ++i) {
        prefetch_tile<bytes>(tile + i * stride + ahead);
        const QuadTile<HB> t = load_quads<HB>(tile + i * stride);
        const std::int16_t* x = v + (a + i) * kTile;
        __m512i b[4];
        quad_sums<HB, Multishift, 0>(t, b);
        add_quads(lower, b, x);
        quad_sums<HB, Multishift, 1>(t, b);
        add_quads(upper, b, x);
      }
      fold(split[n][0], lower);
      fold(split[n][1], upper);
    }
  }
  for (int n = 0; n < kTiles; ++n) {
    widen_quads<0>(sums + n * kTile, split[n][0], p.sum[row]);
    widen_quads<1>(sums + n * kTile, split[n][1], p.sum[row]);
  }
}

// One row times tiles that Quads fits, several blocks at once: a chunk of eight k-tiles has long
// runs of addresses, and while it is computed the next one is fetched run by run.
template <int HB, bool Multishift>
FN_AVX512 void wide_row(const Exl3Weight& w, const Prepared& p, std::int32_t block,
                        std::int32_t blocks, Ahead next, std::int64_t* sums) noexcept {
  constexpr int bytes = Quads<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int32_t n_tiles = blocks * kTiles;
  const std::int32_t k_tiles = w.in / kTile;
  Split split[kWideBlocks * kTiles][2];
  const Split zero{_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int n = 0; n < n_tiles; ++n) split[n][0] = split[n][1] = zero;
  for (std::int32_t a = 0; a < k_tiles; a += kQuadFoldTiles) {
    const std::int32_t count = std::min(kQuadFoldTiles, k_tiles - a);
    const std::int32_t after = std::min(kQuadFoldTiles, k_tiles - a - count);
    Ahead later = next;
    if (after > 0) later = {tiles + (a + count) * stride, stride, n_tiles, after};
    for (int n = 0; n < n_tiles; ++n) {
      const std::byte* tile = tiles + a * stride + n * bytes;
      const std::byte* far = later.take(count, bytes, tile);
      // Nearer: the next block, which the first chunk of a unit has nobody else to fetch.
      const std::byte* near = tile;
      if (n + kTiles < n_tiles) near += kTiles * bytes;
      Lanes lower{};
      Lanes upper{};
#pragma GCC unroll 1
      for (int i = 0; i < count; ++i) {
        prefetch_tile_far<bytes>(far + i * bytes);
        prefetch_tile<bytes>(near + i * stride);
        const QuadTile<HB> t = load_quads<HB>(tile + i * stride);
        const std::int16_t* x = p.v + (a + i) * kTile;
        __m512i b[4];
        quad_sums<HB, Multishift, 0>(t, b);
        add_quads(lower, b, x);
        quad_sums<HB, Multishift, 1>(t, b);
        add_quads(upper, b, x);
      }
      fold(split[n][0], lower);
      fold(split[n][1], upper);
    }
  }
  for (int n = 0; n < n_tiles; ++n) {
    widen_quads<0>(sums + n * kTile, split[n][0], p.sum[0]);
    widen_quads<1>(sums + n * kTile, split[n][1], p.sum[0]);
  }
}

}  // namespace flashnext::exl3::internal
