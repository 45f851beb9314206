#include "cpp/cache/cpu_share.h"

#include "cpp/base/errors.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string>
#include <system_error>

namespace flashnext::cache {

namespace {

constexpr double kAsGood = 1.01;  // steps this close are equally fast: measurements are no closer

bool is_time(double seconds) { return std::isfinite(seconds) && seconds > 0; }

}  // namespace

CpuMisses parse_cpu_misses(std::string_view text) {
  if (text == "off") return {CpuMisses::Mode::kOff, 0};
  if (text == "auto") return {CpuMisses::Mode::kAuto, 0};
  std::int32_t most = -1;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, most);
  if (error != std::errc() || at != end || most < 0) {
    throw InputError("cpu_misses = \"" + std::string(text) +
                     "\": choose off, auto, or the number of a layer's misses that the processor "
                     "computes at most");
  }
  if (most == 0) return {CpuMisses::Mode::kOff, 0};
  return {CpuMisses::Mode::kCount, most};
}

std::vector<std::int32_t> cpu_table(std::int32_t max_misses, double share, std::int32_t most) {
  check(max_misses >= 0 && share >= 0 && share <= 1 && most >= 0,
        "cpu_table: share of the processor out of range");
  std::vector<std::int32_t> cpu_of;
  // Times in fetches of one expert: what the processor takes for one follows from the share, which
  // is where both end together for many. What a posting takes beside is as long as the products of
  // the experts that were fetched last.
  const double each = share > 0 ? (1 - share) / share : std::numeric_limits<double>::infinity();
  for (std::int32_t m = 0; m <= max_misses; ++m) {
    std::int32_t best = 0;
    double shortest = m;
    const std::int32_t limit = std::min(m > 1 && share < 1 ? m - 1 : m, most);
    for (std::int32_t n = 1; n <= limit; ++n) {
      const double time = std::max(static_cast<double>(m - n), each * n);
      if (time >= shortest) continue;
      best = n;
      shortest = time;
    }
    cpu_of.push_back(best);
  }
  return cpu_of;
}

double best_share(std::span<const ShareTrial> trials) {
  double without = std::numeric_limits<double>::infinity();
  double fastest = without;
  for (const ShareTrial& t : trials) {
    if (!is_time(t.seconds)) continue;
    if (t.share == 0) without = std::min(without, t.seconds);
    fastest = std::min(fastest, t.seconds);
  }
  check(std::isfinite(without), "best_share: no step was measured without the processor");
  if (fastest > without * (1 - kLeastGain)) return 0;
  double share = 1;
  for (const ShareTrial& t : trials) {
    if (is_time(t.seconds) && t.seconds <= fastest * kAsGood) share = std::min(share, t.share);
  }
  return share;
}

}  // namespace flashnext::cache
