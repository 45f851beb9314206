// How many lines a layer are copied ahead of its attention, where its experts are guessed: what the
// user asked for, and the choice from measured steps. Pure functions.
#pragma once

#include "cpp/cache/cpu_share.h"

#include <cstdint>
#include <span>
#include <string_view>

namespace flashnext::cache {

// The option prefetch.
struct Prefetch {
  enum class Mode { kOff, kAuto, kCount };
  Mode mode;
  std::int32_t lines;  // a layer; 0 unless kCount
};

// Lines that "auto" tries at most: the link is idle for no more than two or three.
inline constexpr std::int32_t kAutoPrefetch = 4;

// "off", "auto" or a number of lines up to kMaxGuesses; InputError for anything else. "0" is "off".
Prefetch parse_prefetch(std::string_view text);

// The trial to follow: the fastest with lines ahead when it gains kLeastGain against `without`, the
// fewest lines of those within 1 % of it; else `without`.
ShareTrial best_prefetch(const ShareTrial& without, std::span<const ShareTrial> trials);

}  // namespace flashnext::cache
