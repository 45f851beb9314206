// CudaDevice: the seam on one CUDA device.
//
// Owns streams, events, graphs and allocations by number; ids are never reused. The first CUDA
// error poisons it: every later call throws DeviceError naming the call that failed first. Threads:
// one at a time; each call makes the device current on the calling thread.
#pragma once

#include "cpp/device/cuda_device.h"
#include "cuda/handles.h"
#include "cuda/host_pages.h"

#include <map>
#include <string>
#include <vector>

namespace flashnext::cuda {

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, const CudaDeviceOptions& options);
  ~CudaDevice() override;

  std::string_view kind() const noexcept override { return "cuda"; }
  std::string description() const override;
  const CudaDeviceInfo& info() const noexcept { return info_; }

  void* allocate(Space space, std::size_t bytes, std::string_view what) override;
  void release(void* block) noexcept override;
  void seal() noexcept override { sealed_ = true; }
  bool pin(void* data, std::size_t bytes, std::string_view what) override;
  void unpin(void* data) noexcept override;
  std::size_t available(Space space) const override;
  std::vector<Allocated> allocations() const override;

  StreamId create_stream() override;
  void destroy_stream(StreamId stream) noexcept override;
  EventId create_event() override;
  void destroy_event(EventId event) noexcept override;
  void record(EventId event, StreamId stream) override;
  void wait(StreamId stream, EventId event) override;
  bool reached(EventId event) override;
  void synchronize(StreamId stream) override;

  void copy_async(StreamId stream, void* to, const void* from, std::size_t bytes) override;
  void zero_async(StreamId stream, void* to, std::size_t bytes) override;

  void launch(StreamId stream, Op op, const void* args, std::size_t args_bytes) override;
  std::size_t workspace_bytes(Op op, const void* args) const override;

  void begin_capture(StreamId stream) override;
  GraphId end_capture(StreamId stream) override;
  void abort_capture(StreamId stream) noexcept override;
  void replay(GraphId graph, StreamId stream) override;
  void destroy_graph(GraphId graph) noexcept override;

  std::size_t graph_nodes(GraphId graph) const override;

  // For benchmarks: the stream itself.
  cudaStream_t native(StreamId stream) const { return find(streams_, stream, "stream"); }

 private:
  struct Owned {
    Space space;
    std::size_t bytes;
    std::string what;
    DeviceBlock device;
    PinnedBlock pinned;
    RegisteredPages pages;  // instead, when large
  };
  struct Captured {
    GraphHandle graph;
    GraphExecHandle exec;
  };

  template <class H>
  static auto find(const std::map<std::uint32_t, H>& all, std::uint32_t id, const char* what)
      -> decltype(all.begin()->second.get());
  // Runs body on this device; the first DeviceError it throws is kept.
  template <class Body>
  auto guarded(Body&& body) -> decltype(body());
  void make_current() const;
  [[noreturn]] void throw_out_of_memory(Space space, std::size_t bytes, std::string_view what,
                                        const std::string& limit) const;
  std::size_t allocated_bytes(Space space) const noexcept;
  // Whether these bytes lie in one allocation of that space.
  bool holds(Space space, const void* data, std::size_t bytes) const noexcept;

  int ordinal_;
  CudaDeviceOptions options_;
  CudaDeviceInfo info_;
  std::string poison_;  // the first failure, or empty
  bool sealed_ = false;
  std::uint32_t next_id_ = 1;
  std::map<void*, Owned> blocks_;
  std::map<void*, Allocated> pinned_;  // by pin()
  std::map<std::uint32_t, StreamHandle> streams_;
  std::map<std::uint32_t, EventHandle> events_;
  std::map<std::uint32_t, Captured> graphs_;
};

}  // namespace flashnext::cuda
