// The integer linear: memory of prepared rows, choice of the instruction set, and the row and block
// loops that every Isa shares.
#include "cpp/base/errors.h"
#include "cpp/exl3/kernels.h"

#include <algorithm>
#include <cmath>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace flashnext::exl3 {

using internal::kBlock;
using internal::Kernels;

std::string_view to_string(Isa isa) noexcept {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

#if defined(__x86_64__)
namespace {
// Not a name that every compiler's __builtin_cpu_supports knows.
bool has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
}  // namespace
#endif

bool supported(Isa isa) noexcept {
  if (isa == Isa::kScalar) return true;
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  }
#endif
  return false;
}

Isa isa_named(std::string_view name) {
  if (name == "auto") return best_isa();
  for (const Isa isa : kIsas) {
    if (name != to_string(isa)) continue;
    if (!supported(isa)) {
      throw InputError("isa = \"" + std::string(name) + "\": this processor lacks it; choose auto");
    }
    return isa;
  }
  throw InputError("isa = \"" + std::string(name) + "\": choose auto, scalar, avx2 or avx512");
}

Isa best_isa() noexcept {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (supported(isa)) return isa;
  }
  return Isa::kScalar;
}

namespace {

const Kernels& kernels(Isa isa) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) {
    static const bool is_intel = __builtin_cpu_is("intel");
    return is_intel ? internal::kAvx512MultishiftKernels : internal::kAvx512Kernels;
  }
  if (isa == Isa::kAvx2) return internal::kAvx2Kernels;
#endif
  static_cast<void>(isa);
  return internal::kScalarKernels;
}

struct Layout {
  std::size_t v, high, low, q, sum, sum_high, sum_low, bytes;
};

Layout layout(std::int32_t rows, std::int32_t in) noexcept {
  std::size_t used = 0;
  const auto take = [&used](std::size_t bytes) {
    const std::size_t at = used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  const std::size_t n = static_cast<std::size_t>(rows);
  const std::size_t elements = n * static_cast<std::size_t>(in);
  Layout l{};
  l.v = take(2 * elements);
  l.high = take(elements);
  l.low = take(elements);
  l.q = take(4 * n);
  l.sum = take(8 * n);
  l.sum_high = take(8 * n);
  l.sum_low = take(8 * n);
  l.bytes = used;
  return l;
}

// A row without numbers: bias (or zero) when q = 0, NaN when its input was not finite.
void fill_row(const Exl3Weight& w, std::int32_t block, float q, float* y) noexcept {
  for (int n = 0; n < kBlock; ++n) {
    y[n] = q != 0.0f ? q : w.bias != nullptr ? w.bias[block * kBlock + n] : 0.0f;
  }
}

}  // namespace

std::size_t prepared_bytes(std::int32_t rows, std::int32_t in) noexcept {
  return layout(rows, in).bytes;
}

Prepared place_prepared(void* memory, std::int32_t rows, std::int32_t in) noexcept {
  const Layout l = layout(rows, in);
  std::byte* base = static_cast<std::byte*>(memory);
  return {reinterpret_cast<std::int16_t*>(base + l.v),
          reinterpret_cast<std::int8_t*>(base + l.high),
          reinterpret_cast<std::int8_t*>(base + l.low),
          reinterpret_cast<float*>(base + l.q),
          reinterpret_cast<std::int64_t*>(base + l.sum),
          reinterpret_cast<std::int64_t*>(base + l.sum_high),
          reinterpret_cast<std::int64_t*>(base + l.sum_low),
          rows,
          in};
}

Prepared rows_of(const Prepared& p, std::int32_t begin, std::int32_t count) noexcept {
  const std::int64_t at = static_cast<std::int64_t>(begin) * p.in;
  return {p.v + at,           p.high + at,       p.low + at, p.q + begin, p.sum + begin,
          p.sum_high + begin, p.sum_low + begin, count,      p.in};
}

void prepare(const Exl3Weight& w, const float* x, std::int64_t x_stride, std::int32_t levels,
             Isa isa, std::int32_t begin, std::int32_t end, const Prepared& p) noexcept {
  const Kernels& k = kernels(isa);
  for (std::int32_t row = begin; row < end; ++row) {
    k.prepare_row(w, x + row * x_stride, levels, row, p);
  }
}

Upcoming upcoming(const Exl3Weight& w, std::int32_t block, std::int32_t in_begin) noexcept {
  using internal::kTile;
  return {internal::tile_at(w, in_begin / kTile, block * (kBlock / kTile)),
          std::int64_t{w.out / kTile} * w.words * 2};
}

void prefetch(const Exl3Weight& w, const Upcoming& next) noexcept {
  const std::int64_t bytes = std::int64_t{kBlock / internal::kTile} * w.words * 2;
  for (std::int64_t row = 0; row < internal::kAheadTiles; ++row) {
    for (std::int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(next.tiles + row * next.stride + line);
    }
  }
}

void part_sums(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block,
               std::int32_t in_begin, std::int32_t in_end, std::int64_t* sums,
               const Upcoming& next) noexcept {
  // The part as a linear of its own; rows keep their distance p.in.
  Exl3Weight part = w;
  part.trellis = internal::tile_at(w, in_begin / internal::kTile, 0);
  part.in = in_end - in_begin;
  std::int64_t totals[kRowGroup];
  Prepared rows = p;
  rows.v += in_begin;
  rows.sum = totals;
  for (std::int32_t row = 0; row < p.rows; ++row) {
    const std::int16_t* v = rows.v + static_cast<std::int64_t>(row) * p.in;
    totals[row] = 0;
    for (std::int32_t first = 0; first < part.in; first += kBlock) {
      std::int32_t total = 0;
      for (int k = 0; k < kBlock; ++k) total += v[first + k];
      totals[row] += total;
    }
  }
  kernels(isa).sums(part, rows, 0, p.rows, block,
                    next.tiles != nullptr ? next : upcoming(w, block + 1, in_begin), sums);
}

void finish_sums(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block,
                 const std::int64_t* sums, float* y, std::int64_t y_stride,
                 const std::int32_t* y_rows) noexcept {
  const Kernels& k = kernels(isa);
  for (std::int32_t row = 0; row < p.rows; ++row) {
    float* out = y + (y_rows != nullptr ? y_rows[row] : row) * y_stride + block * kBlock;
    const float q = p.q[row];
    if (q == 0.0f || std::isnan(q)) {
      fill_row(w, block, q, out);
    } else {
      k.finish(w, block, q, p.sum[row], sums + row * kBlock, out);
    }
  }
}

void multiply(const Exl3Weight& w, const Prepared& p, Isa isa, std::int32_t block_begin,
              std::int32_t block_end, float* y, std::int64_t y_stride, const std::int32_t* y_rows,
              const Upcoming& next) noexcept {
  alignas(64) std::int64_t sums[kRowGroup * kBlock];
  for (std::int32_t row = 0; row < p.rows; row += kRowGroup) {
    const Prepared group = rows_of(p, row, std::min(kRowGroup, p.rows - row));
    float* to = y_rows != nullptr ? y : y + row * y_stride;
    const std::int32_t* to_rows = y_rows != nullptr ? y_rows + row : nullptr;
    for (std::int32_t block = block_begin; block < block_end; ++block) {
      const bool known = block + 1 == block_end && next.tiles != nullptr;
      kernels(isa).sums(w, group, 0, group.rows, block, known ? next : upcoming(w, block + 1, 0),
                        sums);
      finish_sums(w, group, isa, block, sums, to, y_stride, to_rows);
    }
  }
}

}  // namespace flashnext::exl3
