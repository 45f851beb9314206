// How many rows a step has, and what follows from it. One name for one number.
#pragma once

#include <cstdint>

namespace flashnext {

// A lane decodes a token, or a window of drafts that is verified together.
inline constexpr std::int32_t kWindowRows = 8;
// Most rows of a decode step, of all lanes together.
inline constexpr std::int32_t kDecodeRows = 32;
// Rows of one tensor core product.
inline constexpr std::int32_t kFragmentRows = 8;

// Decode: the experts of a step are found inside its graph, and it may be rewound. Prefill: what
// one layer needs for itself shares memory with the others, and experts in host memory are
// streamed.
enum class Phase : std::uint8_t { kDecode, kPrefill };

// Most rows of a decode step of so many lanes.
constexpr std::int32_t decode_rows(std::int32_t lanes) noexcept {
  return lanes < kDecodeRows / kWindowRows ? lanes * kWindowRows : kDecodeRows;
}

// Buckets of decode steps. Few rows have one each; of more, the next larger one computes little in
// vain.
inline constexpr std::int32_t kDecodeBuckets[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32};

}  // namespace flashnext
