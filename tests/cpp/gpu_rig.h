// A device with the memory of one test on it, so that the same lines can drive the host device (the
// oracle) and the CUDA device; and the parts of a step.
#pragma once

#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"

#include <cmath>
#include <cstdint>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace flashnext::test {

inline std::vector<float> uniform(std::size_t n, float low, float high, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> draw(low, high);
  std::vector<float> values(n);
  for (float& v : values) v = draw(engine);
  return values;
}

class Rig {
 public:
  static Rig host() { return Rig(make_host_device({})); }
  static Rig cuda() { return Rig(make_cuda_device(0, {})); }

  template <class T>
  T* put(const std::vector<T>& values) {
    T* at = room<T>(values.size());
    set(at, values);
    return at;
  }
  template <class T>
  T* room(std::size_t n) {
    blocks_.emplace_back(*device_, Space::kDevice, n * sizeof(T), "test");
    return blocks_.back().template as<T>();
  }
  template <class T>
  void set(T* at, const std::vector<T>& values) {
    device_->copy_async(stream_->id(), at, values.data(), values.size() * sizeof(T));
    device_->synchronize(stream_->id());
  }
  template <class T>
  std::vector<T> get(const T* at, std::size_t n) {
    std::vector<T> values(n);
    device_->copy_async(stream_->id(), values.data(), at, n * sizeof(T));
    device_->synchronize(stream_->id());
    return values;
  }
  // Runs the op with a workspace of exactly the bytes that it asks for; returns the workspace.
  template <class Args>
  void* run(Args args) {
    void* workspace = nullptr;
    if constexpr (requires { args.workspace; }) {
      const std::size_t bytes = device_->workspace_bytes(Args::kOp, &args);
      if (bytes > 0) workspace = room<char>(bytes);
      args.workspace = {workspace, bytes};
    }
    launch(*device_, stream_->id(), args);
    device_->synchronize(stream_->id());
    return workspace;
  }
  Device& device() { return *device_; }
  StreamId stream() const { return stream_->id(); }

 private:
  explicit Rig(std::unique_ptr<Device> device)
      : device_(std::move(device)), stream_(std::make_unique<Stream>(*device_)) {}
  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
  std::vector<Block> blocks_;
};

// Segments in row order; row0 is filled in. Rows of a bucket of max_rows.
struct StepParts {
  std::vector<Segment> segments;
  std::int32_t max_rows = 0;             // 0: as many as there are
  std::vector<std::int32_t> pages = {};  // (lanes, max_pages)
  std::int32_t max_pages = 0;

  std::int32_t rows() const {
    std::int32_t n = 0;
    for (const Segment& s : segments) n += s.rows;
    return n;
  }
  StepView on(Rig& rig) const {
    std::vector<Segment> placed = segments;
    std::vector<Row> rows_of_step;
    for (std::size_t s = 0; s < placed.size(); ++s) {
      placed[s].row0 = static_cast<std::int32_t>(rows_of_step.size());
      for (std::int32_t i = 0; i < placed[s].rows; ++i) {
        rows_of_step.push_back(
            {0, 0, 0, placed[s].pos0 + i, placed[s].lane, static_cast<std::int32_t>(s)});
      }
    }
    StepView view{};
    view.head = rig.put(std::vector<StepHead>{{static_cast<std::int32_t>(rows_of_step.size()),
                                               static_cast<std::int32_t>(placed.size()), 0, 0}});
    view.max_rows = max_rows > 0 ? max_rows : static_cast<std::int32_t>(rows_of_step.size());
    rows_of_step.resize(static_cast<std::size_t>(view.max_rows), {-1, -1, -1, -1, -1, -1});
    view.rows = rig.put(rows_of_step);
    view.segments = rig.put(placed);
    view.max_segments = static_cast<std::int32_t>(placed.size()) + 1;
    if (!pages.empty()) view.pages = rig.put(pages);
    view.max_pages = max_pages;
    return view;
  }
};

// Largest |a - b| over the largest |b|; NaN anywhere gives NaN, which no bound admits.
inline double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = a.size() == b.size() ? 0.0 : NAN;
  double scale = 1e-30;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - b[i]);
    if (!(d <= worst)) worst = d;
    if (std::isnan(d)) return NAN;
    scale = std::max(scale, std::fabs(static_cast<double>(b[i])));
  }
  return worst / scale;
}

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device on this machine";
  }
};

}  // namespace flashnext::test
