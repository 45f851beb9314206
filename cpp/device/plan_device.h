// A device that only counts: the engine is built on it once, before the real one, so that every
// byte is known and refused with a sum before the first is taken. Nothing runs on it. Allocations
// are reserved address space, untouched.
#pragma once

#include "cpp/device/device.h"

#include <cstdint>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flashnext {

class PlanDevice final : public Device {
 public:
  using Sizes = std::function<std::size_t(Op op, const void* args)>;  // workspace_bytes()

  // Counts for a device that is here, which must outlive this one.
  explicit PlanDevice(const Device& real)
      : kind_(real.kind()),
        description_("plan of " + real.description()),
        sizes_([&real](Op op, const void* args) { return real.workspace_bytes(op, args); }) {}
  // Counts for a device that is not here, with so much memory.
  PlanDevice(std::string kind, std::string description, std::size_t memory, Sizes sizes)
      : kind_(std::move(kind)),
        description_(std::move(description)),
        memory_(memory),
        sizes_(std::move(sizes)) {}
  ~PlanDevice() override {
    for (const auto& [block, bytes] : blocks_) munmap(block, bytes);
  }

  std::string_view kind() const noexcept override { return kind_; }
  std::string description() const override { return description_; }
  std::size_t available(Space space) const override {
    return space == Space::kDevice ? memory_ : static_cast<std::size_t>(-1);
  }

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
  std::size_t workspace_bytes(Op op, const void* args) const override { return sizes_(op, args); }
  void begin_capture(StreamId) override { refuse(); }
  GraphId end_capture(StreamId) override { return 0; }
  void abort_capture(StreamId) noexcept override {}
  void replay(GraphId, StreamId) override { refuse(); }
  void destroy_graph(GraphId) noexcept override {}

 private:
  static void refuse() { throw LogicError("a plan device runs nothing"); }
  const std::string kind_;
  const std::string description_;
  const std::size_t memory_ = static_cast<std::size_t>(-1);
  const Sizes sizes_;
  std::unordered_map<void*, std::size_t> blocks_;
  std::vector<Allocated> parts_;
};

}  // namespace flashnext
