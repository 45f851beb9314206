// How many misses of a layer the processor computes: what the user asked for, the table that the
// resolution of a step reads, and the choice from measured steps. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace flashnext::cache {

// The option cpu_misses.
struct CpuMisses {
  enum class Mode { kOff, kAuto, kCount };
  Mode mode;
  std::int32_t most;  // of a layer and step; 0 unless kCount
};

// "off", "auto" or a whole number; InputError for anything else. "0" is "off".
CpuMisses parse_cpu_misses(std::string_view text);

// cpu_of[m] for m = 0..max_misses: so many that fetches and processor, which work at once, end
// soonest, the fewer the better (a fetched expert also gets a line), and at most `most`. `share` in
// [0, 1] is the processor's part of many misses. Of two or more it leaves one to the link, whatever
// is faster: only what is fetched gets a line, and hits would fade where few experts miss. 1: all
// of them even so. Never falls, cpu_of[0] = 0.
std::vector<std::int32_t> cpu_table(std::int32_t max_misses, double share, std::int32_t most);

// A whole step measured with this share of its misses on the processor.
struct ShareTrial {
  double share;
  double seconds;
};

// The processor must save this much of a step before it gets a share.
inline constexpr double kLeastGain = 0.03;

// The lowest share within 1 % of the fastest step, or 0 when that does not gain kLeastGain against
// the step at share 0, which must be among the trials. Times that are not positive numbers are
// ignored.
double best_share(std::span<const ShareTrial> trials);

}  // namespace flashnext::cache
