// Trellis decode straight from the format (spec/exl3.md 2, 3, 5): the oracle of every kernel.
#include "cpp/base/half.h"
#include "cpp/exl3/exl3.h"

#include <cstring>

namespace flashnext::exl3 {

namespace {
constexpr std::uint32_t kMultiplier = 0x83DCD12Du;
}

bool valid_words(std::int32_t words) noexcept {
  if (words == 24 || words == 40 || words == 56) return true;
  return words >= 16 && words <= 128 && words % 16 == 0;
}

std::int32_t byte_sum(std::uint16_t state) noexcept {
  const std::uint32_t x = state * kMultiplier;
  return static_cast<std::int32_t>((x & 255u) + ((x >> 8) & 255u) + ((x >> 16) & 255u) + (x >> 24));
}

std::uint16_t codebook(std::uint16_t state) noexcept {
  return f32_to_f16(static_cast<float>(887 * byte_sum(state) - 452608) * 0x1p-17f);
}

void tile_states(const std::byte* tile, std::int32_t words, std::uint16_t states[256]) noexcept {
  std::uint32_t w[64];
  const int n = words / 2;  // u32 words of the ring
  std::memcpy(w, tile, static_cast<std::size_t>(n) * 4);
  const int half_bits = words / 8;  // 2 K
  for (int t = 0; t < 256; ++t) {
    const int e = ((t + 1) * half_bits) / 2 + 32 * n;  // window end, kept positive
    const int hi = (e - 1) >> 5;
    const int lo = (e - 16) >> 5;
    const std::uint64_t pair = static_cast<std::uint64_t>(w[lo % n]) << 32 | w[hi % n];
    states[t] = static_cast<std::uint16_t>(pair >> (32 * (hi + 1) - e));
  }
}

void tile_sums(const std::byte* tile, std::int32_t words, std::int16_t sums[256]) noexcept {
  std::uint16_t states[256];
  tile_states(tile, words, states);
  for (int t = 0; t < 256; ++t) {
    const int lane = t >> 3;
    const int row = 2 * (lane & 3) + (t & 1) + 8 * ((t >> 1) & 1);
    const int col = (lane >> 2) + 8 * ((t >> 2) & 1);
    sums[16 * row + col] = static_cast<std::int16_t>(byte_sum(states[t]));
  }
}

void ring_row(const std::byte* row, std::int32_t bits, std::int32_t width,
              const std::uint16_t* bias, float* out) noexcept {
  const float scale = f16_to_f32(load_u16(row));
  const std::byte* stream = row + 2;
  const std::uint32_t mask = (1u << bits) - 1u;
  const auto symbol = [&](std::int32_t i) {
    const std::int32_t bit = i * bits;
    std::uint32_t pair = std::to_integer<std::uint32_t>(stream[bit >> 3]);
    if ((bit & 7) + bits > 8) pair |= std::to_integer<std::uint32_t>(stream[(bit >> 3) + 1]) << 8;
    return (pair >> (bit & 7)) & mask;
  };
  // The ring closes: the first states end with the last symbols.
  std::uint32_t state = 0;
  for (std::int32_t i = width - (15 / bits + 1); i < width; ++i) state = state << bits | symbol(i);
  for (std::int32_t i = 0; i < width; ++i) {
    state = (state << bits | symbol(i)) & 0xFFFFu;
    float value = f16_to_f32(codebook(static_cast<std::uint16_t>(state))) * scale;
    if (bias != nullptr) value = value + f16_to_f32(bias[i]);
    out[i] = f16_to_f32(f32_to_f16(value));
  }
}

}  // namespace flashnext::exl3
