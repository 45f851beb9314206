// EXL3 arithmetic with the mul1 codebook: trellis decode and the integer linear of
// spec/numerics.md 1. Every Isa gives the same bits; scalar is the oracle. All functions are pure,
// may run on any thread, and accept unaligned weights. Other codebooks never get here: the
// checkpoint room refuses them.
#pragma once

#include "cpp/exl3/weight.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace flashnext::exl3 {

enum class Isa { kScalar, kAvx2, kAvx512 };
inline constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};
std::string_view to_string(Isa isa) noexcept;
// The best the processor runs (kAvx512 needs F, BW, VL, VBMI and VNNI).
Isa best_isa() noexcept;
bool supported(Isa isa) noexcept;
// "scalar", "avx2", "avx512", or "auto" for the best; throws InputError for another name or one
// that the processor lacks.
Isa isa_named(std::string_view name);

inline constexpr std::int32_t kLevels = 32258;  // 127 * 254: 15-bit activations in two int8 digits
inline constexpr std::int32_t kLevelsOneDigit = 127;

// 16 K for a rate of the format: 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128.
bool valid_words(std::int32_t words) noexcept;

// ---- decode (oracles, checks, tools)
// ----------------------------------------------------------------------------

// Sum of the four bytes of state * 0x83DCD12D mod 2^32: 0..1020.
std::int32_t byte_sum(std::uint16_t state) noexcept;
// Codebook value of a state as fp16 bits: rn16((887 B - 452608) / 2^17).
std::uint16_t codebook(std::uint16_t state) noexcept;
// The 256 states of one tile in ring order, from `words` u16.
void tile_states(const std::byte* tile, std::int32_t words, std::uint16_t states[256]) noexcept;
// B(k, n) of one tile, row-major [16 in][16 out].
void tile_sums(const std::byte* tile, std::int32_t words, std::int16_t sums[256]) noexcept;
// One ring row (spec/exl3.md 5): word 0 the fp16 scale, then width * bits / 8 bytes. out =
// rn16(value * scale + bias).
void ring_row(const std::byte* row, std::int32_t bits, std::int32_t width,
              const std::uint16_t* bias, float* out) noexcept;

// ---- the integer linear
// -----------------------------------------------------------------------------------------

// Rows that share one decode of a weight tile; more rows than that are worth a job of their own.
inline constexpr std::int32_t kRowGroup = 128;

// Activation rows, rotated and quantised for one linear (steps 1 to 4). The memory is the caller's.
struct Prepared {
  std::int16_t* v;         // (rows, in): V
  std::int8_t* high;       // (rows, in): v1 = rne(V / 254)
  std::int8_t* low;        // (rows, in): v2 = V - 254 v1
  float* q;                // (rows): m / L
  std::int64_t* sum;       // (rows): S = sum of V
  std::int64_t* sum_high;  // (rows): sum of v1
  std::int64_t* sum_low;   // (rows): sum of v2
  std::int32_t rows;
  std::int32_t in;
};

// Bytes for a Prepared of that size, and how it lies in memory (256-byte aligned parts of
// `memory`).
std::size_t prepared_bytes(std::int32_t rows, std::int32_t in) noexcept;
Prepared place_prepared(void* memory, std::int32_t rows, std::int32_t in) noexcept;

// Fills rows [begin, end) of `p` from x (rows, in) with row stride x_stride. NaN or infinity in a
// row makes its q NaN, so that its results are NaN.
void prepare(const Exl3Weight& w, const float* x, std::int64_t x_stride, std::int32_t levels,
             Isa isa, std::int32_t begin, std::int32_t end, const Prepared& p) noexcept;

// Rows [begin, begin + count) of `p`, in place.
Prepared rows_of(const Prepared& p, std::int32_t begin, std::int32_t count) noexcept;

// The first rows of tiles of a block: weights that a thread multiplies next. While a product ends
// they are asked of the memory, so that the next one does not begin with waiting for it.
struct Upcoming {
  const std::byte* tiles = nullptr;  // null: unknown, the block that follows
  std::int64_t stride = 0;           // bytes from a row of tiles to the one below
};
// Of `block` from input `in_begin` on, a multiple of 16.
Upcoming upcoming(const Exl3Weight& w, std::int32_t block, std::int32_t in_begin) noexcept;
// Asks for them now, for whoever has something else to do first. Returns at once.
void prefetch(const Exl3Weight& w, const Upcoming& next) noexcept;

// y (rows, out), row stride y_stride: output blocks of 128 columns [block_begin, block_end) of all
// rows of `p` (steps 5 to 7). Blocks and rows may be computed by different threads. Row r goes to
// row y_rows[r] of y when y_rows is given.
void multiply(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block_begin,
              std::int32_t block_end, float* y, std::int64_t y_stride,
              const std::int32_t* y_rows = nullptr, const Upcoming& next = {}) noexcept;

// multiply() in two steps, for callers that divide the inputs as well. Step 5 of one block over
// inputs [in_begin, in_end), multiples of 128: sums (rows, 128), at most kRowGroup rows. The sums
// of all parts add up to those of the whole, in any order.
void part_sums(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block,
               std::int32_t in_begin, std::int32_t in_end, std::int64_t* sums,
               const Upcoming& next = {}) noexcept;
// Steps 6 and 7 of one block from the sums (rows, 128) of all inputs; y as in multiply().
void finish_sums(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block,
                 const std::int64_t* sums, float* y, std::int64_t y_stride,
                 const std::int32_t* y_rows = nullptr) noexcept;

}  // namespace flashnext::exl3
