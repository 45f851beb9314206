// What the queues and graphs of the host device hold.
#pragma once

#include "cpp/device/device.h"
#include "cpp/device/host_memory.h"

#include <memory>
#include <string>
#include <vector>

namespace flashnext {

// Copies of argument structs: bump allocation in chunks that are kept for the next use.
class ArgsArena {
 public:
  const void* copy(const void* args, std::size_t bytes);
  void reset() noexcept {
    chunk_ = 0;
    used_ = 0;
  }

 private:
  static constexpr std::size_t kChunk = std::size_t{1} << 16;
  std::vector<std::unique_ptr<std::byte[]>> chunks_;
  std::size_t chunk_ = 0;
  std::size_t used_ = 0;
};

struct HostGraph;

// One entry of a queue, or one node of a graph (op, copy and zero only).
struct Work {
  enum class Kind : std::uint8_t { kOp, kCopy, kZero, kWait, kReplay };
  Kind kind = Kind::kOp;
  Op op = Op::kCount;          // kOp
  StreamId stream = 0;         // kWait: until this stream has run `count` entries
  std::uint64_t count = 0;     // kWait
  const void* from = nullptr;  // kOp: arguments; kCopy: source
  void* to = nullptr;          // kCopy, kZero
  std::size_t bytes = 0;       // of the arguments, the copy or the range
  HostGraph* graph = nullptr;  // kReplay

  // Whether a pointer of this work lies in the range. Arguments are searched as 8-byte words;
  // pointers inside tables that the arguments point to are not seen.
  bool touches(HostMemory::Range range) const noexcept;
};

const char* name_of(const Work& work) noexcept;

// A captured graph and the state of its running replay. Replays of one graph do not overlap.
struct HostGraph {
  struct Node {
    Work work;
    std::uint32_t first;  // successors: edges[first, first + successors)
    std::uint32_t successors;
    std::uint32_t predecessors;
  };

  std::vector<Node> nodes;
  std::vector<std::uint32_t> edges;
  ArgsArena args;
  std::string stale;  // why it must not be replayed any more; empty: it may

  bool touches(HostMemory::Range range) const noexcept;

  // Marks nodes without predecessors ready. `runner` is the stream that replays.
  void start(StreamId runner);
  bool running() const noexcept { return runner != 0; }
  // A node ran: its successors may become ready.
  void finish(std::uint32_t node);

  StreamId runner = 0;
  std::vector<std::uint32_t> waiting;  // (nodes) predecessors that have not run
  std::vector<std::uint32_t> ready;
  int queued = 0;          // replays in queues
  bool destroyed = false;  // freed when the last queued replay has run
};

}  // namespace flashnext
