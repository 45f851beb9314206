// Orders of experts by their counters, for policies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace flashnext::cache {

// splitmix64's finaliser: a well mixed function of its argument.
inline std::uint64_t mix64(std::uint64_t v) noexcept {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

// 64 random bits at place `i` of the stream `seed`: any place on its own.
inline std::uint64_t random_at(std::uint64_t seed, std::uint64_t i) noexcept {
  return mix64(mix64(seed + 0x9E3779B97F4A7C15u) + (i + 1) * 0x9E3779B97F4A7C15u);
}

// floor(r n / 2^32) of the high half of r: in [0, n).
inline std::uint32_t draw_below(std::uint64_t r, std::uint32_t n) noexcept {
  return static_cast<std::uint32_t>(((r >> 32) * n) >> 32);
}

// Ids 0..n-1 by value, most first; ties to the lower id.
template <class T>
std::vector<std::int32_t> most_first(std::span<const T> values) {
  std::vector<std::int32_t> ids(values.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [values](std::int32_t a, std::int32_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  return ids;
}

}  // namespace flashnext::cache
