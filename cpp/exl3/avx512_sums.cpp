// Step 5 of the integer linear with AVX-512 (F, BW, DQ, VL, VBMI, VNNI).
//
// A window s becomes s * 0x83DCD12D by vpmulld; vpdpbusd with ones adds its four bytes. The sums of
// two rows go into the words of a dword, and vpdpwssd multiplies them with two 15-bit activations.
// On Zen 4 multiplies, dot products and multishifts share two of four execution units: 40 cycles a
// tile and row at the least. One row takes tiles of low rates by avx512_quads.h. Up to eight rows
// are multiplied while the weights are in registers; for more, 128 inputs x 64 columns at a time
// are decoded into L1 and multiplied by six rows in turn.
#if defined(__x86_64__)

#include "cpp/exl3/avx512_decode.h"
#include "cpp/exl3/avx512_quads.h"
#include "cpp/exl3/avx512_rows.h"
#include "cpp/exl3/kernels.h"

#include <cstddef>
#include <cstring>
#include <immintrin.h>
#include <utility>

// GCC 12 takes the deliberately undefined operand inside some intrinsics for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace flashnext::exl3::internal {

namespace {

constexpr int kTiles = kBlock / kTile;  // tiles along a side of a block
// B <= 1020, |V| <= 32258: a dword takes 32 products of pairs, so one row is folded every 4 tiles.
constexpr int kFoldTiles = 4;
constexpr int kQuadFoldTiles = kAheadTiles;  // a dword of quads takes half the products of a tile
// |B - 510| <= 510: it takes 64 products of pairs, 8 tiles.
constexpr int kChunkTiles = 8;
constexpr int kPassTiles = 4;  // n-tiles decoded at once
constexpr int kPairs = kTile / 2;

FN_AVX512_INLINE __m512i broadcast_pair(const std::int16_t* v) {
  std::int32_t pair;
  std::memcpy(&pair, v, sizeof pair);
  return _mm512_set1_epi32(pair);
}

// NOTE: typed as what vpdpwssd adds; as __m512i, GCC keeps a copy of every accumulator in memory.
using Lanes = std::int32_t __attribute__((vector_size(64)));

FN_AVX512_INLINE void add_product(Lanes& acc, __m512i weights, __m512i x) {
  acc = reinterpret_cast<Lanes>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(acc), weights, x));
}

// acc gains the products of eight rows of a tile (two lane classes) with v (16).
template <int C>
FN_AVX512_INLINE void add_classes(Lanes& acc, const __m512i (&b)[4], const std::int16_t* v) {
  add_product(acc, b[0], broadcast_pair(v + 2 * C));
  add_product(acc, b[1], broadcast_pair(v + 8 + 2 * C));
  add_product(acc, b[2], broadcast_pair(v + 2 * C + 2));
  add_product(acc, b[3], broadcast_pair(v + 8 + 2 * C + 2));
}

// sums (16) += the dwords, each sign-extended.
FN_AVX512_INLINE void widen_into(std::int64_t* sums, __m512i acc) {
  const __m512i even = _mm512_srai_epi64(_mm512_slli_epi64(acc, 32), 32);
  const __m512i odd = _mm512_srai_epi64(acc, 32);
  _mm512_storeu_si512(sums, _mm512_add_epi64(_mm512_loadu_si512(sums), even));
  _mm512_storeu_si512(sums + 8, _mm512_add_epi64(_mm512_loadu_si512(sums + 8), odd));
}

// 65536 high + low, low >= 0: the sums of 16 columns of up to 2^21 inputs.
struct Split {
  __m512i low, high;
};

FN_AVX512_INLINE void fold(Split& sum, Lanes lanes) {
  const __m512i acc = reinterpret_cast<__m512i>(lanes);
  sum.low = _mm512_add_epi32(sum.low, _mm512_and_si512(acc, _mm512_set1_epi32(0xFFFF)));
  sum.high = _mm512_add_epi32(sum.high, _mm512_srai_epi32(acc, 16));
}

// sums (16) = sum - 510 total.
FN_AVX512_INLINE void widen_split(std::int64_t* sums, const Split& sum, std::int64_t total) {
  const __m512i centre = _mm512_set1_epi64(-kCentre * total);
  const __m512i low_even = _mm512_and_si512(sum.low, _mm512_set1_epi64(0xFFFFFFFF));
  const __m512i low_odd = _mm512_srli_epi64(sum.low, 32);
  const __m512i high_even = _mm512_srai_epi64(_mm512_slli_epi64(sum.high, 32), 16);
  const __m512i high_odd = _mm512_slli_epi64(_mm512_srai_epi64(sum.high, 32), 16);
  _mm512_storeu_si512(sums, _mm512_add_epi64(centre, _mm512_add_epi64(low_even, high_even)));
  _mm512_storeu_si512(sums + 8, _mm512_add_epi64(centre, _mm512_add_epi64(low_odd, high_odd)));
}

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
                            std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept {
  constexpr int bytes = Quads<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int16_t* v = p.v + row * static_cast<std::int64_t>(p.in);
  Split split[kTiles][2] = {};
  const std::int32_t k_tiles = w.in / kTile;
  for (std::int32_t a = 0; a < k_tiles; a += kQuadFoldTiles) {
    const Upcoming ahead = a + kQuadFoldTiles < k_tiles
                               ? Upcoming{tiles + (a + kQuadFoldTiles) * stride, stride}
                               : next;
    for (int n = 0; n < kTiles; ++n) {
      const std::byte* tile = tiles + a * stride + n * bytes;
      Lanes lower{};
      Lanes upper{};
#pragma GCC unroll 1
      for (int i = 0; i < kQuadFoldTiles; ++i) {
        prefetch_tile<bytes>(ahead.tiles + i * ahead.stride + n * bytes);
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

// Few rows: the products are taken while the weights are in registers. R: indices of the rows.
template <int HB, std::size_t... R>
FN_AVX512 void few_rows(const Exl3Weight& w, const Prepared& p, std::int32_t row,
                        std::int32_t block, const Upcoming& next, std::int64_t* sums,
                        std::index_sequence<R...>) noexcept {
  constexpr int bytes = Plan<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int64_t in = p.in;
  const std::int16_t* v = p.v + row * in;
  Split split[sizeof...(R)][kTiles] = {};
  const std::int32_t k_tiles = w.in / kTile;
  for (std::int32_t a = 0; a < k_tiles; a += kFoldTiles) {
    const Upcoming ahead =
        a + kFoldTiles < k_tiles ? Upcoming{tiles + (a + kFoldTiles) * stride, stride} : next;
    for (int n = 0; n < kTiles; ++n) {
      const std::byte* tile = tiles + a * stride + n * bytes;
      Lanes acc[sizeof...(R)];
      ((acc[R] = Lanes{}), ...);
#pragma GCC unroll 1
      for (int i = 0; i < kFoldTiles; ++i) {
        prefetch_tile<bytes>(ahead.tiles + i * ahead.stride + n * bytes);
        const Tile<HB> t = load_tile<HB>(tile + i * stride);
        const std::int16_t* x = v + (a + i) * kTile;
        __m512i b[4];
        class_sums<HB, 0>(t, b);
        (add_classes<0>(acc[R], b, x + static_cast<std::int64_t>(R) * in), ...);
        class_sums<HB, 2>(t, b);
        (add_classes<2>(acc[R], b, x + static_cast<std::int64_t>(R) * in), ...);
      }
      (fold(split[R][n], acc[R]), ...);
    }
  }
  for (std::size_t r = 0; r < sizeof...(R); ++r) {
    for (int n = 0; n < kTiles; ++n) {
      widen_split(sums + r * kBlock + n * kTile, split[r][n],
                  p.sum[row + static_cast<std::int32_t>(r)]);
    }
  }
}

template <int HB, int C>
FN_AVX512_INLINE void decode_classes(const Tile<HB>& t, __m512i* to) {
  const __m512i centre = _mm512_set1_epi16(kCentre);
  __m512i b[4];
  class_sums<HB, C>(t, b);
  to[C * kPassTiles] = _mm512_sub_epi16(b[0], centre);
  to[(C + 4) * kPassTiles] = _mm512_sub_epi16(b[1], centre);
  to[(C + 1) * kPassTiles] = _mm512_sub_epi16(b[2], centre);
  to[(C + 5) * kPassTiles] = _mm512_sub_epi16(b[3], centre);
}

// (128 inputs / 2, 64 columns) pairs of B - 510.
using Decoded = __m512i[kChunkTiles * kPairs * kPassTiles];

struct Accumulators {
  Lanes n0, n1, n2, n3;  // one n-tile each
};

FN_AVX512_INLINE void add_row(Accumulators& acc, __m512i w0, __m512i w1, __m512i w2, __m512i w3,
                              __m512i x) {
  add_product(acc.n0, w0, x);
  add_product(acc.n1, w1, x);
  add_product(acc.n2, w2, x);
  add_product(acc.n3, w3, x);
}

FN_AVX512_INLINE void widen_row(std::int64_t* sums, const Accumulators& acc) {
  widen_into(sums, reinterpret_cast<__m512i>(acc.n0));
  widen_into(sums + kTile, reinterpret_cast<__m512i>(acc.n1));
  widen_into(sums + 2 * kTile, reinterpret_cast<__m512i>(acc.n2));
  widen_into(sums + 3 * kTile, reinterpret_cast<__m512i>(acc.n3));
}

// Rows v (R rows at stride `in`, 128 inputs) times the decoded 128 x 64 weights, into sums (R,
// 128). R indices as a pack: every accumulator then has a name and lives in a register.
template <std::size_t... R>
FN_AVX512 void multiply_rows(const Decoded& decoded, const std::int16_t* v, std::int64_t in,
                             std::int64_t* sums, std::index_sequence<R...>) noexcept {
  Accumulators acc[sizeof...(R)];
  ((acc[R] = Accumulators{}), ...);
#pragma GCC unroll 1
  for (int p = 0; p < kChunkTiles * kPairs; ++p) {
    const __m512i* from = decoded + p * kPassTiles;
    const __m512i w0 = from[0], w1 = from[1], w2 = from[2], w3 = from[3];
    (add_row(acc[R], w0, w1, w2, w3, broadcast_pair(v + static_cast<std::int64_t>(R) * in + 2 * p)),
     ...);
  }
  (widen_row(sums + R * kBlock, acc[R]), ...);
}

template <std::size_t R>
void multiply_rows(const Decoded& decoded, const std::int16_t* v, std::int64_t in,
                   std::int64_t* sums) noexcept {
  multiply_rows(decoded, v, in, sums, std::make_index_sequence<R>());
}

template <int HB>
FN_AVX512 void many_rows(const Exl3Weight& w, const Prepared& p, std::int32_t row,
                         std::int32_t rows, std::int32_t block, std::int64_t* sums) noexcept {
  constexpr int bytes = Plan<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  std::memset(sums, 0, sizeof(std::int64_t) * kBlock * static_cast<std::size_t>(rows));
  Decoded decoded;
  for (std::int32_t a = 0; a < w.in / kTile; a += kChunkTiles) {
    const std::int16_t* v = p.v + static_cast<std::int64_t>(row) * p.in + a * kTile;
    for (int pass = 0; pass < kTiles; pass += kPassTiles) {
      const std::byte* tiles = tile_at(w, a, block * kTiles + pass);
      for (int i = 0; i < kChunkTiles; ++i) {
        for (int n = 0; n < kPassTiles; ++n) {
          const std::byte* tile = tiles + i * stride + n * bytes;
          prefetch_tile<bytes>(tile + kPassTiles * bytes);
          const Tile<HB> t = load_tile<HB>(tile);
          __m512i* to = decoded + i * kPairs * kPassTiles + n;
          decode_classes<HB, 0>(t, to);
          decode_classes<HB, 2>(t, to);
        }
      }
      std::int64_t* to = sums + pass * kTile;
      std::int32_t r = 0;
      for (; r + 6 <= rows; r += 6) multiply_rows<6>(decoded, v + r * p.in, p.in, to + r * kBlock);
      const std::int16_t* last = v + r * p.in;
      switch (rows - r) {
        case 1:
          multiply_rows<1>(decoded, last, p.in, to + r * kBlock);
          break;
        case 2:
          multiply_rows<2>(decoded, last, p.in, to + r * kBlock);
          break;
        case 3:
          multiply_rows<3>(decoded, last, p.in, to + r * kBlock);
          break;
        case 4:
          multiply_rows<4>(decoded, last, p.in, to + r * kBlock);
          break;
        case 5:
          multiply_rows<5>(decoded, last, p.in, to + r * kBlock);
          break;
        default:
          break;
      }
    }
  }
}

template <int HB, bool Multishift>
void sums_at_rate(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                  std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept {
  switch (rows) {
    case 1:
      if constexpr (Quads<HB>::kFits) {
        return row_by_quads<HB, Multishift>(w, p, row, block, next, sums);
      } else {
        return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<1>());
      }
    case 2:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<2>());
    case 3:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<3>());
    case 4:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<4>());
    case 5:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<5>());
    case 6:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<6>());
    case 7:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<7>());
    case 8:
      return few_rows<HB>(w, p, row, block, next, sums, std::make_index_sequence<8>());
    default:
      return many_rows<HB>(w, p, row, rows, block, sums);
  }
}

template <bool Multishift>
void block_sums(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept {
  switch (w.words / 8) {
    case 2:
      return sums_at_rate<2, Multishift>(w, p, row, rows, block, next, sums);
    case 3:
      return sums_at_rate<3, Multishift>(w, p, row, rows, block, next, sums);
    case 4:
      return sums_at_rate<4, Multishift>(w, p, row, rows, block, next, sums);
    case 5:
      return sums_at_rate<5, Multishift>(w, p, row, rows, block, next, sums);
    case 6:
      return sums_at_rate<6, Multishift>(w, p, row, rows, block, next, sums);
    case 7:
      return sums_at_rate<7, Multishift>(w, p, row, rows, block, next, sums);
    case 8:
      return sums_at_rate<8, Multishift>(w, p, row, rows, block, next, sums);
    case 10:
      return sums_at_rate<10, Multishift>(w, p, row, rows, block, next, sums);
    case 12:
      return sums_at_rate<12, Multishift>(w, p, row, rows, block, next, sums);
    case 14:
      return sums_at_rate<14, Multishift>(w, p, row, rows, block, next, sums);
    default:
      return sums_at_rate<16, Multishift>(w, p, row, rows, block, next, sums);
  }
}

}  // namespace

const Kernels kAvx512Kernels = {avx512_prepare_row, block_sums<false>, avx512_finish};
const Kernels kAvx512MultishiftKernels = {avx512_prepare_row, block_sums<true>, avx512_finish};

}  // namespace flashnext::exl3::internal

#endif
