// The sampler: a pure function from (logits row, parameters, absolute position) to a token.
//
// 1. NaN among the candidates (ids below `limit`), or a largest logit that is not finite:
//    kBadLogits. Minus infinity is a logit like any other and is never drawn beside a finite one.
// 2. temperature 0: the largest logit, lowest id.
// 3. Else the candidates in the order (logit descending, id ascending), with
//    e = math::exp((logit - largest) / temperature) in fp32 and the integer weight
//    W = truncate(e * 2^40); a candidate with W = 0 is never drawn. Every sum below is a sum of
//    those integers, so that no order of addition can change a token.
// 4. Each filter keeps a prefix of that order, at least one candidate:
//    top_k: the first top_k;
//    top_p: with Z = sum of the kept W, the shortest prefix whose sum is >= truncate(Z * top_p)
//           (fp64 product);
//    min_p: while W >= truncate(min_p * 2^40), the largest weight being 2^40.
// 5. r = 64 bits of Philox 4x32-10, key = seed, counter = position; with Z the sum that is left,
//    the first candidate whose running sum exceeds floor(r Z / 2^64).
//
// The functions marked FN_HD are shared with device code. Threads: all are pure.
#pragma once

#include "cpp/base/math.h"

#include <cstddef>
#include <cstdint>

namespace flashnext::sample {

inline constexpr std::int32_t kBadLogits = -1;

struct Params {
  std::uint64_t seed;
  float temperature;      // 0 = argmax
  float top_p;            // >= 1: off
  float min_p;            // <= 0: off
  std::int32_t top_k;     // 0: off
  std::int32_t position;  // of the token that is drawn
};

struct Candidate {
  std::uint64_t weight;
  float logit;
  std::int32_t id;
};

// ---- shared with device code

struct Philox {
  std::uint32_t word[4];
};

// Philox 4x32 with ten rounds.
FN_HD Philox philox(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                    std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c0;
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<std::uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(b);
    c2 = static_cast<std::uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The 64 random bits of a position.
FN_HD std::uint64_t random_bits(std::uint64_t seed, std::int32_t position) {
  const Philox p = philox(static_cast<std::uint32_t>(position), 0, 0, 0,
                          static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
  return (static_cast<std::uint64_t>(p.word[1]) << 32) | p.word[0];
}

// floor(r z / 2^64), in [0, z).
FN_HD std::uint64_t draw_below(std::uint64_t r, std::uint64_t z) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(r, z);
#else
  const std::uint64_t rl = r & 0xFFFFFFFFu, rh = r >> 32, zl = z & 0xFFFFFFFFu, zh = z >> 32;
  const std::uint64_t mid = rh * zl + ((rl * zl) >> 32);
  return rh * zh + (mid >> 32) + ((rl * zh + (mid & 0xFFFFFFFFu)) >> 32);
#endif
}

// truncate(x * 2^40) for x in [0, 1].
FN_HD std::uint64_t fixed_point(float x) {
  return static_cast<std::uint64_t>(x * 1099511627776.0f);
}

FN_HD std::uint64_t weight_of(float logit, float largest, float temperature) {
  return fixed_point(math::exp(math::div(logit - largest, temperature)));
}

// The sum that the kept prefix of top_p must reach.
FN_HD std::uint64_t top_p_sum(std::uint64_t z, float top_p) {
  return static_cast<std::uint64_t>(static_cast<double>(z) * static_cast<double>(top_p));
}

// Whether a stands before b in the order of the candidates.
FN_HD bool before(float a_logit, std::int32_t a_id, float b_logit, std::int32_t b_id) {
  return a_logit > b_logit || (a_logit == b_logit && a_id < b_id);
}

// ---- host

// Bytes of scratch that draw() needs for rows with `limit` candidates.
std::size_t scratch_bytes(std::int32_t limit) noexcept;

// The token, or kBadLogits. logits: (limit). scratch: scratch_bytes(limit), 8-byte aligned.
std::int32_t draw(const float* logits, std::int32_t limit, const Params& params,
                  void* scratch) noexcept;

}  // namespace flashnext::sample
