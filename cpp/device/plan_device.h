// A device that only counts: the engine is built on it once, before the real one, so that every
// byte is known and refused with a sum before the first is taken. Nothing runs on it. Allocations
// are reserved address space, untouched.
#pragma once

#include "cpp/device/device.h"

#include <cstdint>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

namespace flashnext {

class PlanDevice final : public Device {
 public:
  explicit PlanDevice(const Device& real) : real_(real) {}
  ~PlanDevice() override {
    for (const auto& [block, bytes] : blocks_) munmap(block, bytes);
  }

  std::string_view kind() const noexcept override { return real_.kind(); }
  std::string description() const override { return "plan of " + real_.description(); }

  void* allocate(Space space, std::size_t bytes, std::string_view what) override {
    const std::size_t size = bytes == 0 ? 1 : bytes;
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) {
      throw OutOfMemory(
          to_string(space), bytes,
          std::string(what) + " needs " + std::to_string(bytes) +
              " bytes, more than this machine can address; lower window, lanes or chunk");
    }
    blocks_.emplace(block, size);
    parts_.push_back({space, std::string(what), bytes});
    return block;
  }
  void release(void* block) noexcept override {
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;
    munmap(block, found->second);
    blocks_.erase(found);
  }
  void seal() noexcept override {}
  bool pin(void*, std::size_t bytes, std::string_view what) override {
    parts_.push_back({Space::kPinned, std::string(what), bytes});
    return true;
  }
  void unpin(void*) noexcept override {}
  // Every part that was asked for, released ones included.
  std::vector<Allocated> allocations() const override { return parts_; }

  StreamId create_stream() override { return 0; }
  void destroy_stream(StreamId) noexcept override {}
  EventId create_event() override { return 0; }
  void destroy_event(EventId) noexcept override {}
  void record(EventId, StreamId) override {}
  void wait(StreamId, EventId) override {}
  bool reached(EventId) override { return true; }
  void synchronize(StreamId) override {}
  void copy_async(StreamId, void*, const void*, std::size_t) override { refuse(); }
  void zero_async(StreamId, void*, std::size_t) override { refuse(); }
  void launch(StreamId, Op, const void*, std::size_t) override { refuse(); }
  std::size_t workspace_bytes(Op op, const void* args) const override {
    return real_.workspace_bytes(op, args);
  }
  void begin_capture(StreamId) override { refuse(); }
  GraphId end_capture(StreamId) override { return 0; }
  void abort_capture(StreamId) noexcept override {}
  void replay(GraphId, StreamId) override { refuse(); }
  void destroy_graph(GraphId) noexcept override {}

 private:
  static void refuse() { throw LogicError("a plan device runs nothing"); }
  const Device& real_;
  std::unordered_map<void*, std::size_t> blocks_;
  std::vector<Allocated> parts_;
};

}  // namespace flashnext
