// THE SEAM: what the engine asks of a device. The host device (host_device.h) and the CUDA device
// implement it, and both may live in one process so that they can be compared op by op.
//
// Ordering: a stream is a FIFO queue; work of different streams is ordered by events only. Nothing
// is promised to have run before synchronize() returns. Argument structs (ops.h) are copied at
// launch; what their pointers name must stay valid until the work has run, and, for captured work,
// as long as the graph is replayed. Threads: one thread drives a device at a time.
#pragma once

#include "cpp/base/errors.h"
#include "cpp/device/ops.h"

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flashnext {

enum class Space { kDevice, kPinned, kPageable };
const char* to_string(Space space) noexcept;

// Opaque handles; the owning wrappers below are what other rooms hold.
using StreamId = std::uint32_t;
using EventId = std::uint32_t;
using GraphId = std::uint32_t;

struct Allocated {
  Space space;
  std::string what;
  std::size_t bytes;
};

class Device {
 public:
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // "host" or "cuda"; and a line for people, e.g. "host (2 threads, avx512)".
  virtual std::string_view kind() const noexcept = 0;
  virtual std::string description() const = 0;

  // 256-byte aligned. `what` names the part in errors and in allocations(). Throws OutOfMemory
  // naming space, part, bytes and the sum so far; LogicError after seal().
  virtual void* allocate(Space space, std::size_t bytes, std::string_view what) = 0;
  virtual void release(void* block) noexcept = 0;
  // After this, allocate() is a LogicError: nothing allocates once a session is open.
  virtual void seal() noexcept = 0;
  virtual std::vector<Allocated> allocations() const = 0;
  // Bytes of `space` that may still be allocated, as far as the device can tell.
  virtual std::size_t available(Space) const { return static_cast<std::size_t>(-1); }
  // Makes memory of the process that was written before (page-aligned, whole pages) readable to
  // kernels and copies at full speed; false when the system grants no more. Counts as
  // Space::kPinned under `what`. unpin() before the memory goes.
  virtual bool pin(void* data, std::size_t bytes, std::string_view what) = 0;
  virtual void unpin(void* data) noexcept = 0;

  virtual StreamId create_stream() = 0;
  virtual void destroy_stream(StreamId stream) noexcept = 0;
  virtual EventId create_event() = 0;
  virtual void destroy_event(EventId event) noexcept = 0;
  virtual void record(EventId event, StreamId stream) = 0;
  virtual void wait(StreamId stream, EventId event) = 0;
  // Whether the work before the event's latest record has run. Never waits.
  virtual bool reached(EventId event) = 0;
  // Returns when all work enqueued on the stream has run. Throws what that work threw.
  virtual void synchronize(StreamId stream) = 0;

  virtual void copy_async(StreamId stream, void* to, const void* from, std::size_t bytes) = 0;
  virtual void zero_async(StreamId stream, void* to, std::size_t bytes) = 0;

  // Enqueues one op; `args` is the struct of ops.h whose kOp is `op`, copied before return.
  virtual void launch(StreamId stream, Op op, const void* args, std::size_t args_bytes) = 0;
  // Device scratch that `op` needs for these args (maximum rows included): pass it in
  // args.workspace.
  virtual std::size_t workspace_bytes(Op op, const void* args) const = 0;

  // Work enqueued on `stream`, and on streams joined to it by events, is recorded instead of run,
  // until end_capture.
  virtual void begin_capture(StreamId stream) = 0;
  virtual GraphId end_capture(StreamId stream) = 0;
  virtual void abort_capture(StreamId stream) noexcept = 0;
  virtual void replay(GraphId graph, StreamId stream) = 0;
  virtual void destroy_graph(GraphId graph) noexcept = 0;
  // Work items of a graph (kernels, copies), for reports; 0 where the device does not count them.
  virtual std::size_t graph_nodes(GraphId) const { return 0; }

 protected:
  Device() = default;
};

template <class Args>
void launch(Device& device, StreamId stream, const Args& args) {
  device.launch(stream, Args::kOp, &args, sizeof(Args));
}

// ---- owners: move-only, destructors never throw
// -----------------------------------------------------------------

class Block {
 public:
  Block() = default;
  Block(Device& device, Space space, std::size_t bytes, std::string_view what)
      : device_(&device), data_(device.allocate(space, bytes, what)), bytes_(bytes) {}
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Block() {
    if (data_ != nullptr) device_->release(data_);
  }
  void* data() const noexcept { return data_; }
  template <class T>
  T* as() const noexcept {
    return static_cast<T*>(data_);
  }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  void swap(Block& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Device* device_ = nullptr;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Stream {
 public:
  explicit Stream(Device& device) : device_(&device), id_(device.create_stream()) {}
  Stream(Stream&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), id_(other.id_) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (device_ != nullptr) device_->destroy_stream(id_);
  }
  StreamId id() const noexcept { return id_; }

 private:
  Device* device_;
  StreamId id_;
};

class Event {
 public:
  explicit Event(Device& device) : device_(&device), id_(device.create_event()) {}
  Event(Event&& other) noexcept : device_(std::exchange(other.device_, nullptr)), id_(other.id_) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (device_ != nullptr) device_->destroy_event(id_);
  }
  EventId id() const noexcept { return id_; }

 private:
  Device* device_;
  EventId id_;
};

class Graph {
 public:
  Graph() = default;
  Graph(Device& device, GraphId id) : device_(&device), id_(id) {}
  Graph(Graph&& other) noexcept : device_(std::exchange(other.device_, nullptr)), id_(other.id_) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~Graph() {
    if (device_ != nullptr) device_->destroy_graph(id_);
  }
  explicit operator bool() const noexcept { return device_ != nullptr; }
  void replay(StreamId stream) const { device_->replay(id_, stream); }
  std::size_t nodes() const { return device_->graph_nodes(id_); }

 private:
  Device* device_ = nullptr;
  GraphId id_ = 0;
};

// A capture scope: `Capture c(device, stream); ...; Graph g = c.finish();` Without finish() the
// capture is dropped.
class Capture {
 public:
  Capture(Device& device, StreamId stream) : device_(&device), stream_(stream) {
    device.begin_capture(stream);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    if (device_ != nullptr) device_->abort_capture(stream_);
  }
  Graph finish() {
    Device& device = *std::exchange(device_, nullptr);
    return Graph(device, device.end_capture(stream_));
  }

 private:
  Device* device_;
  StreamId stream_;
};

}  // namespace flashnext
