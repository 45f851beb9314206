// The host device: queues, events, capture and the seeded scheduler.
//
// Failure: the first exception that work throws ends all queued work of the device. The next
// synchronize() throws that exception as it is; every call after it that enqueues, allocates or
// waits throws DeviceError with the first message, for the rest of the device's life.
// destroy_stream() runs what the stream still holds; the device's destructor drops what is left.
#include "cpp/device/host_device.h"

#include "cpp/base/thread_pool.h"
#include "cpp/device/host_capture.h"
#include "cpp/device/host_memory.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/host_work.h"
#include "cpp/device/op_sizes.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace flashnext {

namespace {

// splitmix64
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() noexcept {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::size_t below(std::size_t n) noexcept { return n <= 1 ? 0 : next() % n; }

 private:
  std::uint64_t state_;
};

struct Queue {
  std::vector<Work> work;
  std::size_t head = 0;
  std::uint64_t enqueued = 0;
  std::uint64_t done = 0;
  ArgsArena args;

  bool idle() const noexcept { return head == work.size(); }
};

struct EventState {
  // The latest record: after `count` entries of `stream`, or after `nodes` of capture `serial`.
  StreamId stream = 0;  // 0: never recorded
  std::uint64_t count = 0;
  std::uint64_t serial = 0;  // 0: recorded outside of a capture
  HostCapture::Nodes nodes;
};

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : pool_(options.threads),
        context_{pool_, options.isa},
        memory_(options),
        random_(options.seed) {}

  std::string_view kind() const noexcept override { return "host"; }
  std::string description() const override {
    const int n = pool_.threads();
    return "host (" + std::to_string(n) + (n == 1 ? " thread, " : " threads, ") +
           std::string(exl3::to_string(context_.isa)) + ")";
  }

  void* allocate(Space space, std::size_t bytes, std::string_view what) override {
    fail_fast();
    outside_capture("allocate");
    return memory_.allocate(space, bytes, what);
  }
  void release(void* block) noexcept override;
  void seal() noexcept override { memory_.seal(); }
  std::vector<Allocated> allocations() const override { return memory_.list(); }

  StreamId create_stream() override {
    streams_.push_back(std::make_unique<Queue>());
    return static_cast<StreamId>(streams_.size());
  }
  void destroy_stream(StreamId stream) noexcept override;
  EventId create_event() override {
    events_.push_back(std::make_unique<EventState>());
    return static_cast<EventId>(events_.size());
  }
  void destroy_event(EventId event) noexcept override {
    if (known(events_, event)) {
      events_[event - 1].reset();
    } else {
      misuse("destroy_event: unknown event " + std::to_string(event));
    }
  }
  void record(EventId event, StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  void synchronize(StreamId stream) override;

  void copy_async(StreamId stream, void* to, const void* from, std::size_t bytes) override;
  void zero_async(StreamId stream, void* to, std::size_t bytes) override;
  void launch(StreamId stream, Op op, const void* args, std::size_t args_bytes) override;
  std::size_t workspace_bytes(Op op, const void* args) const override {
    return host::workspace_bytes(op, args, pool_.threads());
  }

  void begin_capture(StreamId stream) override;
  GraphId end_capture(StreamId stream) override;
  void abort_capture(StreamId stream) noexcept override {
    if (capture_.active() && capture_.origin() == stream) capture_.abort();
  }
  void replay(GraphId graph, StreamId stream) override;
  void destroy_graph(GraphId graph) noexcept override;

 private:
  template <class T>
  static bool known(const std::vector<std::unique_ptr<T>>& all, std::uint32_t id) noexcept {
    return id >= 1 && id <= all.size() && all[id - 1] != nullptr;
  }
  Queue& queue(StreamId stream) {
    if (!known(streams_, stream)) {
      throw LogicError("host device: unknown stream " + std::to_string(stream));
    }
    return *streams_[stream - 1];
  }
  EventState& event_of(EventId event) {
    if (!known(events_, event)) {
      throw LogicError("host device: unknown event " + std::to_string(event));
    }
    return *events_[event - 1];
  }
  void outside_capture(const char* what) const {
    if (capture_.active()) {
      throw LogicError(std::string("host device: ") + what + " during the capture of stream " +
                       std::to_string(capture_.origin()));
    }
  }

  // Failure.
  void fail_fast() const {
    if (failed_) throw DeviceError("host device failed earlier: " + failure_);
  }
  void fail(std::exception_ptr error) noexcept;
  void misuse(const std::string& message) noexcept {
    fail(std::make_exception_ptr(LogicError("host device: " + message)));
  }

  void enqueue(StreamId stream, Work work);

  // The scheduler.
  bool reached(StreamId stream, std::uint64_t count) const noexcept {
    return !known(streams_, stream) || streams_[stream - 1]->done >= count;
  }
  void pop(Queue& q) noexcept;
  std::size_t ready(StreamId stream);
  void run_one(StreamId stream, std::size_t pick);
  bool run_any(StreamId except);
  void run_blocking(StreamId stream);
  void drain(StreamId stream);
  void execute(const Work& work);
  void end_replay(HostGraph& graph) noexcept;

  ThreadPool pool_;
  host::Context context_;
  HostMemory memory_;
  Random random_;
  std::vector<std::unique_ptr<Queue>> streams_;      // (id - 1)
  std::vector<std::unique_ptr<EventState>> events_;  // (id - 1)
  std::vector<std::unique_ptr<HostGraph>> graphs_;   // (id - 1)
  HostCapture capture_;
  bool failed_ = false;
  std::string failure_;
  std::exception_ptr unreported_;
};

// ---- memory
// -----------------------------------------------------------------------------------------------------

void HostDevice::release(void* block) noexcept {
  if (block == nullptr) return;
  const Allocated* info = memory_.find(block);
  if (info == nullptr) {
    misuse("release of an address that is not a live block");
    return;
  }
  const HostMemory::Range range = memory_.range(block);
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    if (streams_[s] == nullptr) continue;
    const Queue& q = *streams_[s];
    const auto user = std::find_if(q.work.begin() + static_cast<std::ptrdiff_t>(q.head),
                                   q.work.end(), [&](const Work& w) { return w.touches(range); });
    if (user != q.work.end()) {
      misuse("'" + info->what + "' was released while queued work of stream " +
             std::to_string(s + 1) + " (" + name_of(*user) + ") uses it");
      break;
    }
  }
  const std::string why = "graph names '" + info->what + "', which was released after the capture";
  for (const auto& graph : graphs_) {
    if (graph != nullptr && graph->stale.empty() && graph->touches(range)) graph->stale = why;
  }
  if (capture_.touches(range)) capture_.mark_stale(why);
  memory_.release(block);
}

// ---- streams and events
// -----------------------------------------------------------------------------------------

void HostDevice::destroy_stream(StreamId stream) noexcept {
  if (!known(streams_, stream)) {
    misuse("destroy_stream: unknown stream " + std::to_string(stream));
    return;
  }
  if (capture_.has(stream)) capture_.abort();
  try {
    drain(stream);
  } catch (...) {
    fail(std::current_exception());
  }
  streams_[stream - 1].reset();
}

void HostDevice::record(EventId event, StreamId stream) {
  EventState& e = event_of(event);
  const Queue& q = queue(stream);
  fail_fast();
  e.stream = stream;
  if (capture_.has(stream)) {
    e.serial = capture_.serial();
    e.nodes = capture_.tail(stream);
  } else {
    e.serial = 0;
    e.count = q.enqueued;
  }
}

void HostDevice::wait(StreamId stream, EventId event) {
  const EventState& e = event_of(event);
  queue(stream);
  fail_fast();
  if (e.stream == 0) return;
  if (e.serial != 0) {
    if (!capture_.active() || e.serial != capture_.serial()) {
      throw LogicError("host device: stream " + std::to_string(stream) + " waits on event " +
                       std::to_string(event) +
                       ", whose record belongs to a capture that has ended");
    }
    capture_.join(stream, e.nodes);
    return;
  }
  if (capture_.has(stream)) {
    throw LogicError("host device: captured stream " + std::to_string(stream) + " waits on event " +
                     std::to_string(event) + ", which was recorded outside of the capture");
  }
  if (e.stream == stream || reached(e.stream, e.count)) return;
  Work work;
  work.kind = Work::Kind::kWait;
  work.stream = e.stream;
  work.count = e.count;
  enqueue(stream, work);
}

void HostDevice::synchronize(StreamId stream) {
  queue(stream);
  if (unreported_) std::rethrow_exception(std::exchange(unreported_, nullptr));
  fail_fast();
  outside_capture("synchronize");
  drain(stream);
  if (unreported_) std::rethrow_exception(std::exchange(unreported_, nullptr));
}

// ---- work
// -------------------------------------------------------------------------------------------------------

void HostDevice::enqueue(StreamId stream, Work work) {
  Queue& q = queue(stream);
  fail_fast();
  if (capture_.has(stream)) {
    capture_.add(stream, work);
    return;
  }
  if (work.kind == Work::Kind::kOp) work.from = q.args.copy(work.from, work.bytes);
  q.work.push_back(work);
  ++q.enqueued;
}

void HostDevice::copy_async(StreamId stream, void* to, const void* from, std::size_t bytes) {
  const auto* a = static_cast<const std::byte*>(from);
  const auto* b = static_cast<const std::byte*>(to);
  if (a < b + bytes && b < a + bytes) throw LogicError("host device: copy of overlapping ranges");
  Work work;
  work.kind = Work::Kind::kCopy;
  work.from = from;
  work.to = to;
  work.bytes = bytes;
  enqueue(stream, work);
}

void HostDevice::zero_async(StreamId stream, void* to, std::size_t bytes) {
  Work work;
  work.kind = Work::Kind::kZero;
  work.to = to;
  work.bytes = bytes;
  enqueue(stream, work);
}

void HostDevice::launch(StreamId stream, Op op, const void* args, std::size_t args_bytes) {
  if (args_bytes_of(op) == 0 || args_bytes_of(op) != args_bytes) {
    throw LogicError(std::string("host device: launch of ") + to_string(op) + " with " +
                     std::to_string(args_bytes) + " bytes of arguments, its struct has " +
                     std::to_string(args_bytes_of(op)));
  }
  Work work;
  work.op = op;
  work.from = args;
  work.bytes = args_bytes;
  enqueue(stream, work);
}

// ---- graphs
// -----------------------------------------------------------------------------------------------------

void HostDevice::begin_capture(StreamId stream) {
  queue(stream);
  fail_fast();
  outside_capture("begin_capture");
  capture_.begin(stream);
}

GraphId HostDevice::end_capture(StreamId stream) {
  queue(stream);
  if (!capture_.active() || capture_.origin() != stream) {
    throw LogicError("host device: end_capture of stream " + std::to_string(stream) +
                     ", which began no capture");
  }
  graphs_.push_back(capture_.finish());
  return static_cast<GraphId>(graphs_.size());
}

void HostDevice::replay(GraphId graph, StreamId stream) {
  queue(stream);
  if (!known(graphs_, graph) || graphs_[graph - 1]->destroyed) {
    throw LogicError("host device: unknown graph " + std::to_string(graph));
  }
  fail_fast();
  HostGraph& g = *graphs_[graph - 1];
  if (capture_.has(stream)) {
    throw LogicError("host device: replay of a graph inside the capture of stream " +
                     std::to_string(capture_.origin()));
  }
  if (!g.stale.empty()) throw LogicError("host device: " + g.stale);
  Work work;
  work.kind = Work::Kind::kReplay;
  work.graph = &g;
  enqueue(stream, work);
  ++g.queued;
}

void HostDevice::destroy_graph(GraphId graph) noexcept {
  if (!known(graphs_, graph) || graphs_[graph - 1]->destroyed) {
    misuse("destroy_graph: unknown graph " + std::to_string(graph));
    return;
  }
  HostGraph& g = *graphs_[graph - 1];
  g.destroyed = true;
  if (g.queued == 0) graphs_[graph - 1].reset();
}

void HostDevice::end_replay(HostGraph& graph) noexcept {
  graph.runner = 0;
  if (--graph.queued > 0 || !graph.destroyed) return;
  for (auto& owner : graphs_) {
    if (owner.get() == &graph) owner.reset();
  }
}

// ---- the scheduler
// ----------------------------------------------------------------------------------------------

void HostDevice::fail(std::exception_ptr error) noexcept {
  if (!failed_) {
    failed_ = true;
    unreported_ = error;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      failure_ = e.what();
    } catch (...) {
      failure_ = "unknown exception";
    }
  }
  for (const auto& q : streams_) {
    if (q == nullptr) continue;
    for (; !q->idle(); pop(*q)) {
      Work& work = q->work[q->head];
      if (work.kind == Work::Kind::kReplay) end_replay(*work.graph);
    }
  }
}

void HostDevice::pop(Queue& q) noexcept {
  ++q.done;
  if (++q.head < q.work.size()) return;
  q.work.clear();
  q.head = 0;
  q.args.reset();
}

// How many pieces of work the front of a stream offers now. Passes waits that are met, starts and
// ends replays.
std::size_t HostDevice::ready(StreamId stream) {
  Queue& q = *streams_[stream - 1];
  while (!q.idle()) {
    const Work& front = q.work[q.head];
    if (front.kind == Work::Kind::kWait) {
      if (!reached(front.stream, front.count)) return 0;
      pop(q);
      continue;
    }
    if (front.kind != Work::Kind::kReplay) return 1;
    HostGraph& graph = *front.graph;
    if (!graph.running()) graph.start(stream);
    if (graph.runner != stream) return 0;
    if (!graph.ready.empty()) return graph.ready.size();
    pop(q);
    end_replay(graph);
  }
  return 0;
}

void HostDevice::run_one(StreamId stream, std::size_t pick) {
  Queue& q = *streams_[stream - 1];
  const Work& front = q.work[q.head];
  if (front.kind == Work::Kind::kReplay) {
    HostGraph& graph = *front.graph;
    const std::uint32_t node = graph.ready[pick];
    graph.ready[pick] = graph.ready.back();
    graph.ready.pop_back();
    execute(graph.nodes[node].work);
    if (!failed_) graph.finish(node);
    return;
  }
  execute(front);
  if (!failed_) pop(q);
}

// Runs a random piece of ready work of any stream but `except`; false when there is none.
bool HostDevice::run_any(StreamId except) {
  std::size_t total = 0;
  for (StreamId s = 1; s <= streams_.size(); ++s) {
    if (s != except && streams_[s - 1] != nullptr) total += ready(s);
  }
  if (total == 0) return false;
  std::size_t pick = random_.below(total);
  for (StreamId s = 1; s <= streams_.size(); ++s) {
    if (s == except || streams_[s - 1] == nullptr) continue;
    const std::size_t n = ready(s);
    if (pick < n) {
      run_one(s, pick);
      return true;
    }
    pick -= n;
  }
  return false;
}

// Runs one piece of work that `stream` needs to get on: its own, or that of the stream it waits
// for. Edges point to earlier enqueued work only, so the chase ends.
void HostDevice::run_blocking(StreamId stream) {
  for (;;) {
    const std::size_t n = ready(stream);
    if (n > 0) return run_one(stream, random_.below(n));
    const Queue& q = *streams_[stream - 1];
    if (q.idle()) return;
    const Work& front = q.work[q.head];
    stream = front.kind == Work::Kind::kWait ? front.stream : front.graph->runner;
  }
}

void HostDevice::drain(StreamId stream) {
  const Queue& q = *streams_[stream - 1];
  // As late as possible for the others, any order, or the others first: a missing edge in either
  // direction shows under some seed.
  const std::size_t manner = random_.below(3);
  while (!q.idle()) {
    if (manner == 0) {
      run_blocking(stream);
    } else if (manner == 1) {
      run_any(0);
    } else if (!run_any(stream)) {
      run_blocking(stream);
    }
    ready(stream);
  }
  if (manner == 1) {
    for (std::size_t more = random_.below(8); more > 0 && run_any(0); --more) {
    }
  }
}

void HostDevice::execute(const Work& work) {
  try {
    switch (work.kind) {
      case Work::Kind::kOp:
        host::run(work.op, work.from, context_);
        break;
      case Work::Kind::kCopy:
        std::memcpy(work.to, work.from, work.bytes);
        break;
      case Work::Kind::kZero:
        std::memset(work.to, 0, work.bytes);
        break;
      case Work::Kind::kWait:
      case Work::Kind::kReplay:
        throw LogicError("host device: a queue entry that cannot be executed");
    }
  } catch (...) {
    fail(std::current_exception());
  }
}

}  // namespace

std::unique_ptr<Device> make_host_device(const HostDeviceOptions& options) {
  if (!exl3::supported(options.isa)) {
    throw InputError("this processor does not support " +
                     std::string(exl3::to_string(options.isa)) + "; the best it runs is " +
                     std::string(exl3::to_string(exl3::best_isa())));
  }
  return std::make_unique<HostDevice>(options);
}

}  // namespace flashnext
