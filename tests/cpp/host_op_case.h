// What the tests of host ops share: random inputs, a step, and running an op in every version.
#pragma once

#include "cpp/base/half.h"
#include "cpp/device/host_ops.h"
#include "tests/cpp/exl3_case.h"

#include <cmath>
#include <cstring>
#include <gtest/gtest.h>
#include <random>
#include <vector>

namespace flashnext::test {

class Rng {
 public:
  explicit Rng(std::uint32_t seed) : engine_(seed) {}
  float normal(float scale = 1.0f) { return scale * normal_(engine_); }
  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(n));
  }
  std::vector<float> floats(std::size_t n, float scale = 1.0f, float shift = 0.0f) {
    std::vector<float> v(n);
    for (float& x : v) x = shift + normal(scale);
    return v;
  }
  std::vector<std::uint16_t> halves(std::size_t n, float scale = 1.0f) {
    std::vector<std::uint16_t> v(n);
    for (std::uint16_t& x : v) x = f32_to_f16(normal(scale));
    return v;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// A step whose parts lie in vectors.
struct TestStep {
  StepHead head{};
  std::vector<Row> rows;
  std::vector<Segment> segments;
  std::vector<std::int32_t> outputs;
  std::vector<SampleParams> sampling;
  std::int32_t max_rows = 0;

  StepView view() {
    head = {static_cast<std::int32_t>(rows.size()), static_cast<std::int32_t>(segments.size()),
            static_cast<std::int32_t>(outputs.size()), 0};
    max_rows = std::max(max_rows, head.rows);
    return {&head,   rows.data(), segments.data(), outputs.data(), sampling.data(),
            nullptr, 0,           max_rows,        head.segments,  head.outputs};
  }
};

// Rows of one sequence with its look-back, ids before the start being the separator.
inline TestStep sequence(const std::vector<std::int32_t>& ids, std::int32_t separator) {
  TestStep step;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    step.rows.push_back({ids[i], i > 0 ? ids[i - 1] : separator, i > 1 ? ids[i - 2] : separator,
                         static_cast<std::int32_t>(i), 0, 0});
  }
  step.segments.push_back({0, static_cast<std::int32_t>(ids.size()), 0, 0, 0, 0});
  return step;
}

// Calls body(context) for pools of 1 and 2 threads and every instruction set.
template <class Body>
void for_each_context(Body&& body) {
  for (int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (exl3::Isa isa : exl3_test::isas()) {
      SCOPED_TRACE(std::string(exl3::to_string(isa)) + ", threads " + std::to_string(threads));
      host::Context context{pool, isa};
      body(context);
    }
  }
}

// Relative to the size of the values: |got - want| <= tolerance * max|want|.
inline void expect_near(const std::vector<float>& got, const std::vector<double>& want,
                        double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double size = 0;
  for (double w : want) size = std::max(size, std::abs(w));
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance * size) << "element " << i;
  }
}

// Bits, not values: NaN equals itself, -0 differs from 0.
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }

}  // namespace flashnext::test
