// Step 5 of the integer linear with AVX-512 (F, BW, DQ, VL, VBMI, VNNI).
//
// A window s becomes s * 0x83DCD12D by vpmulld; vpdpbusd with ones adds its four bytes. The sums of
// two rows go into the words of a dword, and vpdpwssd multiplies them with two 15-bit activations.
// Multiplies, dot products and multishifts share two execution units; shifts and logic use the
// others. One row: about 41 cycles a tile of K = 3 on Zen 4. Many rows: tiles of 128 inputs x 64
// columns are decoded into L1 and multiplied by six rows at a time.
#if defined(__x86_64__)

#include "cpp/exl3/avx512_plan.h"
#include "cpp/exl3/avx512_rows.h"
#include "cpp/exl3/kernels.h"

#include <cstring>
#include <immintrin.h>

// GCC 12 takes the deliberately undefined operand inside some intrinsics for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace flashnext::exl3::internal {

namespace {

#define FN_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni")))
#define FN_AVX512_INLINE FN_AVX512 __attribute__((always_inline)) inline

constexpr int kMultiplier = static_cast<int>(0x83DCD12Du);
constexpr int kTiles = kBlock / kTile;  // tiles along a side of a block
// B <= 1020, |V| <= 32258: a dword takes 32 products of pairs, so one row is folded every 4 tiles.
constexpr int kFoldTiles = 4;
// |B - 510| <= 510: it takes 64 products of pairs, 8 tiles.
constexpr int kChunkTiles = 8;
constexpr int kPassTiles = 4;  // n-tiles decoded at once
constexpr int kPairs = kTile / 2;
constexpr int kPrefetchTiles = 8;

// Lane classes whose windows are cut by multishift (the others: permute and shift). Chosen so that
// the two kinds of execution units are equally busy.
template <int HB>
constexpr int multishift_classes() {
  return HB == 10 ? 1 : 0;
}

template <int HB>
struct Tile {
  __m512i r[Plan<HB>::kRegisters];
};

template <int HB>
FN_AVX512_INLINE Tile<HB> load_tile(const std::byte* p) {
  using P = Plan<HB>;
  Tile<HB> t;
  if constexpr (P::kTileBytes < 64) {
    t.r[0] = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (P::kTileBytes / 4)) - 1), p);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < P::kRegisters - 1; ++i) t.r[i] = _mm512_loadu_si512(p + 64 * i);
    t.r[P::kRegisters - 1] = _mm512_loadu_si512(p + P::kLast);
  }
  return t;
}

// The bytes that a Permute names.
template <int HB, class Source>
FN_AVX512_INLINE __m512i permute(const Tile<HB>& t) {
  constexpr int n = Plan<HB>::kRegisters;
  const __m512i low = _mm512_load_si512(Source::kValue.low.data());
  if constexpr (n == 1) {
    return _mm512_permutexvar_epi8(low, t.r[0]);
  } else {
    __m512i z = _mm512_permutex2var_epi8(t.r[0], low, t.r[1]);
    if constexpr (n > 2) {
      const __m512i high = _mm512_load_si512(Source::kValue.high.data());
      constexpr __mmask64 mask = Source::kValue.from_high;
      if constexpr (n == 3) {
        z = _mm512_mask_permutexvar_epi8(z, mask, high, t.r[2]);
      } else {
        z = _mm512_mask_blend_epi8(mask, z, _mm512_permutex2var_epi8(t.r[2], high, t.r[3]));
      }
    }
    return z;
  }
}

// Windows j and j + 4 of lane class C as 16 dwords.
template <int HB, int C, int J>
FN_AVX512_INLINE __m512i windows(__m512i z) {
  if constexpr (C < multishift_classes<HB>()) {
    const void* control = Multishifts<HB, multishift_class<HB>(C, J), J>::kValue.data();
    return _mm512_maskz_multishift_epi64_epi8(0x3333333333333333u, _mm512_load_si512(control), z);
  } else {
    const void* counts = Shifts<HB, shift_class<HB>(C, J), J>::kValue.data();
    return _mm512_and_si512(_mm512_srlv_epi32(z, _mm512_load_si512(counts)),
                            _mm512_set1_epi32(0xFFFF));
  }
}

template <int HB, int C, int J>
FN_AVX512_INLINE __m512i gather(const Tile<HB>& t) {
  if constexpr (C < multishift_classes<HB>()) {
    return permute<HB, QwordPermute<HB, C>>(t);
  } else {
    return permute<HB, DwordPermute<HB, C, Plan<HB>::first_of(C, J)>>(t);
  }
}

// B of windows J (low words) and J + 1 (high words): two rows of 16 columns.
template <int HB, int C, int J>
FN_AVX512_INLINE __m512i pair_sums(const Tile<HB>& t) {
  const __m512i multiplier = _mm512_set1_epi32(kMultiplier);
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i even = windows<HB, C, J>(gather<HB, C, J>(t));
  const __m512i odd = windows<HB, C, J + 1>(gather<HB, C, J + 1>(t));
  __m512i b =
      _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_mullo_epi32(odd, multiplier), ones);
  b = _mm512_slli_epi32(b, 16);
  return _mm512_dpbusd_epi32(b, _mm512_mullo_epi32(even, multiplier), ones);
}

FN_AVX512_INLINE __m512i broadcast_pair(const std::int16_t* v) {
  std::int32_t pair;
  std::memcpy(&pair, v, sizeof pair);
  return _mm512_set1_epi32(pair);
}

template <int HB, int C>
FN_AVX512_INLINE __m512i add_class(__m512i acc, const Tile<HB>& t, const std::int16_t* v) {
  acc = _mm512_dpwssd_epi32(acc, pair_sums<HB, C, 0>(t), broadcast_pair(v + 2 * C));
  return _mm512_dpwssd_epi32(acc, pair_sums<HB, C, 2>(t), broadcast_pair(v + 8 + 2 * C));
}

// acc + sum over the 16 rows of a tile of v (16) * B, dword 2i + h = column i + 8h.
template <int HB>
FN_AVX512_INLINE __m512i add_tile(__m512i acc, const std::byte* tile, const std::int16_t* v) {
  const Tile<HB> t = load_tile<HB>(tile);
  acc = add_class<HB, 0>(acc, t, v);
  acc = add_class<HB, 1>(acc, t, v);
  acc = add_class<HB, 2>(acc, t, v);
  return add_class<HB, 3>(acc, t, v);
}

// sums (16) += the dwords, each sign-extended.
FN_AVX512_INLINE void widen_into(std::int64_t* sums, __m512i acc) {
  const __m512i even = _mm512_srai_epi64(_mm512_slli_epi64(acc, 32), 32);
  const __m512i odd = _mm512_srai_epi64(acc, 32);
  _mm512_storeu_si512(sums, _mm512_add_epi64(_mm512_loadu_si512(sums), even));
  _mm512_storeu_si512(sums + 8, _mm512_add_epi64(_mm512_loadu_si512(sums + 8), odd));
}

template <int HB>
FN_AVX512 void one_row(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t block,
                       std::int64_t* sums) noexcept {
  constexpr int bytes = Plan<HB>::kTileBytes;
  const std::int64_t stride = static_cast<std::int64_t>(w.out / kTile) * bytes;
  const std::byte* tiles = tile_at(w, 0, block * kTiles);
  const std::int16_t* v = p.v + static_cast<std::int64_t>(row) * p.in;
  // acc = 65536 high + low, low >= 0: enough for 2^21 inputs.
  __m512i low[kTiles];
  __m512i high[kTiles];
  for (int n = 0; n < kTiles; ++n) low[n] = high[n] = _mm512_setzero_si512();
  for (std::int32_t a = 0; a < w.in / kTile; a += kFoldTiles) {
    for (int n = 0; n < kTiles; ++n) {
      const std::byte* tile = tiles + a * stride + n * bytes;
      __m512i acc = _mm512_setzero_si512();
#pragma GCC unroll 1
      for (int i = 0; i < kFoldTiles; ++i) {
        const std::byte* ahead = tile + (i + kPrefetchTiles) * stride;
#pragma GCC unroll 4
        for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
        acc = add_tile<HB>(acc, tile + i * stride, v + (a + i) * kTile);
      }
      low[n] = _mm512_add_epi32(low[n], _mm512_and_si512(acc, _mm512_set1_epi32(0xFFFF)));
      high[n] = _mm512_add_epi32(high[n], _mm512_srai_epi32(acc, 16));
    }
  }
  const __m512i centre = _mm512_set1_epi64(-kCentre * p.sum[row]);
  for (int n = 0; n < kTiles; ++n) {
    const __m512i even = _mm512_and_si512(low[n], _mm512_set1_epi64(0xFFFFFFFF));
    const __m512i odd = _mm512_srli_epi64(low[n], 32);
    const __m512i high_even = _mm512_srai_epi64(_mm512_slli_epi64(high[n], 32), 16);
    const __m512i high_odd = _mm512_slli_epi64(_mm512_srai_epi64(high[n], 32), 16);
    std::int64_t* to = sums + n * kTile;
    _mm512_storeu_si512(to, _mm512_add_epi64(centre, _mm512_add_epi64(even, high_even)));
    _mm512_storeu_si512(to + 8, _mm512_add_epi64(centre, _mm512_add_epi64(odd, high_odd)));
  }
}

template <int HB, int C>
FN_AVX512_INLINE void decode_class(const Tile<HB>& t, __m512i* to) {
  const __m512i centre = _mm512_set1_epi16(kCentre);
  to[C * kPassTiles] = _mm512_sub_epi16(pair_sums<HB, C, 0>(t), centre);
  to[(C + 4) * kPassTiles] = _mm512_sub_epi16(pair_sums<HB, C, 2>(t), centre);
}

// to (8 pairs, kPassTiles): B - 510 of the rows of pair p, at stride kPassTiles.
template <int HB>
FN_AVX512_INLINE void decode_tile(const std::byte* tile, __m512i* to) {
  const Tile<HB> t = load_tile<HB>(tile);
  decode_class<HB, 0>(t, to);
  decode_class<HB, 1>(t, to);
  decode_class<HB, 2>(t, to);
  decode_class<HB, 3>(t, to);
}

using Decoded = __m512i[kChunkTiles * kPairs * kPassTiles];

// Rows v (R rows at stride `in`, 128 inputs) times the decoded 128 x 64 weights, into sums (R,
// 128).
template <int R>
FN_AVX512 void multiply_rows(const Decoded& weights, const std::int16_t* v, std::int64_t in,
                             std::int64_t* sums) noexcept {
  __m512i acc[static_cast<std::size_t>(R)][kPassTiles];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPassTiles; ++n) acc[r][n] = _mm512_setzero_si512();
  }
#pragma GCC unroll 1
  for (int p = 0; p < kChunkTiles * kPairs; ++p) {
    const __m512i* w = weights + p * kPassTiles;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i x = broadcast_pair(v + r * in + 2 * p);
#pragma GCC unroll 4
      for (int n = 0; n < kPassTiles; ++n) acc[r][n] = _mm512_dpwssd_epi32(acc[r][n], w[n], x);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kPassTiles; ++n) {
      widen_into(sums + r * kBlock + n * kTile, acc[r][n]);
    }
  }
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
          const std::byte* ahead = tile + kChunkTiles * stride;
#pragma GCC unroll 4
          for (int line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line);
          decode_tile<HB>(tile, decoded + i * kPairs * kPassTiles + n);
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

template <int HB>
void sums_at_rate(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                  std::int32_t block, std::int64_t* sums) noexcept {
  if (rows == 1) {
    one_row<HB>(w, p, row, block, sums);
  } else {
    many_rows<HB>(w, p, row, rows, block, sums);
  }
}

void block_sums(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                std::int32_t block, std::int64_t* sums) noexcept {
  switch (w.words / 8) {
    case 2:
      return sums_at_rate<2>(w, p, row, rows, block, sums);
    case 3:
      return sums_at_rate<3>(w, p, row, rows, block, sums);
    case 4:
      return sums_at_rate<4>(w, p, row, rows, block, sums);
    case 5:
      return sums_at_rate<5>(w, p, row, rows, block, sums);
    case 6:
      return sums_at_rate<6>(w, p, row, rows, block, sums);
    case 7:
      return sums_at_rate<7>(w, p, row, rows, block, sums);
    case 8:
      return sums_at_rate<8>(w, p, row, rows, block, sums);
    case 10:
      return sums_at_rate<10>(w, p, row, rows, block, sums);
    case 12:
      return sums_at_rate<12>(w, p, row, rows, block, sums);
    case 14:
      return sums_at_rate<14>(w, p, row, rows, block, sums);
    default:
      return sums_at_rate<16>(w, p, row, rows, block, sums);
  }
}

}  // namespace

const Kernels kAvx512Kernels = {avx512_prepare_row, block_sums, avx512_finish};

}  // namespace flashnext::exl3::internal

#endif
