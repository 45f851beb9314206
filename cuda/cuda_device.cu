#include "cuda/copy.h"
#include "cuda/cuda_device.h"
#include "cuda/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <cuda_runtime.h>

namespace flashnext::cuda {

namespace {

constexpr std::size_t kAlignment = 256;
// From here on the driver takes pages that we touched.
constexpr std::size_t kLargePinned = std::size_t{64} << 20;

// Does nothing: asking for its attributes tells whether this build has code for a device.
__global__ void probe_kernel() {}

CudaDeviceInfo describe(int ordinal) {
  cudaDeviceProp prop{};
  FN_CUDA(cudaGetDeviceProperties(&prop, ordinal));
  const bool compiled = prop.major == 9 || prop.major == 12;
  return {ordinal,
          prop.name,
          prop.major,
          prop.minor,
          prop.multiProcessorCount,
          prop.totalGlobalMem,
          prop.integrated != 0,
          compiled};
}

}  // namespace

CudaDevice::CudaDevice(int ordinal, const CudaDeviceOptions& options)
    : ordinal_(ordinal), options_(options), info_(describe(ordinal)) {
  make_current();
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    throw InputError("CUDA device " + std::to_string(ordinal) + " (" + info_.name +
                     ") has compute capability " + std::to_string(info_.major) + "." +
                     std::to_string(info_.minor) + "; this build holds code for 9.0 and 12.0");
  }
  FN_CUDA(error);
}

CudaDevice::~CudaDevice() {
  const cudaError_t error = cudaSetDevice(ordinal_);
  if (error != cudaSuccess) log_error(error, "cudaSetDevice");
  // Work in flight may still use what the members are about to free.
  if (poison_.empty()) log_error(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  while (!pinned_.empty()) unpin(pinned_.begin()->first);
  for (auto& [data, owned] : blocks_) {
    if (owned.space == Space::kPageable) std::free(data);
  }
}

void CudaDevice::make_current() const { FN_CUDA(cudaSetDevice(ordinal_)); }

template <class Body>
auto CudaDevice::guarded(Body&& body) -> decltype(body()) {
  if (!poison_.empty()) {
    throw DeviceError("CUDA device " + std::to_string(ordinal_) +
                      " is out of use since an earlier failure: " + poison_);
  }
  try {
    make_current();
    return body();
  } catch (const DeviceError& error) {
    poison_ = error.what();
    throw;
  }
}

template <class H>
auto CudaDevice::find(const std::map<std::uint32_t, H>& all, std::uint32_t id, const char* what)
    -> decltype(all.begin()->second.get()) {
  const auto it = all.find(id);
  if (it == all.end()) {
    throw LogicError(std::string("CUDA device: no ") + what + " " + std::to_string(id));
  }
  return it->second.get();
}

std::string CudaDevice::description() const {
  return "cuda:" + std::to_string(ordinal_) + " (" + info_.name + ", compute capability " +
         std::to_string(info_.major) + "." + std::to_string(info_.minor) + ", " +
         std::to_string(info_.multiprocessors) + " multiprocessors, " +
         std::to_string(info_.memory_bytes >> 20) + " MiB)";
}

// ---- memory

std::size_t CudaDevice::allocated_bytes(Space space) const noexcept {
  std::size_t sum = 0;
  for (const auto& [data, owned] : blocks_) sum += owned.space == space ? owned.bytes : 0;
  return sum;
}

void CudaDevice::throw_out_of_memory(Space space, std::size_t bytes, std::string_view what,
                                     const std::string& limit) const {
  const std::size_t held = allocated_bytes(space);
  std::string message = std::string("out of ") + flashnext::to_string(space) +
                        " memory on cuda:" + std::to_string(ordinal_) + ": " + std::string(what) +
                        " needs " + std::to_string(bytes) + " bytes beside " +
                        std::to_string(held) + " already allocated, " +
                        std::to_string(held + bytes) + " in all; " + limit + ". Allocated so far:";
  std::map<std::string, std::size_t> parts;
  for (const auto& [data, owned] : blocks_) {
    if (owned.space == space) parts[owned.what] += owned.bytes;
  }
  for (const auto& [part, part_bytes] : parts) {
    message += " " + part + " " + std::to_string(part_bytes) + ",";
  }
  if (parts.empty()) message += " nothing,";
  message.back() = '.';
  throw OutOfMemory(flashnext::to_string(space), bytes, message);
}

void* CudaDevice::allocate(Space space, std::size_t bytes, std::string_view what) {
  if (sealed_) {
    throw LogicError("allocation of " + std::string(what) + " (" + std::to_string(bytes) +
                     " bytes) after the device was sealed");
  }
  return guarded([&]() -> void* {
    Owned owned{space, bytes, std::string(what), {}, {}, {}};
    const std::size_t rounded =
        std::max<std::size_t>((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
    void* data = nullptr;
    cudaError_t error = cudaSuccess;
    const char* call = "";
    switch (space) {
      case Space::kDevice: {
        const std::size_t held = allocated_bytes(space);
        if (bytes > options_.memory_budget || held > options_.memory_budget - bytes) {
          throw_out_of_memory(space, bytes, what,
                              "the budget is " + std::to_string(options_.memory_budget) + " bytes");
        }
        call = "cudaMalloc";
        error = cudaMalloc(&data, rounded);
        if (error == cudaSuccess) owned.device = DeviceBlock(data);
        break;
      }
      case Space::kPinned:
        // Mapped and portable: kernels read it in place, and a second device may too.
        if (rounded >= kLargePinned) {
          call = "cudaHostRegister";
          error = allocate_pages(rounded, &owned.pages);
          data = owned.pages.get().data;
          break;
        }
        call = "cudaHostAlloc";
        error = cudaHostAlloc(&data, rounded, cudaHostAllocMapped | cudaHostAllocPortable);
        if (error == cudaSuccess) owned.pinned = PinnedBlock(data);
        break;
      case Space::kPageable:
        data = std::aligned_alloc(kAlignment, rounded);
        if (data == nullptr) error = cudaErrorMemoryAllocation;
        break;
    }
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // an expected answer: the device stays usable
      std::size_t free_bytes = 0;
      std::size_t total_bytes = 0;
      cudaMemGetInfo(&free_bytes, &total_bytes);
      throw_out_of_memory(space, bytes, what,
                          space == Space::kDevice
                              ? std::to_string(free_bytes) + " bytes of the card are free"
                              : "the system gave no more");
    }
    require(error, call, __FILE__, __LINE__);
    blocks_.emplace(data, std::move(owned));
    return data;
  });
}

bool CudaDevice::holds(Space space, const void* data, std::size_t bytes) const noexcept {
  auto it = blocks_.upper_bound(const_cast<void*>(data));
  if (it == blocks_.begin()) return false;
  --it;
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(data) -
                                               static_cast<const char*>(it->first));
  return it->second.space == space && offset <= it->second.bytes &&
         bytes <= it->second.bytes - offset;
}

void CudaDevice::release(void* block) noexcept {
  const auto it = blocks_.find(block);
  if (it == blocks_.end()) return;
  cudaSetDevice(ordinal_);
  if (it->second.space == Space::kPageable) std::free(block);
  blocks_.erase(it);
}

bool CudaDevice::pin(void* data, std::size_t bytes, std::string_view what) {
  if (sealed_) throw LogicError("pin of " + std::string(what) + " after the device was sealed");
  if (pinned_.count(data) != 0) throw LogicError("pin of " + std::string(what) + " twice");
  return guarded([&] {
    const cudaError_t error = register_pages(data, bytes);
    if (error == cudaErrorMemoryAllocation) return false;  // the system's limit
    require(error, "cudaHostRegister", __FILE__, __LINE__);
    pinned_.emplace(data, Allocated{Space::kPinned, std::string(what), bytes});
    return true;
  });
}

void CudaDevice::unpin(void* data) noexcept {
  if (pinned_.erase(data) == 0) return;
  cudaSetDevice(ordinal_);
  log_error(cudaHostUnregister(data), "cudaHostUnregister");
}

std::size_t CudaDevice::available(Space space) const {
  if (space != Space::kDevice || !poison_.empty()) return static_cast<std::size_t>(-1);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (cudaSetDevice(ordinal_) != cudaSuccess ||
      cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
    return static_cast<std::size_t>(-1);  // the next call that matters reports the error
  }
  const std::size_t held = allocated_bytes(space);
  return std::min(free_bytes, options_.memory_budget - std::min(held, options_.memory_budget));
}

std::vector<Allocated> CudaDevice::allocations() const {
  std::vector<Allocated> all;
  for (const auto& [data, owned] : blocks_) all.push_back({owned.space, owned.what, owned.bytes});
  for (const auto& [data, part] : pinned_) all.push_back(part);
  return all;
}

// ---- streams and events

StreamId CudaDevice::create_stream() {
  return guarded([&] {
    cudaStream_t stream = nullptr;
    FN_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    streams_.emplace(next_id_, StreamHandle(stream));
    return next_id_++;
  });
}

void CudaDevice::destroy_stream(StreamId stream) noexcept { streams_.erase(stream); }

EventId CudaDevice::create_event() {
  return guarded([&] {
    cudaEvent_t event = nullptr;
    FN_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    events_.emplace(next_id_, EventHandle(event));
    return next_id_++;
  });
}

void CudaDevice::destroy_event(EventId event) noexcept { events_.erase(event); }

void CudaDevice::record(EventId event, StreamId stream) {
  guarded([&] {
    FN_CUDA(cudaEventRecord(find(events_, event, "event"), find(streams_, stream, "stream")));
  });
}

void CudaDevice::wait(StreamId stream, EventId event) {
  guarded([&] {
    FN_CUDA(
        cudaStreamWaitEvent(find(streams_, stream, "stream"), find(events_, event, "event"), 0));
  });
}

bool CudaDevice::reached(EventId event) {
  return guarded([&] {
    const cudaError_t error = cudaEventQuery(find(events_, event, "event"));
    if (error == cudaErrorNotReady) return false;
    require(error, "cudaEventQuery", __FILE__, __LINE__);
    return true;
  });
}

void CudaDevice::synchronize(StreamId stream) {
  guarded([&] { FN_CUDA(cudaStreamSynchronize(find(streams_, stream, "stream"))); });
}

void CudaDevice::copy_async(StreamId stream, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  guarded([&] {
    const auto bits = reinterpret_cast<std::uintptr_t>(to) |
                      reinterpret_cast<std::uintptr_t>(from) | static_cast<std::uintptr_t>(bytes);
    if (bytes <= kSmallCopy && bits % 16 == 0 && holds(Space::kPinned, from, bytes) &&
        holds(Space::kDevice, to, bytes)) {
      return copy_by_kernel(find(streams_, stream, "stream"), to, from, bytes);
    }
    FN_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, find(streams_, stream, "stream")));
  });
}

void CudaDevice::zero_async(StreamId stream, void* to, std::size_t bytes) {
  if (bytes == 0) return;
  guarded([&] { FN_CUDA(cudaMemsetAsync(to, 0, bytes, find(streams_, stream, "stream"))); });
}

// ---- ops and graphs

void CudaDevice::launch(StreamId stream, Op op, const void* args, std::size_t args_bytes) {
  guarded([&] {
    cuda::launch(find(streams_, stream, "stream"), op, args, args_bytes);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      throw_error(error, (std::string("launch of ") + flashnext::to_string(op)).c_str(), __FILE__,
                  __LINE__);
    }
  });
}

std::size_t CudaDevice::workspace_bytes(Op op, const void* args) const {
  return cuda::workspace_bytes(op, args);
}

void CudaDevice::begin_capture(StreamId stream) {
  guarded([&] {
    FN_CUDA(
        cudaStreamBeginCapture(find(streams_, stream, "stream"), cudaStreamCaptureModeThreadLocal));
  });
}

GraphId CudaDevice::end_capture(StreamId stream) {
  return guarded([&] {
    cudaGraph_t graph = nullptr;
    FN_CUDA(cudaStreamEndCapture(find(streams_, stream, "stream"), &graph));
    Captured captured;
    captured.graph = GraphHandle(graph);
    cudaGraphExec_t exec = nullptr;
    FN_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    captured.exec = GraphExecHandle(exec);
    graphs_.emplace(next_id_, std::move(captured));
    return next_id_++;
  });
}

void CudaDevice::abort_capture(StreamId stream) noexcept {
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(it->second.get(), &graph);  // whatever it says, the capture is over
  cudaGetLastError();
  GraphHandle dropped(graph);
}

void CudaDevice::replay(GraphId graph, StreamId stream) {
  guarded([&] {
    const auto it = graphs_.find(graph);
    if (it == graphs_.end()) {
      throw LogicError("CUDA device: no graph " + std::to_string(graph));
    }
    FN_CUDA(cudaGraphLaunch(it->second.exec.get(), find(streams_, stream, "stream")));
  });
}

void CudaDevice::destroy_graph(GraphId graph) noexcept { graphs_.erase(graph); }

std::size_t CudaDevice::graph_nodes(GraphId graph) const {
  const auto it = graphs_.find(graph);
  if (it == graphs_.end()) throw LogicError("CUDA device: no graph " + std::to_string(graph));
  std::size_t nodes = 0;
  FN_CUDA(cudaGraphGetNodes(it->second.graph.get(), nullptr, &nodes));
  return nodes;
}

}  // namespace flashnext::cuda

namespace flashnext {

bool cuda_built() noexcept { return true; }

std::size_t cuda_workspace_bytes(Op op, const void* args) {
  return cuda::workspace_bytes(op, args);
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();  // no driver or no device: the answer is none
    return 0;
  }
  return count;
}

std::vector<CudaDeviceInfo> cuda_devices() {
  std::vector<CudaDeviceInfo> all;
  for (int i = 0; i < cuda_device_count(); ++i) all.push_back(cuda::describe(i));
  return all;
}

std::unique_ptr<Device> make_cuda_device(int ordinal, const CudaDeviceOptions& options) {
  const int count = cuda_device_count();
  if (ordinal < 0 || ordinal >= count) {
    throw InputError("CUDA device " + std::to_string(ordinal) +
                     " was asked for; this machine has " + std::to_string(count));
  }
  return std::make_unique<cuda::CudaDevice>(ordinal, options);
}

}  // namespace flashnext
