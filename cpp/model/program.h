// Program: the ordered op list of a step, on a few streams joined by events, at fixed addresses.
// Built once per bucket of rows by layer_graph.h; run eagerly or captured into a graph, the same
// list either way. A program of many rows whose experts live in host memory is cut where the host
// must see which ones they chose: its parts are captured one by one, and what the host streams
// (cache/stream.h) runs between them. GraphBuilder: lays out activations and scratch in one arena.
// The same building code runs twice, first to count bytes and then to place, so that sizes cannot
// drift apart.
#pragma once

#include "cpp/cache/streamed_experts.h"
#include "cpp/device/device.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

namespace flashnext {

// The streams of a program: the main one, two beside it within a layer, for experts that have a
// line and for what the processor computes, and one for the n-gram table.
enum class Lane : std::uint8_t { kMain, kSide, kCpu, kTable };
inline constexpr std::size_t kNumLanes = 4;

// The streams and events that programs run on. One set serves all programs of an engine.
struct ProgramStreams {
  explicit ProgramStreams(Device& device)
      : streams{Stream(device), Stream(device), Stream(device), Stream(device)},
        forked{Event(device), Event(device), Event(device), Event(device)},
        joined{Event(device), Event(device), Event(device), Event(device)} {}
  StreamId stream(Lane lane) const { return streams[static_cast<std::size_t>(lane)].id(); }
  StreamId main() const { return stream(Lane::kMain); }

  std::array<Stream, kNumLanes> streams;
  std::array<Event, kNumLanes> forked, joined;  // a lane; unused for kMain
};

class Program {
 public:
  template <class Args>
  void add(Lane lane, const Args& args) {
    Instruction i{};
    i.kind = Kind::kOp;
    i.lane = lane;
    i.op = Args::kOp;
    i.bytes = sizeof(Args);
    i.offset = args_.size();
    args_.resize(args_.size() + (sizeof(Args) + 15) / 16 * 16);
    std::memcpy(args_.data() + i.offset, &args, sizeof(Args));
    instructions_.push_back(i);
  }
  void copy(Lane lane, void* to, const void* from, std::size_t bytes);
  // `lane` continues from here in the main stream / the main stream waits for what `lane` has been
  // given so far; nothing when it was not forked.
  void fork(Lane lane);
  void join(Lane lane);
  // Ends a part: lanes are joined, and `experts` are streamed before the next one; without any, the
  // host gathers the step's n-gram rows while the part runs.
  void cut(const std::optional<cache::StreamedExperts>& experts);

  std::size_t parts() const noexcept { return cuts_.size() + 1; }
  // What is streamed after part `i`, i < parts() - 1; none: n-gram rows are gathered.
  const std::optional<cache::StreamedExperts>& after(std::size_t i) const {
    return cuts_.at(i).experts;
  }
  void enqueue(Device& device, const ProgramStreams& streams, std::size_t part = 0) const;
  std::size_t num_ops() const noexcept;
  // visit(op, args, args_bytes) for every op, in order.
  template <class Visit>
  void for_each_op(Visit&& visit) const {
    for (const Instruction& i : instructions_) {
      if (i.kind == Kind::kOp)
        visit(i.op, static_cast<const void*>(args_.data() + i.offset), i.bytes);
    }
  }

 private:
  enum class Kind : std::uint8_t { kOp, kCopy, kFork, kJoin };
  struct Instruction {
    Kind kind;
    Lane lane;
    Op op;
    std::size_t offset;  // of the arguments
    std::size_t bytes;
    void* to;
    const void* from;
  };
  struct Cut {
    std::size_t at;  // instructions before it
    std::optional<cache::StreamedExperts> experts;
  };
  std::vector<Instruction> instructions_;
  std::vector<std::byte> args_;
  std::vector<Cut> cuts_;
  std::array<bool, kNumLanes> open_{};  // forked and not joined
};

class GraphBuilder {
 public:
  struct Sizes {
    std::size_t activations = 0;
    std::array<std::size_t, kNumLanes> workspace{};
    std::size_t total() const {
      return std::accumulate(workspace.begin(), workspace.end(), activations);
    }
  };

  // base = null: count only. Else `sizes` is what a counting run returned, and base has
  // sizes.total() bytes.
  GraphBuilder(const Device& device, std::byte* base, const Sizes& sizes)
      : device_(device), base_(base), sizes_(sizes) {}

  template <class T>
  T* take(std::int64_t count) {
    const std::size_t begin = at_;
    at_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    used_.activations = std::max(used_.activations, at_);
    return reinterpret_cast<T*>(base_ + begin);
  }
  // Buffers that are never in use at once may share memory: what is taken after reuse(mark()) lies
  // over what was taken after that mark, until reuse() of another.
  std::size_t mark() const noexcept { return at_; }
  void reuse(std::size_t mark) noexcept { at_ = mark; }
  // Behind everything that was taken so far.
  void reuse_nothing() noexcept { at_ = used_.activations; }

  template <class Args>
  void add(Lane lane, Args args) {
    if constexpr (requires { args.workspace; }) give_workspace(lane, args);
    program_.add(lane, args);
  }
  // For an op that runs in the lane, but not as part of the program.
  template <class Args>
  void give_workspace(Lane lane, Args& args) {
    const auto i = static_cast<std::size_t>(lane);
    const std::size_t bytes = (device_.workspace_bytes(Args::kOp, &args) + 255) / 256 * 256;
    used_.workspace[i] = std::max(used_.workspace[i], bytes);
    const auto begin = std::accumulate(sizes_.workspace.begin(),
                                       sizes_.workspace.begin() + static_cast<std::ptrdiff_t>(i),
                                       sizes_.activations);
    args.workspace = {base_ + begin, sizes_.workspace[i]};
  }
  Program& program() noexcept { return program_; }

  const Sizes& used() const noexcept { return used_; }

 private:
  const Device& device_;
  std::byte* base_;
  Sizes sizes_;
  Sizes used_;
  std::size_t at_ = 0;  // of the next buffer
  Program program_;
};

}  // namespace flashnext
