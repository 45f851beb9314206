// A conformance case: one op on random valid arguments, which any device can run; results of two
// runs are compared bit by bit or by a tolerance.
//
// A Case is a list of buffers and a function that launches the op on them. Buffers with one part a
// row let the same case run on a subset of its rows, which is how "a row's bits depend on the row
// alone" is checked. Nothing here knows which device it drives.
#pragma once

#include "cpp/device/device.h"

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace flashnext::gate {

inline std::size_t z(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Buffer {
  std::string name;
  std::vector<std::byte> data;
  std::size_t row_bytes = 0;  // 0: shared by all rows
  bool output = false;        // read back and compared; starts from `data`
  // Largest normwise relative difference to the host device; 0: the same bits.
  double tolerance = 0;
  bool halves = false;  // values are fp16, not fp32; NaN patterns of both sides are skipped
  // Rewrites `data` once the buffers before this one have their addresses: tables of pointers.
  std::function<void(const std::vector<void*>& before, std::vector<std::byte>& data)> link;
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
  std::vector<std::shared_ptr<void>>* companions;  // live as long, gone before the workspaces

  template <class T>
  T* at(std::size_t i) const {
    return static_cast<T*>(pointers[i]);
  }
  RowCount count() const { return {&head->rows, 1, max_rows}; }
};

struct Case {
  Op op = Op::kCount;
  std::string name;
  std::int32_t rows = 0;
  std::vector<Buffer> buffers;
  // Fills the arguments for the placement and launches.
  std::function<void(const Placed&)> launch;
  std::int32_t segments = 0;
  std::int32_t outputs = -1;  // -1: as many as rows

  template <class T>
  std::size_t add(const std::string& what, const std::vector<T>& values, std::size_t per_row = 0) {
    static_assert(std::is_trivially_copyable_v<T>);
    Buffer b;
    b.name = what;
    b.data.resize(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(b.data.data(), values.data(), b.data.size());
    b.row_bytes = per_row * sizeof(T);
    buffers.push_back(std::move(b));
    return buffers.size() - 1;
  }
  template <class T>
  std::size_t add_output(const std::string& what, const std::vector<T>& values, std::size_t per_row,
                         double tolerance) {
    const std::size_t i = add(what, values, per_row);
    buffers[i].output = true;
    buffers[i].tolerance = tolerance;
    buffers[i].halves = std::is_same_v<T, std::uint16_t>;
    return i;
  }
  // Starts as NaN patterns.
  template <class T>
  std::size_t out(const std::string& what, std::size_t per_row, double tolerance = 0) {
    std::vector<T> poison(per_row * z(rows));
    if (!poison.empty()) std::memset(poison.data(), 0xFF, poison.size() * sizeof(T));
    return add_output(what, poison, per_row, tolerance);
  }
  // Every output has a part a row, so that rows may run alone.
  bool by_row() const;
};

using Results = std::vector<std::vector<std::byte>>;  // an output each, in order

struct RunOptions {
  std::int32_t first = 0;
  std::int32_t count = -1;     // -1: all rows
  std::int32_t max_rows = -1;  // -1: count
  bool graph = false;          // capture, then replay once
};

// Runs rows [first, first + count) of the case and reads its outputs.
Results run(Device& device, const Case& c, const RunOptions& options = {});

struct Comparison {
  bool passed = true;
  double max_error = 0;  // the largest of the outputs that have a tolerance
  double tolerance = 0;  // the largest of the case
  std::string detail;    // what differs first, empty when all is well
};

// Outputs of `got` against `want`, by the tolerances of the case.
Comparison compare(const Case& c, const Results& got, const Results& want);
// The same bits; `first`: the row of `whole` at which `part` begins. Empty when they are.
std::string differs(const Case& c, const Results& part, const Results& whole, std::int32_t first);

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
  if (!p.prepare_only) flashnext::launch(*p.device, p.stream, args);
}

// ---- random values

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  float normal(float scale = 1.0f) { return scale * normal_(engine_); }
  float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine_);
  }
  std::int32_t below(std::int32_t n) {
    return static_cast<std::int32_t>(engine_() % static_cast<std::uint32_t>(n));
  }
  std::vector<float> floats(std::size_t n, float scale = 1.0f, float shift = 0.0f);
  // Drawn from a pool: tens of millions of conversions and normal draws would take the time.
  std::vector<std::uint16_t> halves(std::size_t n, float scale);
  std::vector<std::byte> bytes(std::size_t n);

 private:
  const std::vector<float>& pool();
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
  std::vector<float> pool_;
};

}  // namespace flashnext::gate
