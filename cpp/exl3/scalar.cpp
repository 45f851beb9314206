// The integer linear in plain C++: the formulas of spec/numerics.md 1 in their order.
#include "cpp/base/half.h"
#include "cpp/base/math.h"
#include "cpp/exl3/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace flashnext::exl3::internal {

namespace {

void butterflies(float u[kBlock]) noexcept {
  for (int stride = 1; stride < kBlock; stride *= 2) {
    for (int base = 0; base < kBlock; base += 2 * stride) {
      for (int i = base; i < base + stride; ++i) {
        const float a = u[i];
        const float b = u[i + stride];
        u[i] = a + b;
        u[i + stride] = a - b;
      }
    }
  }
  for (int i = 0; i < kBlock; ++i) u[i] = u[i] * kRotate;
}

// Rotated inputs [first, first + 128).
void rotate_block(const Exl3Weight& w, const float* x, std::int32_t first,
                  float u[kBlock]) noexcept {
  for (int i = 0; i < kBlock; ++i) {
    u[i] = x[first + i] * f16_to_f32(load_u16(w.suh + 2 * (first + i)));
  }
  butterflies(u);
}

void prepare_row(const Exl3Weight& w, const float* x, std::int32_t levels, std::int32_t row,
                 const Prepared& p) noexcept {
  float u[kBlock];
  std::uint32_t max_bits = 0;
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    rotate_block(w, x, first, u);
    for (int i = 0; i < kBlock; ++i) {
      max_bits = std::max(max_bits, std::bit_cast<std::uint32_t>(u[i]) & 0x7FFFFFFFu);
    }
  }
  float q;
  float r;
  const RowKind kind = row_scales(max_bits, levels, &q, &r);
  if (kind != RowKind::kNumber) {
    empty_row(kind, row, p);
    return;
  }
  const std::int64_t at = static_cast<std::int64_t>(row) * p.in;
  std::int64_t sum = 0;
  std::int64_t sum_high = 0;
  for (std::int32_t first = 0; first < w.in; first += kBlock) {
    rotate_block(w, x, first, u);
    for (int i = 0; i < kBlock; ++i) {
      const std::int32_t v =
          std::clamp(static_cast<std::int32_t>(math::round_even(u[i] * r)), -levels, levels);
      const std::int32_t high =
          static_cast<std::int32_t>(math::round_even(static_cast<float>(v) / 254.0f));
      p.v[at + first + i] = static_cast<std::int16_t>(v);
      p.high[at + first + i] = static_cast<std::int8_t>(high);
      p.low[at + first + i] = static_cast<std::int8_t>(v - 254 * high);
      sum += v;
      sum_high += high;
    }
  }
  p.q[row] = q;
  p.sum[row] = sum;
  p.sum_high[row] = sum_high;
  p.sum_low[row] = sum - 254 * sum_high;
}

void block_sums(const Exl3Weight& w, const Prepared& p, std::int32_t row, std::int32_t rows,
                std::int32_t block, const Upcoming&, std::int64_t* sums) noexcept {
  std::fill(sums, sums + static_cast<std::int64_t>(rows) * kBlock, 0);
  std::int16_t tile[256];
  for (std::int32_t a = 0; a < w.in / kTile; ++a) {
    for (std::int32_t b = 0; b < kBlock / kTile; ++b) {
      tile_sums(tile_at(w, a, block * (kBlock / kTile) + b), w.words, tile);
      for (std::int32_t i = 0; i < rows; ++i) {
        const std::int16_t* v = p.v + static_cast<std::int64_t>(row + i) * p.in + a * kTile;
        std::int32_t part[kTile] = {};  // 16 products of at most 510 * 32258
        for (int k = 0; k < kTile; ++k) {
          for (int n = 0; n < kTile; ++n) part[n] += v[k] * (tile[16 * k + n] - kCentre);
        }
        std::int64_t* to = sums + static_cast<std::int64_t>(i) * kBlock + b * kTile;
        for (int n = 0; n < kTile; ++n) to[n] += part[n];
      }
    }
  }
}

void finish(const Exl3Weight& w, std::int32_t block, float q, std::int64_t total,
            const std::int64_t* sums, float* y) noexcept {
  const std::int32_t first = block * kBlock;
  const float c = kOffset * (q * static_cast<float>(total));
  float a[kBlock];
  for (int n = 0; n < kBlock; ++n) a[n] = math::fma(kInverse, q * static_cast<float>(sums[n]), c);
  butterflies(a);
  for (int n = 0; n < kBlock; ++n) {
    a[n] = a[n] * f16_to_f32(load_u16(w.svh + 2 * (first + n)));
    if (w.bias != nullptr) a[n] = a[n] + w.bias[first + n];
  }
  std::memcpy(y, a, sizeof a);
}

}  // namespace

RowKind row_scales(std::uint32_t max_bits, std::int32_t levels, float* q, float* r) noexcept {
  if (max_bits >= 0x7F800000u) return RowKind::kNotFinite;
  const float m = std::bit_cast<float>(max_bits);
  const float l = static_cast<float>(levels);
  *r = l / m;
  *q = m / l;
  return m == 0.0f || std::isinf(*r) ? RowKind::kZero : RowKind::kNumber;
}

void empty_row(RowKind kind, std::int32_t row, const Prepared& p) noexcept {
  const std::int64_t at = static_cast<std::int64_t>(row) * p.in;
  const std::size_t in = static_cast<std::size_t>(p.in);
  std::memset(p.v + at, 0, in * sizeof(std::int16_t));
  std::memset(p.high + at, 0, in);
  std::memset(p.low + at, 0, in);
  p.q[row] = kind == RowKind::kZero ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  p.sum[row] = 0;
  p.sum_high[row] = 0;
  p.sum_low[row] = 0;
}

const Kernels kScalarKernels = {prepare_row, block_sums, finish};

}  // namespace flashnext::exl3::internal
