// How long steps take by their number of rows, from the steps that ran; and how many rows a
// prompt's part may have so that a neighbour which decodes does not wait longer than it should.
#pragma once

#include <array>
#include <cstdint>

namespace flashnext {

class StepTimes {
 public:
  void add(std::int32_t rows, double seconds);

  // Seconds that a step of so many rows is expected to take; 0 when nothing is known. Between the
  // sizes that were measured on a line, beyond the largest in proportion.
  double expected(std::int32_t rows) const;

  // The most rows, from 1 to `most`, of a step that is expected to end within `seconds`. No more
  // than twice the rows of what was measured, so that an unknown machine is approached from below;
  // `first` when nothing was.
  std::int32_t rows_within(double seconds, std::int32_t most, std::int32_t first) const;

 private:
  // One point for every power of two: the running means of the steps of (2^(i-1), 2^i] rows.
  struct Point {
    double rows = 0, seconds = 0;
  };
  static constexpr int kPoints = 20;
  std::array<Point, kPoints> points_{};
};

}  // namespace flashnext
