#include "cpp/cache/prefetch.h"

#include "cpp/base/errors.h"
#include "cpp/device/ops.h"

#include <charconv>
#include <cmath>
#include <string>
#include <system_error>

namespace flashnext::cache {

Prefetch parse_prefetch(std::string_view text) {
  if (text == "off") return {Prefetch::Mode::kOff, 0};
  if (text == "auto") return {Prefetch::Mode::kAuto, 0};
  std::int32_t lines = -1;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, lines);
  if (error != std::errc() || at != end || lines < 0 || lines > kMaxGuesses) {
    throw InputError("prefetch = \"" + std::string(text) +
                     "\": choose off, auto, or how many experts a layer are copied ahead, 0 to " +
                     std::to_string(kMaxGuesses));
  }
  if (lines == 0) return {Prefetch::Mode::kOff, 0};
  return {Prefetch::Mode::kCount, lines};
}

ShareTrial best_prefetch(const ShareTrial& without, std::span<const ShareTrial> trials) {
  const auto is_time = [](const ShareTrial& t) {
    return std::isfinite(t.seconds) && t.seconds > 0;
  };
  const ShareTrial* fastest = nullptr;
  for (const ShareTrial& t : trials) {
    if (is_time(t) && (fastest == nullptr || t.seconds < fastest->seconds)) fastest = &t;
  }
  if (fastest == nullptr || fastest->seconds > without.seconds * (1 - kLeastGain)) return without;
  const ShareTrial* best = fastest;
  for (const ShareTrial& t : trials) {
    if (is_time(t) && t.seconds <= fastest->seconds * kAsGood && t.prefetch < best->prefetch) {
      best = &t;
    }
  }
  return *best;
}

}  // namespace flashnext::cache
