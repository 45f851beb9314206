// The queues of the host device and the seeded scheduler that empties them; the graphs it replays.
//
// Nothing runs before drain(). Then work is picked one piece at a time among all that stream order
// and waits allow, in one of three manners chosen by the seed: as late as possible for the other
// streams, in any order, or the other streams first. So a missing edge, in either direction, shows
// under some seed.
//
// Failure: the first exception that work throws is kept, and all queued work is dropped.
#pragma once

#include "cpp/device/host_ops.h"
#include "cpp/device/host_work.h"

#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace flashnext {

class HostScheduler {
 public:
  HostScheduler(host::Context& context, std::uint64_t seed) : context_(context), random_(seed) {}

  // ---- streams
  StreamId create_stream();
  bool has_stream(StreamId stream) const noexcept { return known(queues_, stream); }
  // Runs what the stream still holds.
  void destroy_stream(StreamId stream) noexcept;
  void push(StreamId stream, Work work);
  std::uint64_t pushed(StreamId stream) const noexcept { return queues_[stream - 1]->pushed; }
  // Whether the first `count` entries of the stream have run; true for a stream that is gone.
  bool reached(StreamId stream, std::uint64_t count) const noexcept {
    return !has_stream(stream) || queues_[stream - 1]->done >= count;
  }
  // Runs until the stream is empty.
  void drain(StreamId stream);

  // ---- graphs
  GraphId add_graph(std::unique_ptr<HostGraph> graph);
  // Null for an unknown or destroyed graph.
  HostGraph* find_graph(GraphId graph) const noexcept;
  // A graph with queued replays lives until they have run.
  void destroy_graph(GraphId graph) noexcept;

  // ---- memory that is about to go away
  // The first queued work that uses the range, null if none; `stream` gets its stream.
  const Work* user_of(HostMemory::Range range, StreamId* stream) const noexcept;
  void mark_stale(HostMemory::Range range, const std::string& why);

  // ---- failure
  void fail(std::exception_ptr error) noexcept;
  bool failed() const noexcept { return failed_; }
  const std::string& failure() const noexcept { return failure_; }
  // Throws the first exception if nobody has seen it yet.
  void report() {
    if (unreported_) std::rethrow_exception(std::exchange(unreported_, nullptr));
  }

 private:
  struct Queue {
    std::vector<Work> work;
    std::size_t head = 0;
    std::uint64_t pushed = 0;
    std::uint64_t done = 0;
    ArgsArena args;
    bool idle() const noexcept { return head == work.size(); }
  };

  class Random {  // splitmix64
   public:
    explicit Random(std::uint64_t seed) : state_(seed) {}
    std::size_t below(std::size_t n) noexcept;

   private:
    std::uint64_t state_;
  };

  template <class T>
  static bool known(const std::vector<std::unique_ptr<T>>& all, std::uint32_t id) noexcept {
    return id >= 1 && id <= all.size() && all[id - 1] != nullptr;
  }

  static void pop(Queue& q) noexcept;
  std::size_t ready(StreamId stream);
  void run_one(StreamId stream, std::size_t pick);
  bool run_any(StreamId except);
  void run_towards(StreamId stream);
  void execute(const Work& work) noexcept;
  void end_replay(HostGraph& graph) noexcept;

  host::Context& context_;
  Random random_;
  std::vector<std::unique_ptr<Queue>> queues_;      // (id - 1)
  std::vector<std::unique_ptr<HostGraph>> graphs_;  // (id - 1)
  bool failed_ = false;
  std::string failure_;
  std::exception_ptr unreported_;
};

}  // namespace flashnext
