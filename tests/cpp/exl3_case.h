// Random EXL3 linears for tests, and the format and the arithmetic once more, straight from the
// formulas of the spec and in no hurry: what the room in cpp/exl3 is compared with.
#pragma once

#include "cpp/base/half.h"
#include "cpp/exl3/exl3.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace flashnext::exl3_test {

// Those that this processor has.
inline std::vector<exl3::Isa> isas() {
  std::vector<exl3::Isa> all;
  for (const exl3::Isa isa : exl3::kIsas) {
    if (exl3::supported(isa)) all.push_back(isa);
  }
  return all;
}

inline constexpr std::int32_t kAllWords[] = {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128};

// A linear in memory of its own; `offset` bytes are put before every part, so 1 makes all odd.
struct Linear {
  std::vector<std::byte> trellis, suh, svh;
  std::vector<float> bias;
  Exl3Weight w{};
};

inline void put_half(std::vector<std::byte>& to, std::size_t at, float value) {
  const std::uint16_t bits = f32_to_f16(value);
  std::memcpy(to.data() + at, &bits, sizeof bits);
}

inline Linear random_linear(std::int32_t in, std::int32_t out, std::int32_t words, unsigned seed,
                            std::size_t offset = 1, bool bias = false) {
  std::mt19937 random(seed);
  Linear l;
  const std::size_t bytes = static_cast<std::size_t>(in / 16) * static_cast<std::size_t>(out / 16) *
                            static_cast<std::size_t>(words) * 2;
  l.trellis.resize(offset + bytes);
  for (std::byte& b : l.trellis) b = static_cast<std::byte>(random());
  std::normal_distribution<float> spread(0.0f, 0.2f);
  const auto scales = [&](std::vector<std::byte>& to, std::int32_t n, float size) {
    to.resize(offset + 2 * static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const float sign = (random() & 1) != 0 ? 1.0f : -1.0f;
      put_half(to, offset + 2 * i, sign * size * std::exp(spread(random)));
    }
  };
  scales(l.suh, in, 1.0f / std::sqrt(static_cast<float>(in)));
  scales(l.svh, out, 1.0f);
  if (bias) {
    for (std::int32_t i = 0; i < out; ++i) l.bias.push_back(spread(random));
  }
  l.w = {l.trellis.data() + offset,
         l.suh.data() + offset,
         l.svh.data() + offset,
         bias ? l.bias.data() : nullptr,
         in,
         out,
         words,
         0};
  return l;
}

inline std::vector<float> random_rows(std::int32_t rows, std::int32_t in, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(rows) * static_cast<std::size_t>(in));
  for (float& v : x) v = normal(random);
  return x;
}

// ---- the format, bit by bit

inline int ring_bit(const std::byte* tile, std::int32_t words, int b) {
  const int ring = 16 * words;
  b = ((b % ring) + ring) % ring;
  const int byte = (b >> 3) ^ 3;
  return std::to_integer<int>(tile[byte]) >> (7 - (b & 7)) & 1;
}

inline std::uint16_t state_at(const std::byte* tile, std::int32_t words, int t) {
  const int end = static_cast<int>(std::floor((t + 1) * (words / 16.0)));
  unsigned state = 0;
  for (int b = end - 16; b < end; ++b) {
    state = state << 1 | static_cast<unsigned>(ring_bit(tile, words, b));
  }
  return static_cast<std::uint16_t>(state);
}

inline int sum_of_bytes(std::uint16_t state) {
  std::uint64_t x = (state * std::uint64_t{0x83DCD12D}) % (std::uint64_t{1} << 32);
  int sum = 0;
  for (; x != 0; x /= 256) sum += static_cast<int>(x % 256);
  return sum;
}

// B (in, out) of a whole linear.
inline std::vector<std::int16_t> byte_sums(const Exl3Weight& w) {
  std::vector<std::int16_t> b(static_cast<std::size_t>(w.in) * static_cast<std::size_t>(w.out));
  for (std::int32_t k = 0; k < w.in; ++k) {
    for (std::int32_t n = 0; n < w.out; ++n) {
      const int row = k % 16;
      const int col = n % 16;
      const int t =
          8 * (4 * (col & 7) + ((row & 7) >> 1)) + 4 * (col >> 3) + 2 * (row >> 3) + (row & 1);
      const std::size_t tile = static_cast<std::size_t>(k / 16) * (w.out / 16) + n / 16;
      b[static_cast<std::size_t>(k) * w.out + n] = static_cast<std::int16_t>(
          sum_of_bytes(state_at(w.trellis + tile * w.words * 2, w.words, t)));
    }
  }
  return b;
}

// ---- the integer linear, step by step (spec/numerics.md 1)

inline void rotate_blocks(std::vector<float>& u) {
  for (std::size_t block = 0; block < u.size(); block += 128) {
    for (std::size_t stride = 1; stride <= 64; stride *= 2) {
      for (std::size_t i = 0; i < 128; ++i) {
        if ((i & stride) != 0) continue;
        const float a = u[block + i];
        const float b = u[block + i + stride];
        u[block + i] = a + b;
        u[block + i + stride] = a - b;
      }
    }
    for (std::size_t i = 0; i < 128; ++i) u[block + i] *= 0.08838834764831845f;
  }
}

inline std::vector<float> linear_row(const Exl3Weight& w, const std::vector<std::int16_t>& b,
                                     const float* x, std::int32_t levels) {
  std::vector<float> u(static_cast<std::size_t>(w.in));
  for (std::size_t k = 0; k < u.size(); ++k) u[k] = x[k] * f16_to_f32(load_u16(w.suh + 2 * k));
  rotate_blocks(u);
  float m = 0.0f;
  for (const float v : u) m = std::max(m, std::fabs(v));
  const float r = static_cast<float>(levels) / m;
  const float q = m / static_cast<float>(levels);
  std::vector<std::int64_t> sums(static_cast<std::size_t>(w.out));
  std::int64_t total = 0;
  for (std::size_t k = 0; k < u.size(); ++k) {
    const std::int64_t v = std::clamp<std::int64_t>(std::lrint(u[k] * r), -levels, levels);
    total += v;
    for (std::size_t n = 0; n < sums.size(); ++n) sums[n] += v * (b[k * sums.size() + n] - 510);
  }
  std::vector<float> y(sums.size());
  for (std::size_t n = 0; n < y.size(); ++n) {
    const float last = -238.0f / 131072.0f * (q * static_cast<float>(total));
    y[n] = std::fma(887.0f / 131072.0f, q * static_cast<float>(sums[n]), last);
  }
  rotate_blocks(y);
  for (std::size_t n = 0; n < y.size(); ++n) {
    y[n] *= f16_to_f32(load_u16(w.svh + 2 * n));
    if (w.bias != nullptr) y[n] += w.bias[n];
  }
  return y;
}

// ---- ours

struct AlignedBytes {
  explicit AlignedBytes(std::size_t bytes) : memory(bytes + 256) {}
  void* data() {
    void* p = memory.data();
    std::size_t space = memory.size();
    return std::align(256, memory.size() - 256, p, space);
  }
  std::vector<std::byte> memory;
};

inline std::vector<float> ours(const Exl3Weight& w, const float* x, std::int32_t rows,
                               std::int32_t levels, exl3::Isa isa) {
  AlignedBytes memory(exl3::prepared_bytes(rows, w.in));
  const exl3::Prepared p = exl3::place_prepared(memory.data(), rows, w.in);
  exl3::prepare(w, x, w.in, levels, isa, 0, rows, p);
  std::vector<float> y(static_cast<std::size_t>(rows) * static_cast<std::size_t>(w.out), -1.0f);
  exl3::multiply(w, p, isa, 0, w.out / 128, y.data(), w.out);
  return y;
}

// Equal bits; NaN equals NaN, whose sign is the compiler's choice.
inline bool same_bits(const float* a, const float* b, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) {
      return false;
    }
  }
  return true;
}

}  // namespace flashnext::exl3_test
