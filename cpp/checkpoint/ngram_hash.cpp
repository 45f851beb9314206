#include "cpp/checkpoint/ngram_hash.h"

#include <algorithm>
#include <bit>

namespace flashnext {
namespace {

using Wide = unsigned __int128;

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15u;

std::uint64_t mix64(std::uint64_t v) noexcept {
  v += kGamma;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

std::uint64_t multiply_mod(std::uint64_t a, std::uint64_t b, std::uint64_t n) noexcept {
  return static_cast<std::uint64_t>(static_cast<Wide>(a) * b % n);
}

std::uint64_t power_mod(std::uint64_t base, std::uint64_t exponent, std::uint64_t n) noexcept {
  std::uint64_t result = 1 % n;
  for (base %= n; exponent != 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = multiply_mod(result, base, n);
    base = multiply_mod(base, base, n);
  }
  return result;
}

}  // namespace

// Miller-Rabin; the first twelve primes as bases decide every n below 2^64.
bool is_prime(std::uint64_t n) noexcept {
  constexpr std::uint64_t kBases[] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37};
  if (n < 2) return false;
  for (const std::uint64_t p : kBases) {
    if (n % p == 0) return n == p;
  }
  const int twos = std::countr_zero(n - 1);
  for (const std::uint64_t base : kBases) {
    std::uint64_t x = power_mod(base, (n - 1) >> twos, n);
    if (x == 1 || x == n - 1) continue;
    bool composite = true;
    for (int i = 1; i < twos && composite; ++i) {
      x = multiply_mod(x, x, n);
      composite = x != n - 1;
    }
    if (composite) return false;
  }
  return true;
}

NgramHash derive_ngram_hash(const ModelShape& shape) {
  NgramHash hash;
  // A product of an id and a multiplier stays below 2^63.
  const std::uint64_t most = (std::uint64_t{1} << 63) - 1;
  const std::uint64_t bound =
      std::max<std::uint64_t>(1, most / static_cast<std::uint64_t>(shape.vocab) / 2);
  // The engine has one n-gram layer, so the layer's rank among such layers is 0 and drops out.
  const auto seed = static_cast<std::uint64_t>(shape.ngram_seed);
  for (std::int32_t i = 0; i < shape.ngram_size; ++i) {
    const std::uint64_t draw = mix64(seed + (static_cast<std::uint64_t>(i) + 1) * kGamma);
    hash.multipliers.push_back(static_cast<std::int64_t>(2 * (draw % bound) + 1));
  }
  auto candidate = static_cast<std::uint64_t>(shape.ngram_vocab_base);
  for (std::int32_t head = 0; head < shape.ngram_heads(); ++head, ++candidate) {
    while (!is_prime(candidate)) ++candidate;
    hash.sizes.push_back(static_cast<std::int64_t>(candidate));
    hash.offsets.push_back(hash.rows);
    hash.rows += static_cast<std::int64_t>(candidate);
  }
  const std::int64_t rest = hash.rows % shape.ngram_divisor;
  if (rest != 0) hash.rows += shape.ngram_divisor - rest;
  return hash;
}

}  // namespace flashnext
