// The capture of the host device: nodes are recorded with the edges that stream order and events
// give them. One capture at a time. The rules are CUDA's: a stream joins by waiting on an event
// recorded in the capture, and its work must be joined back before the end.
#pragma once

#include "cpp/device/host_work.h"

#include <map>
#include <memory>
#include <vector>

namespace flashnext {

class HostCapture {
 public:
  using Nodes = std::vector<std::uint32_t>;  // sorted node indices

  bool active() const noexcept { return graph_ != nullptr; }
  StreamId origin() const noexcept { return origin_; }
  // Number of the capture; events recorded in an earlier one cannot be waited on.
  std::uint64_t serial() const noexcept { return serial_; }
  bool has(StreamId stream) const noexcept { return active() && tails_.count(stream) != 0; }

  void begin(StreamId origin);
  // Adds a node after everything `stream` has recorded or waited on so far.
  void add(StreamId stream, const Work& work);
  const Nodes& tail(StreamId stream) const { return tails_.at(stream); }
  // `stream` (which joins if it is not in the capture yet) continues after `nodes`.
  void join(StreamId stream, const Nodes& nodes);
  bool touches(HostMemory::Range range) const noexcept {
    return active() && graph_->touches(range);
  }
  void mark_stale(const std::string& why) { graph_->stale = why; }

  // The finished graph; the capture is over, also when it throws LogicError for a stream whose work
  // is not joined to the origin.
  std::unique_ptr<HostGraph> finish();
  void abort() noexcept;

 private:
  StreamId origin_ = 0;
  std::uint64_t serial_ = 0;
  std::unique_ptr<HostGraph> graph_;
  std::vector<Nodes> predecessors_;  // (nodes)
  std::map<StreamId, Nodes> tails_;  // what the next node of a stream depends on
};

}  // namespace flashnext
