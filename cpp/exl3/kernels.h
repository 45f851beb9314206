// Internal to the room: the three steps that an Isa implements, behind prepare() and multiply().
#pragma once

#include "cpp/exl3/exl3.h"

#include <cstdint>

namespace flashnext::exl3::internal {

inline constexpr int kBlock = 128;     // columns of an output block, inputs of a rotation
inline constexpr int kTile = 16;       // weights along a side of a tile
inline constexpr int kAheadTiles = 8;  // rows of tiles that are asked of the memory ahead of use
inline constexpr int kCentre = 510;    // B - 510 is centred
inline constexpr float kRotate = 0.08838834764831845f;  // 1 / sqrt(128)
inline constexpr float kInverse = 887.0f / 131072.0f;
inline constexpr float kOffset = -238.0f / 131072.0f;

struct Kernels {
  // Steps 1 to 4 of one row: x (in) -> row `row` of p.
  void (*prepare_row)(const Exl3Weight& w, const float* x, std::int32_t levels, std::int32_t row,
                      const Prepared& p) noexcept;
  // Step 5: sums (rows, 128) of V (B - 510) for rows [row, row + rows) of p, rows <= kRowGroup,
  // and one output block. `next` is known.
  void (*sums)(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
               std::int32_t block, const Upcoming& next, std::int64_t* sums) noexcept;
  // Steps 6 and 7: sums (128) of one row -> y (128). `total` is S of the row, q is finite and not
  // 0.
  void (*finish)(const Exl3Weight& w, std::int32_t block, float q, std::int64_t total,
                 const std::int64_t* sums, float* y) noexcept;
};

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512MultishiftKernels;  // the same bits, faster where Intel made the core
#endif

// First byte of the tile at k-tile a, n-tile b.
inline const std::byte* tile_at(const Exl3Weight& w, std::int32_t a, std::int32_t b) noexcept {
  const std::int64_t index = static_cast<std::int64_t>(a) * (w.out / kTile) + b;
  return w.trellis + index * w.words * 2;
}

// What step 3 decides about a row from the bits of max |u|. NaN compares above infinity as bits, so
// an integer maximum finds it in any order.
enum class RowKind { kZero, kNumber, kNotFinite };

// NOTE: a row so small that levels / m overflows (m < 1e-34) counts as zero.
RowKind row_scales(std::uint32_t max_bits, std::int32_t levels, float* q, float* r) noexcept;
// Fills a row of p that has no numbers: zeros, with q = 0 or NaN.
void empty_row(RowKind kind, std::int32_t row, const Prepared& p) noexcept;

}  // namespace flashnext::exl3::internal
