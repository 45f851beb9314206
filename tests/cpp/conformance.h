// Conformance of devices: one op on random valid arguments, run on any device, results compared.
//
// A Case is a list of buffers and a function that launches the op on them. Buffers with one part a
// row let the same case run on a subset of its rows, which is how "a row's bits depend on the row
// alone" is tested.
#pragma once

#include "cpp/base/half.h"
#include "cpp/device/cuda_device.h"
#include "cpp/device/device.h"
#include "cpp/device/host_device.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <vector>

namespace flashnext::test {

struct Buffer {
  std::string name;
  std::vector<std::byte> data;
  std::size_t row_bytes = 0;  // 0: shared by all rows
  bool output = false;        // read back and compared; starts from `data`
  // Largest normwise relative difference to the host device; 0: the same bits.
  double tolerance = 0;
  bool floats = false;
};

// Device pointers of a case's buffers, in order, and what a launch needs beside them.
struct Placed {
  Device* device;
  StreamId stream;
  std::vector<void*> pointers;
  StepHead* head;  // device
  std::int32_t rows;
  std::int32_t max_rows;
  std::vector<Block>* workspaces;  // live until the work has run
  bool prepare_only;  // allocate workspaces, launch nothing (nothing may inside a capture)

  template <class T>
  T* at(std::size_t i) const {
    return static_cast<T*>(pointers[i]);
  }
  RowCount count() const { return {&head->rows, 1, max_rows}; }
};

struct Case {
  std::string name;
  std::int32_t rows = 0;
  std::vector<Buffer> buffers;
  // Fills the arguments for the placement and launches.
  std::function<void(const Placed&)> launch;
  std::int32_t segments = 0;
  std::int32_t outputs = -1;  // -1: as many as rows

  template <class T>
  std::size_t add(const std::string& what, const std::vector<T>& values, std::size_t per_row = 0) {
    Buffer b;
    b.name = what;
    b.data.resize(values.size() * sizeof(T));
    std::memcpy(b.data.data(), values.data(), b.data.size());
    b.row_bytes = per_row * sizeof(T);
    b.floats = std::is_same_v<T, float>;
    buffers.push_back(std::move(b));
    return buffers.size() - 1;
  }
  template <class T>
  std::size_t add_output(const std::string& what, const std::vector<T>& values, std::size_t per_row,
                         double tolerance) {
    const std::size_t i = add(what, values, per_row);
    buffers[i].output = true;
    buffers[i].tolerance = tolerance;
    return i;
  }
  // Starts as NaN patterns.
  template <class T>
  std::size_t out(const std::string& what, std::size_t per_row, double tolerance = 0) {
    std::vector<T> poison(per_row * static_cast<std::size_t>(rows));
    std::memset(poison.data(), 0xFF, poison.size() * sizeof(T));
    return add_output(what, poison, per_row, tolerance);
  }
};

using Results = std::vector<std::vector<std::byte>>;  // an output each, in order

// Device memory filled from a host copy.
class Upload {
 public:
  Upload(Device& device, StreamId stream, const void* data, std::size_t bytes)
      : staging_(device, Space::kPinned, bytes, "staging"),
        block_(device, Space::kDevice, bytes, "case") {
    std::memcpy(staging_.data(), data, bytes);
    device.copy_async(stream, block_.data(), staging_.data(), bytes);
  }
  void* data() const { return block_.data(); }
  std::vector<std::byte> read(Device& device, StreamId stream) const {
    device.copy_async(stream, staging_.data(), block_.data(), block_.bytes());
    device.synchronize(stream);
    const auto* bytes = staging_.as<std::byte>();
    return {bytes, bytes + block_.bytes()};
  }

 private:
  Block staging_;
  Block block_;
};

struct RunOptions {
  std::int32_t first = 0;
  std::int32_t count = -1;     // -1: all rows
  std::int32_t max_rows = -1;  // -1: count
  bool graph = false;          // capture, then replay once
};

// Runs rows [first, first + count) of the case and reads its outputs.
inline Results run(Device& device, const Case& c, const RunOptions& options = {}) {
  const std::int32_t count = options.count < 0 ? c.rows : options.count;
  const std::int32_t max_rows = options.max_rows < 0 ? count : options.max_rows;
  Stream stream(device);
  std::vector<Upload> uploads;
  std::vector<Block> workspaces;
  Placed placed{&device, stream.id(), {}, nullptr, count, max_rows, &workspaces, false};
  for (const Buffer& b : c.buffers) {
    std::vector<std::byte> bytes = b.data;
    if (b.row_bytes != 0) {
      const auto begin = static_cast<std::size_t>(options.first) * b.row_bytes;
      bytes.assign(b.data.begin() + static_cast<std::ptrdiff_t>(begin),
                   b.data.begin() + static_cast<std::ptrdiff_t>(
                                        begin + static_cast<std::size_t>(count) * b.row_bytes));
      bytes.resize(static_cast<std::size_t>(max_rows) * b.row_bytes, std::byte{0xFF});
    }
    uploads.emplace_back(device, stream.id(), bytes.data(), bytes.size());
    placed.pointers.push_back(uploads.back().data());
  }
  const StepHead head{count, c.segments, c.outputs >= 0 ? c.outputs : count, 0};
  Upload head_upload(device, stream.id(), &head, sizeof head);
  placed.head = static_cast<StepHead*>(head_upload.data());
  device.synchronize(stream.id());
  if (options.graph) {
    placed.prepare_only = true;
    c.launch(placed);
    placed.prepare_only = false;
    Capture capture(device, stream.id());
    c.launch(placed);
    const Graph graph = capture.finish();
    graph.replay(stream.id());
    device.synchronize(stream.id());
  } else {
    c.launch(placed);
    device.synchronize(stream.id());
  }
  Results results;
  for (std::size_t i = 0; i < c.buffers.size(); ++i) {
    if (!c.buffers[i].output) continue;
    results.push_back(uploads[i].read(device, stream.id()));
    if (c.buffers[i].row_bytes != 0) {
      results.back().resize(static_cast<std::size_t>(count) * c.buffers[i].row_bytes);
    }
  }
  return results;
}

// Launches one op, with the workspace that the device asks for. A case launches once.
template <class Args>
void enqueue(const Placed& p, Args args) {
  if constexpr (requires { args.workspace; }) {
    const std::size_t bytes = p.device->workspace_bytes(Args::kOp, &args);
    if (bytes > 0 && p.workspaces->empty()) {
      p.workspaces->emplace_back(*p.device, Space::kDevice, bytes, "workspace");
    }
    if (bytes > 0) args.workspace = {p.workspaces->back().data(), bytes};
  }
  if (!p.prepare_only) launch(*p.device, p.stream, args);
}

// ‖got - want‖ / ‖want‖; infinity when a NaN pattern remains.
inline double relative_error(const std::vector<std::byte>& got,
                             const std::vector<std::byte>& want) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i + 4 <= want.size(); i += 4) {
    float g;
    float w;
    std::memcpy(&g, got.data() + i, 4);
    std::memcpy(&w, want.data() + i, 4);
    if (!std::isfinite(g) || !std::isfinite(w)) return std::numeric_limits<double>::infinity();
    error += (static_cast<double>(g) - w) * (static_cast<double>(g) - w);
    size += static_cast<double>(w) * w;
  }
  return std::sqrt(error / (size > 0 ? size : 1));
}

inline void expect_close(const Case& c, const Results& got, const Results& want) {
  std::size_t at = 0;
  for (const Buffer& b : c.buffers) {
    if (!b.output) continue;
    if (b.tolerance == 0) {
      ASSERT_EQ(got[at].size(), want[at].size());
      for (std::size_t i = 0; i < want[at].size(); ++i) {
        ASSERT_EQ(got[at][i], want[at][i])
            << c.name << ": " << b.name << " differs at byte " << i << " of " << want[at].size();
      }
    } else {
      EXPECT_LE(relative_error(got[at], want[at]), b.tolerance) << c.name << ": " << b.name;
    }
    ++at;
  }
}

// The same bits; `first`: the row of `whole` at which `part` begins.
inline void expect_same(const Case& c, const Results& part, const Results& whole,
                        std::int32_t first, const std::string& what) {
  std::size_t at = 0;
  for (const Buffer& b : c.buffers) {
    if (!b.output) continue;
    const std::size_t begin = static_cast<std::size_t>(first) * b.row_bytes;
    ASSERT_LE(begin + part[at].size(), whole[at].size());
    EXPECT_EQ(std::memcmp(part[at].data(), whole[at].data() + begin, part[at].size()), 0)
        << c.name << ": " << b.name << ", " << what;
    ++at;
  }
}

// ---- random values

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  float normal(float scale = 1.0f) { return scale * normal_(engine_); }
  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(n));
  }
  std::vector<float> floats(std::size_t n, float scale = 1.0f, float shift = 0.0f) {
    std::vector<float> v(n);
    for (float& x : v) x = shift + normal(scale);
    return v;
  }
  std::vector<std::uint16_t> halves(std::size_t n, float scale) {
    // Drawn from a pool: conversion and normal draws of tens of millions would take the test's
    // time.
    if (pool_.empty()) {
      for (int i = 0; i < 65536; ++i) pool_.push_back(normal());
    }
    std::vector<std::uint16_t> v(n);
    for (std::uint16_t& x : v) x = f32_to_f16(scale * pool_[engine_() & 65535u]);
    return v;
  }
  std::vector<std::byte> bytes(std::size_t n) {
    std::vector<std::byte> v(n);
    for (std::byte& x : v) x = static_cast<std::byte>(engine_() & 255u);
    return v;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
  std::vector<float> pool_;
};

inline std::size_t z(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace flashnext::test
