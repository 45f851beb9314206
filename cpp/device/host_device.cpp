// The host device: handles, capture and the rules of the seam around the scheduler.
//
// Failure: the first exception of work drops all queued work of the device. The next synchronize()
// throws that exception as it is; every later call that enqueues, allocates or waits throws
// DeviceError with its message, for the rest of the device's life. A misuse in a call that cannot
// throw (release of memory in use, an unknown handle) counts as such an exception, a LogicError.
// destroy_stream() runs what the stream still holds; the device's destructor drops what is left.
#include "cpp/device/host_device.h"

#include "cpp/base/thread_pool.h"
#include "cpp/device/host_capture.h"
#include "cpp/device/host_memory.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/host_scheduler.h"
#include "cpp/device/op_sizes.h"

#include <map>

namespace flashnext {

namespace {

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : pool_(options.threads),
        context_{pool_, options.isa},
        memory_(options),
        scheduler_(context_, options.seed),
        pin_left_(options.pin_limit) {}

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
  std::vector<Allocated> allocations() const override {
    std::vector<Allocated> all = memory_.list();
    for (const auto& [data, part] : pinned_) all.push_back(part);
    return all;
  }
  bool pin(void* data, std::size_t bytes, std::string_view what) override {
    fail_fast();
    if (bytes > pin_left_) return false;
    pin_left_ -= bytes;
    pinned_.insert_or_assign(data, Allocated{Space::kPinned, std::string(what), bytes});
    return true;
  }
  void unpin(void* data) noexcept override {
    const auto part = pinned_.find(data);
    if (part == pinned_.end()) return misuse("unpin of memory that is not pinned");
    pin_left_ += part->second.bytes;
    pinned_.erase(part);
  }
  std::size_t available(Space) const override { return memory_.available(); }

  StreamId create_stream() override { return scheduler_.create_stream(); }
  void destroy_stream(StreamId stream) noexcept override;
  EventId create_event() override {
    events_.push_back(std::make_unique<EventState>());
    return static_cast<EventId>(events_.size());
  }
  void destroy_event(EventId event) noexcept override;
  void record(EventId event, StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool reached(EventId event) override {
    const EventState& e = known_event(event);
    fail_fast();
    return e.stream == 0 || (e.serial == 0 && scheduler_.reached(e.stream, e.count));
  }
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
  std::size_t graph_nodes(GraphId graph) const override {
    const HostGraph* g = scheduler_.find_graph(graph);
    if (g == nullptr) throw LogicError("host device: unknown graph " + std::to_string(graph));
    return g->nodes.size();
  }

 private:
  struct EventState {
    // The latest record: after `count` entries of `stream`, or after `nodes` of capture `serial`.
    StreamId stream = 0;  // 0: never recorded
    std::uint64_t count = 0;
    std::uint64_t serial = 0;  // 0: recorded outside of a capture
    HostCapture::Nodes nodes;
  };

  void known_stream(StreamId stream) const {
    if (!scheduler_.has_stream(stream)) {
      throw LogicError("host device: unknown stream " + std::to_string(stream));
    }
  }
  EventState* find_event(EventId event) const noexcept {
    return event >= 1 && event <= events_.size() ? events_[event - 1].get() : nullptr;
  }
  EventState& known_event(EventId event) const {
    EventState* state = find_event(event);
    if (state == nullptr) throw LogicError("host device: unknown event " + std::to_string(event));
    return *state;
  }
  void outside_capture(const char* what) const {
    if (capture_.active()) {
      throw LogicError(std::string("host device: ") + what + " during the capture of stream " +
                       std::to_string(capture_.origin()));
    }
  }
  void fail_fast() const {
    if (scheduler_.failed()) {
      throw DeviceError("host device failed earlier: " + scheduler_.failure());
    }
  }
  void misuse(const std::string& message) noexcept {
    scheduler_.fail(std::make_exception_ptr(LogicError("host device: " + message)));
  }
  void enqueue(StreamId stream, const Work& work) {
    known_stream(stream);
    fail_fast();
    if (capture_.has(stream)) {
      capture_.add(stream, work);
    } else {
      scheduler_.push(stream, work);
    }
  }

  ThreadPool pool_;
  host::Context context_;
  HostMemory memory_;
  HostScheduler scheduler_;
  HostCapture capture_;
  std::vector<std::unique_ptr<EventState>> events_;  // (id - 1)
  std::map<void*, Allocated> pinned_;
  std::size_t pin_left_;
};

void HostDevice::release(void* block) noexcept {
  if (block == nullptr) return;
  const Allocated* info = memory_.find(block);
  if (info == nullptr) return misuse("release of an address that is not a live block");
  const HostMemory::Range range = memory_.range(block);
  StreamId stream = 0;
  if (const Work* user = scheduler_.user_of(range, &stream); user != nullptr) {
    misuse("'" + info->what + "' was released while queued work of stream " +
           std::to_string(stream) + " (" + name_of(*user) + ") uses it");
  }
  const std::string why = "graph names '" + info->what + "', which was released after the capture";
  scheduler_.mark_stale(range, why);
  if (capture_.touches(range)) capture_.mark_stale(why);
  memory_.release(block);
}

void HostDevice::destroy_stream(StreamId stream) noexcept {
  if (!scheduler_.has_stream(stream)) {
    return misuse("destroy_stream: unknown stream " + std::to_string(stream));
  }
  if (capture_.has(stream)) capture_.abort();
  scheduler_.destroy_stream(stream);
}

void HostDevice::destroy_event(EventId event) noexcept {
  if (find_event(event) == nullptr) {
    return misuse("destroy_event: unknown event " + std::to_string(event));
  }
  events_[event - 1].reset();
}

void HostDevice::record(EventId event, StreamId stream) {
  EventState& e = known_event(event);
  known_stream(stream);
  fail_fast();
  e.stream = stream;
  e.count = scheduler_.pushed(stream);
  e.serial = 0;
  if (capture_.has(stream)) {
    e.serial = capture_.serial();
    e.nodes = capture_.tail(stream);
  }
}

void HostDevice::wait(StreamId stream, EventId event) {
  const EventState& e = known_event(event);
  known_stream(stream);
  fail_fast();
  if (e.stream == 0) return;
  if (e.serial != 0) {
    if (!capture_.active() || e.serial != capture_.serial()) {
      throw LogicError("host device: stream " + std::to_string(stream) + " waits on event " +
                       std::to_string(event) + ", recorded in a capture that has ended");
    }
    capture_.join(stream, e.nodes);
    return;
  }
  if (capture_.has(stream)) {
    throw LogicError("host device: captured stream " + std::to_string(stream) + " waits on event " +
                     std::to_string(event) + ", recorded outside of the capture");
  }
  if (e.stream == stream || scheduler_.reached(e.stream, e.count)) return;
  Work work;
  work.kind = Work::Kind::kWait;
  work.stream = e.stream;
  work.count = e.count;
  scheduler_.push(stream, work);
}

void HostDevice::synchronize(StreamId stream) {
  known_stream(stream);
  scheduler_.report();
  fail_fast();
  outside_capture("synchronize");
  scheduler_.drain(stream);
  scheduler_.report();
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
    throw LogicError(std::string("host device: launch of op '") + to_string(op) + "' with " +
                     std::to_string(args_bytes) + " bytes of arguments; its struct has " +
                     std::to_string(args_bytes_of(op)));
  }
  Work work;
  work.op = op;
  work.from = args;
  work.bytes = args_bytes;
  enqueue(stream, work);
}

void HostDevice::begin_capture(StreamId stream) {
  known_stream(stream);
  fail_fast();
  outside_capture("begin_capture");
  capture_.begin(stream);
}

GraphId HostDevice::end_capture(StreamId stream) {
  known_stream(stream);
  if (!capture_.active() || capture_.origin() != stream) {
    throw LogicError("host device: end_capture of stream " + std::to_string(stream) +
                     ", which began no capture");
  }
  return scheduler_.add_graph(capture_.finish());
}

void HostDevice::replay(GraphId graph, StreamId stream) {
  HostGraph* g = scheduler_.find_graph(graph);
  if (g == nullptr) throw LogicError("host device: unknown graph " + std::to_string(graph));
  if (!g->stale.empty()) throw LogicError("host device: " + g->stale);
  if (capture_.has(stream)) {
    throw LogicError("host device: replay of a graph inside the capture of stream " +
                     std::to_string(capture_.origin()));
  }
  Work work;
  work.kind = Work::Kind::kReplay;
  work.graph = g;
  enqueue(stream, work);
}

void HostDevice::destroy_graph(GraphId graph) noexcept {
  if (scheduler_.find_graph(graph) == nullptr) {
    return misuse("destroy_graph: unknown graph " + std::to_string(graph));
  }
  scheduler_.destroy_graph(graph);
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
