#include "cpp/sched/step_times.h"

#include <algorithm>
#include <bit>

namespace flashnext {

namespace {

// Weight of a new measurement. What takes longer is believed sooner than what takes shorter: a part
// that is too large costs its neighbours more than one that is too small.
constexpr double kSlower = 0.5, kFaster = 0.25;
constexpr double kAnotherMachine = 1.25;  // times slower than before: not the noise of a step

}  // namespace

void StepTimes::add(std::int32_t rows, double seconds) {
  if (rows < 1 || seconds <= 0) return;
  const int i = static_cast<int>(std::bit_width(static_cast<std::uint32_t>(rows - 1)));
  Point& p = points_[static_cast<std::size_t>(std::min(i, kPoints - 1))];
  const double r = rows;
  if (p.rows <= 0) {
    p = {r, seconds};
    return;
  }
  const double ratio = seconds / r / (p.seconds / p.rows);
  if (ratio > kAnotherMachine) {
    // Larger steps, and those not much smaller, will hardly have stayed as they were.
    for (Point& q : points_) {
      if (&q != &p && q.rows > r / 4) q.seconds *= std::min(ratio, 2.0);
    }
  }
  const double weight = ratio > 1 ? kSlower : kFaster;
  p.rows += weight * (r - p.rows);
  p.seconds += weight * (seconds - p.seconds);
}

double StepTimes::expected(std::int32_t rows) const {
  const double r = rows;
  Point below{}, above{};
  for (const Point& p : points_) {
    if (p.rows <= 0) continue;
    if (p.rows <= r) below = p;
    if (p.rows >= r && above.rows <= 0) above = p;
  }
  if (below.rows <= 0) return above.seconds;  // at most what a larger step takes
  if (above.rows <= 0) return below.seconds * r / below.rows;
  if (above.rows <= below.rows) return below.seconds;
  const double part = (r - below.rows) / (above.rows - below.rows);
  return below.seconds + part * (above.seconds - below.seconds);
}

std::int32_t StepTimes::rows_within(double seconds, std::int32_t most, std::int32_t first) const {
  double largest = 0;
  for (const Point& p : points_) largest = std::max(largest, p.rows);
  if (largest <= 0) return std::clamp(first, 1, most);
  const double reach = std::max(2 * largest, static_cast<double>(first));
  std::int32_t high = static_cast<std::int32_t>(std::min(static_cast<double>(most), reach));
  high = std::max(high, 1);
  if (expected(high) <= seconds) return high;
  std::int32_t low = 1;  // expected() need not be monotonic; any crossing will do
  while (high - low > 1) {
    const std::int32_t middle = low + (high - low) / 2;
    (expected(middle) <= seconds ? low : high) = middle;
  }
  return low;
}

}  // namespace flashnext
