// The hash constants of the n-gram table, derived from the config (spec/model.md 6.1). Checkpoints
// store them too; a difference means that table and config do not belong together.
#pragma once

#include "cpp/checkpoint/model_shape.h"

#include <cstdint>
#include <vector>

namespace flashnext {

struct NgramHash {
  std::vector<std::int64_t> multipliers;  // (ngram_size)
  std::vector<std::int64_t> sizes;        // (heads): consecutive primes
  std::vector<std::int64_t> offsets;      // (heads): running sums of sizes
  std::int64_t rows = 0;                  // sum of sizes, rounded up to the divisor
};

NgramHash derive_ngram_hash(const ModelShape& shape);

// Exact for every 64-bit number.
bool is_prime(std::uint64_t n) noexcept;

}  // namespace flashnext
