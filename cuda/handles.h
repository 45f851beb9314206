// Owners of CUDA objects: move-only, destructors never throw.
#pragma once

#include "cuda/check.h"

#include <cstddef>
#include <utility>

namespace flashnext::cuda {

// Holds one handle of type T and gives it back with Close::close(T).
template <class T, class Close>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) noexcept : value_(value) {}
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, T{})) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Handle() {
    if (value_ != T{}) log_error(Close::close(value_), Close::kName);
  }
  T get() const noexcept { return value_; }
  explicit operator bool() const noexcept { return value_ != T{}; }

 private:
  T value_{};
};

struct CloseStream {
  static constexpr const char* kName = "cudaStreamDestroy";
  static cudaError_t close(cudaStream_t s) noexcept { return cudaStreamDestroy(s); }
};
struct CloseEvent {
  static constexpr const char* kName = "cudaEventDestroy";
  static cudaError_t close(cudaEvent_t e) noexcept { return cudaEventDestroy(e); }
};
struct CloseGraph {
  static constexpr const char* kName = "cudaGraphDestroy";
  static cudaError_t close(cudaGraph_t g) noexcept { return cudaGraphDestroy(g); }
};
struct CloseGraphExec {
  static constexpr const char* kName = "cudaGraphExecDestroy";
  static cudaError_t close(cudaGraphExec_t g) noexcept { return cudaGraphExecDestroy(g); }
};
struct CloseDeviceBlock {
  static constexpr const char* kName = "cudaFree";
  static cudaError_t close(void* p) noexcept { return cudaFree(p); }
};
struct ClosePinnedBlock {
  static constexpr const char* kName = "cudaFreeHost";
  static cudaError_t close(void* p) noexcept { return cudaFreeHost(p); }
};

using StreamHandle = Handle<cudaStream_t, CloseStream>;
using EventHandle = Handle<cudaEvent_t, CloseEvent>;
using GraphHandle = Handle<cudaGraph_t, CloseGraph>;
using GraphExecHandle = Handle<cudaGraphExec_t, CloseGraphExec>;
using DeviceBlock = Handle<void*, CloseDeviceBlock>;
using PinnedBlock = Handle<void*, ClosePinnedBlock>;

}  // namespace flashnext::cuda
