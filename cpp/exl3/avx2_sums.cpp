// Step 5 of the integer linear with AVX2.
//
// The words of a tile are first put in stream order, so that windows can be loaded at any byte. A
// vector of 8 dwords holds one window of the four lane classes of two columns (windows.h): column
// 2m below, 2m + 1 above, its dwords the rows 2c + const. vpmulld makes s * 0x83DCD12D, vpmaddubsw
// with ones two 16-bit halves of B, and vpmaddwd multiplies both halves with the activation. A
// dword sums four rows of a tile; the four dwords of a column are added when int32 is full.
#if defined(__x86_64__)

#include "cpp/exl3/avx2_decode.h"
#include "cpp/exl3/avx2_rows.h"
#include "cpp/exl3/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <immintrin.h>
#include <utility>

namespace flashnext::exl3::internal {

namespace {

// NOTE: typed as what the adds work on; as __m256i, GCC keeps a copy of accumulators in memory.
using Lanes = std::int32_t __attribute__((vector_size(32)));

constexpr int kTiles = kBlock / kTile;  // tiles along a side of a block
constexpr int kVectors = 8;             // of 2 columns x 4 rows: index 2m + h
// B <= 1020, |V| <= 32258, four products a tile: int32 is full after 16 tiles.
constexpr int kFoldTiles = 16;
// |B - 510| <= 510, and pairs of rows: after 32.
constexpr int kChunkTiles = 32;

// Activations of one k-tile of a row: for window j the dwords V[2c + const], twice as words.
struct Spread {
  __m256i x[4];
};

FN_AVX2_INLINE Spread spread(const std::int16_t* v) {
  const __m256i even = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0,
                                        1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
  const __m256i odd = _mm256_add_epi8(even, _mm256_set1_epi8(2));
  const auto* from = reinterpret_cast<const __m128i_u*>(v);
  const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128(from));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128(from + 1));
  return {{_mm256_shuffle_epi8(low, even), _mm256_shuffle_epi8(low, odd),
           _mm256_shuffle_epi8(high, even), _mm256_shuffle_epi8(high, odd)}};
}

FN_AVX2_INLINE void add_product(Lanes& acc, __m256i weights, __m256i x) {
  acc += reinterpret_cast<Lanes>(_mm256_madd_epi16(weights, x));
}

// sums (16 columns) += the dwords of the eight vectors, column by column.
FN_AVX2_INLINE void reduce_into(std::int64_t* sums, const Lanes* acc) {
  for (int m = 0; m < 4; ++m) {
    const __m256i a = reinterpret_cast<__m256i>(acc[2 * m]);
    const __m256i b = reinterpret_cast<__m256i>(acc[2 * m + 1]);
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      const __m256i p = _mm256_cvtepi32_epi64(side == 0 ? _mm256_castsi256_si128(a)
                                                        : _mm256_extracti128_si256(a, 1));
      const __m256i q = _mm256_cvtepi32_epi64(side == 0 ? _mm256_castsi256_si128(b)
                                                        : _mm256_extracti128_si256(b, 1));
      const __m256i pairs =
          _mm256_add_epi64(_mm256_unpacklo_epi64(p, q), _mm256_unpackhi_epi64(p, q));
      const __m128i both =
          _mm_add_epi64(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
      sums[2 * m + side] += _mm_cvtsi128_si64(both);
      sums[2 * m + side + 8] += _mm_extract_epi64(both, 1);
    }
  }
}

// Two columns of one half times R rows: acc[r][vector] gains four rows of the tile.
template <int HB, int H, std::size_t... R>
FN_AVX2_INLINE void add_columns(const std::byte* stream, const Spread* x, Lanes* acc,
                                std::index_sequence<R...>) {
  __m256i b[4];
  halves<HB, H>(stream, b);
  Lanes sum[sizeof...(R)];
  ((sum[R] = acc[R * kTiles * kVectors]), ...);
  (add_product(sum[R], b[0], x[R].x[0]), ...);
  (add_product(sum[R], b[1], x[R].x[1]), ...);
  (add_product(sum[R], b[2], x[R].x[2]), ...);
  (add_product(sum[R], b[3], x[R].x[3]), ...);
  ((acc[R * kTiles * kVectors] = sum[R]), ...);
}

// Few rows: the products are taken while the weights are in registers. R: indices of the rows.
template <int HB, std::size_t... R>
FN_AVX2 void few_rows(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t block,
                      const Upcoming& next, std::int64_t* sums,
                      std::index_sequence<R...> rows) noexcept {
  constexpr int bytes = Windows<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int64_t in = p.in;
  const std::int16_t* v = p.v + row * in;
  for (std::size_t r = 0; r < sizeof...(R); ++r) {
    std::fill(sums + r * kBlock, sums + (r + 1) * kBlock,
              -kCentre * p.sum[row + static_cast<std::int32_t>(r)]);
  }
  alignas(32) Stream stream[kTiles];
  Lanes acc[sizeof...(R)][kTiles][kVectors];
  const std::int32_t k_tiles = w.in / kTile;
  for (std::int32_t first = 0; first < k_tiles; first += kFoldTiles) {
    std::memset(acc, 0, sizeof acc);
    for (std::int32_t a = first; a < std::min(first + kFoldTiles, k_tiles); ++a) {
      const Spread x[] = {spread(v + static_cast<std::int64_t>(R) * in + a * kTile)...};
      const std::byte* tile = tiles + a * stride;
      const std::int32_t beyond = a + kAheadTiles - k_tiles;
      const std::byte* ahead =
          beyond < 0 ? tile + kAheadTiles * stride : next.tiles + beyond * next.stride;
      // NOTE: all tiles first: a load that straddles two fresh stores would wait for them.
      for (int n = 0; n < kTiles; ++n) {
#pragma GCC unroll 4
        for (int line = 0; line < bytes; line += 64) {
          __builtin_prefetch(ahead + n * bytes + line);
        }
        to_stream<HB>(tile + n * bytes, stream[n]);
      }
      for (int n = 0; n < kTiles; ++n) {
#pragma GCC unroll 1
        for (int m = 0; m < 4; ++m) {
          const std::byte* columns = stream[n] + kBefore + 4 * HB * m;
          add_columns<HB, 0>(columns, x, &acc[0][n][2 * m], rows);
          add_columns<HB, 1>(columns, x, &acc[0][n][2 * m + 1], rows);
        }
      }
    }
    for (std::size_t r = 0; r < sizeof...(R); ++r) {
      for (int n = 0; n < kTiles; ++n) reduce_into(sums + r * kBlock + n * kTile, acc[r][n]);
    }
  }
}

// One n-tile of a chunk: [k-tile][row pairs 2c below, 2c + 8 above][vector] of B - 510.
using Decoded = __m256i[kChunkTiles][2][kVectors];

template <int HB, int H>
FN_AVX2_INLINE void decode_columns(const std::byte* stream, __m256i (*to)[kVectors], int m) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i centre = _mm256_set1_epi16(kCentre);
  __m256i b[4];
  halves<HB, H>(stream, b);
  b[0] = _mm256_madd_epi16(b[0], ones);
  b[1] = _mm256_madd_epi16(b[1], ones);
  b[2] = _mm256_madd_epi16(b[2], ones);
  b[3] = _mm256_madd_epi16(b[3], ones);
  to[0][2 * m + H] = _mm256_sub_epi16(_mm256_or_si256(b[0], _mm256_slli_epi32(b[1], 16)), centre);
  to[1][2 * m + H] = _mm256_sub_epi16(_mm256_or_si256(b[2], _mm256_slli_epi32(b[3], 16)), centre);
}

FN_AVX2_INLINE __m256i broadcast_eight(const std::int16_t* v) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(v)));
}

template <std::size_t... I>
FN_AVX2_INLINE void add_vectors(Lanes* acc0, Lanes* acc1, const __m256i* weights, __m256i x0,
                                __m256i x1, std::index_sequence<I...>) {
  ((add_product(acc0[I], weights[I], x0), add_product(acc1[I], weights[I], x1)), ...);
}

// Two rows (v0, v1) times the first or second four vectors of the decoded tiles.
FN_AVX2_INLINE void multiply_half(const Decoded& decoded, int k_tiles, int half,
                                  const std::int16_t* v0, const std::int16_t* v1, Lanes* to0,
                                  Lanes* to1) {
  constexpr auto kFour = std::make_index_sequence<4>();
  Lanes acc0[4] = {Lanes{}, Lanes{}, Lanes{}, Lanes{}};
  Lanes acc1[4] = {Lanes{}, Lanes{}, Lanes{}, Lanes{}};
  for (int a = 0; a < k_tiles; ++a) {
    const __m256i* weights = &decoded[a][0][4 * half];
    add_vectors(acc0, acc1, weights, broadcast_eight(v0 + a * kTile),
                broadcast_eight(v1 + a * kTile), kFour);
    add_vectors(acc0, acc1, weights + kVectors, broadcast_eight(v0 + a * kTile + 8),
                broadcast_eight(v1 + a * kTile + 8), kFour);
  }
  std::memcpy(to0 + 4 * half, acc0, sizeof acc0);
  std::memcpy(to1 + 4 * half, acc1, sizeof acc1);
}

FN_AVX2 void multiply_rows(const Decoded& decoded, int k_tiles, const std::int16_t* v,
                           std::int64_t in, std::int32_t rows, std::int64_t* sums) noexcept {
  Lanes acc0[kVectors];
  Lanes acc1[kVectors];
  for (std::int32_t r = 0; r < rows; r += 2) {
    const std::int32_t next = r + 1 < rows ? r + 1 : r;  // an odd last row is computed twice
    for (int half = 0; half < 2; ++half) {
      multiply_half(decoded, k_tiles, half, v + r * in, v + next * in, acc0, acc1);
    }
    reduce_into(sums + r * kBlock, acc0);
    if (next != r) reduce_into(sums + next * kBlock, acc1);
  }
}

template <int HB>
FN_AVX2 void many_rows(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                       std::int32_t block, std::int64_t* sums) noexcept {
  constexpr int bytes = Windows<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  std::memset(sums, 0, sizeof(std::int64_t) * kBlock * static_cast<std::size_t>(rows));
  alignas(32) Stream stream[2];
  Decoded decoded;
  const std::int32_t k_tiles = w.in / kTile;
  for (std::int32_t first = 0; first < k_tiles; first += kChunkTiles) {
    const std::int32_t count = std::min(kChunkTiles, k_tiles - first);
    const std::int16_t* v = p.v + static_cast<std::int64_t>(row) * p.in + first * kTile;
    for (int n = 0; n < kTiles; ++n) {
      const std::byte* tile = tile_at(w, first, block * kTiles + n);
      to_stream<HB>(tile, stream[0]);
      for (std::int32_t a = 0; a < count; ++a) {
        __builtin_prefetch(tile + a * stride + bytes);
        if (a + 1 < count) to_stream<HB>(tile + (a + 1) * stride, stream[(a + 1) % 2]);
#pragma GCC unroll 1
        for (int m = 0; m < 4; ++m) {
          const std::byte* columns = stream[a % 2] + kBefore + 4 * HB * m;
          decode_columns<HB, 0>(columns, decoded[a], m);
          decode_columns<HB, 1>(columns, decoded[a], m);
        }
      }
      multiply_rows(decoded, count, v, p.in, rows, sums + n * kTile);
    }
  }
}

template <int HB>
void sums_at_rate(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                  std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept {
  switch (rows) {
    case 1:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<1>());
    case 2:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<2>());
    case 3:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<3>());
    case 4:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<4>());
    default:
      return many_rows<HB>(w, p, row, rows, block, sums);
  }
}

void block_sums(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept {
  switch (w.words / 8) {
    case 2:
      return sums_at_rate<2>(w, p, row, rows, block, next, sums);
    case 3:
      return sums_at_rate<3>(w, p, row, rows, block, next, sums);
    case 4:
      return sums_at_rate<4>(w, p, row, rows, block, next, sums);
    case 5:
      return sums_at_rate<5>(w, p, row, rows, block, next, sums);
    case 6:
      return sums_at_rate<6>(w, p, row, rows, block, next, sums);
    case 7:
      return sums_at_rate<7>(w, p, row, rows, block, next, sums);
    case 8:
      return sums_at_rate<8>(w, p, row, rows, block, next, sums);
    case 10:
      return sums_at_rate<10>(w, p, row, rows, block, next, sums);
    case 12:
      return sums_at_rate<12>(w, p, row, rows, block, next, sums);
    case 14:
      return sums_at_rate<14>(w, p, row, rows, block, next, sums);
    default:
      return sums_at_rate<16>(w, p, row, rows, block, next, sums);
  }
}

}  // namespace

const Kernels kAvx2Kernels = {avx2_prepare_row, block_sums, avx2_finish};

}  // namespace flashnext::exl3::internal

#endif
