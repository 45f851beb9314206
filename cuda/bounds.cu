// The bounds of a CUDA device (cpp/device/bounds.h), measured with the least code that reaches
// them.
#include "cpp/device/bounds.h"
#include "cpp/device/cuda_device.h"
#include "cuda/handles.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cuda_runtime.h>

namespace flashnext {

namespace cuda {
namespace {

constexpr int kRuns = 7;
constexpr int kThreads = 512;
constexpr int kGraphNodes = 1000;
constexpr int kMmaLoops = 2048;
constexpr int kMmaChains = 8;  // independent sums a warp keeps in flight

__global__ void empty_kernel() {}

// sink keeps the loads alive; it is written only if the sum has one value in 2^32.
__global__ void read_kernel(const uint4* __restrict__ from, std::size_t n, unsigned* sink) {
  unsigned sum = 0;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += stride) sum ^= from[i].x;
  if (sum == 0x9E3779B9u) *sink = sum;
}

__global__ void copy_kernel(const uint4* __restrict__ from, uint4* __restrict__ to, std::size_t n) {
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 4; ++k) __stcs(to + i + k * stride, v[k]);
  }
  for (; i < n; i += stride) to[i] = from[i];
}

__global__ void int8_kernel(int* sink) {
  int sum[kMmaChains][4] = {};
  const unsigned a = threadIdx.x * 0x01030507u, b = threadIdx.x * 0x05010903u;
  for (int i = 0; i < kMmaLoops; ++i) {
#pragma unroll
    for (int c = 0; c < kMmaChains; ++c) {
      asm volatile(
          "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
          "{%0,%1,%2,%3};"
          : "+r"(sum[c][0]), "+r"(sum[c][1]), "+r"(sum[c][2]), "+r"(sum[c][3])
          : "r"(a), "r"(b), "r"(a + c), "r"(b + c), "r"(a), "r"(b));
    }
  }
  int all = 0;
#pragma unroll
  for (int c = 0; c < kMmaChains; ++c) all ^= sum[c][0] ^ sum[c][1] ^ sum[c][2] ^ sum[c][3];
  if (all == 0x1E3779B9) *sink = all;
}

__global__ void half_kernel(float* sink) {
  float sum[kMmaChains][4] = {};
  const unsigned a = 0x3C003800u + threadIdx.x, b = 0x2C003000u + threadIdx.x;
  for (int i = 0; i < kMmaLoops; ++i) {
#pragma unroll
    for (int c = 0; c < kMmaChains; ++c) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
          "{%8,%9}, {%0,%1,%2,%3};"
          : "+f"(sum[c][0]), "+f"(sum[c][1]), "+f"(sum[c][2]), "+f"(sum[c][3])
          : "r"(a), "r"(b), "r"(a + c), "r"(b + c), "r"(a), "r"(b));
    }
  }
  float all = 0;
#pragma unroll
  for (int c = 0; c < kMmaChains; ++c) all += sum[c][0] + sum[c][1] + sum[c][2] + sum[c][3];
  if (all == 1.2345f) *sink = all;
}

struct TimedEvent {
  EventHandle handle;
  TimedEvent() {
    cudaEvent_t event = nullptr;
    FN_CUDA(cudaEventCreate(&event));
    handle = EventHandle(event);
  }
};

class Bench {
 public:
  explicit Bench(int ordinal) {
    FN_CUDA(cudaSetDevice(ordinal));
    FN_CUDA(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, ordinal));
    cudaStream_t stream = nullptr;
    FN_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_ = StreamHandle(stream);
    std::size_t free_bytes = 0, total = 0;
    FN_CUDA(cudaMemGetInfo(&free_bytes, &total));
    bytes_ = std::min<std::size_t>(std::size_t{1} << 30, free_bytes / 4) >> 20 << 20;
    if (bytes_ < std::size_t{64} << 20) {  // less would stay in the caches
      throw OutOfMemory("device", std::size_t{256} << 20,
                        "bounds: measuring needs 256 MiB of free device memory, " +
                            std::to_string(free_bytes) + " bytes are free");
    }
    from_ = device_block();
    to_ = device_block();
    FN_CUDA(cudaMemsetAsync(from_.get(), 1, bytes_, stream));
    FN_CUDA(cudaStreamSynchronize(stream));
  }

  CudaBounds run() {
    const auto n = bytes_ / sizeof(uint4);
    const auto* from = static_cast<const uint4*>(from_.get());
    auto* to = static_cast<uint4*>(to_.get());
    auto* sink = static_cast<unsigned*>(to_.get());
    const int grid = multiprocessors_ * 4;
    cudaStream_t s = stream_.get();
    CudaBounds b;
    b.read = static_cast<double>(bytes_) /
             best([&] { read_kernel<<<grid, kThreads, 0, s>>>(from, n, sink); });
    b.copy = 2 * static_cast<double>(bytes_) /
             std::min(best([&] { copy_kernel<<<grid, kThreads, 0, s>>>(from, to, n); }), best([&] {
                        FN_CUDA(cudaMemcpyAsync(to, from, bytes_, cudaMemcpyDeviceToDevice, s));
                      }));
    const double warps = static_cast<double>(grid) * kThreads / 32;
    const double products = warps * kMmaLoops * kMmaChains * 16 * 8;
    b.int8_ops = 2 * products * 32 /
                 best([&] { int8_kernel<<<grid, kThreads, 0, s>>>(static_cast<int*>(to_.get())); });
    b.half_flops = 2 * products * 16 / best([&] {
                     half_kernel<<<grid, kThreads, 0, s>>>(static_cast<float*>(to_.get()));
                   });
    graphs(b);
    links(b);
    return b;
  }

 private:
  DeviceBlock device_block() const {
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, bytes_);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw OutOfMemory("device", bytes_,
                        "bounds: the card has no " + std::to_string(bytes_) + " bytes free");
    }
    FN_CUDA(error);
    return DeviceBlock(data);
  }

  // Seconds of the work that `enqueue` puts on the stream, by the device's clock.
  template <class Enqueue>
  double best(Enqueue&& enqueue) {
    float ms = 1e30f;
    for (int i = 0; i < kRuns; ++i) {
      FN_CUDA(cudaEventRecord(begin_.handle.get(), stream_.get()));
      enqueue();
      FN_CUDA(cudaGetLastError());
      FN_CUDA(cudaEventRecord(end_.handle.get(), stream_.get()));
      FN_CUDA(cudaEventSynchronize(end_.handle.get()));
      float one = 0;
      FN_CUDA(cudaEventElapsedTime(&one, begin_.handle.get(), end_.handle.get()));
      ms = std::min(ms, one);
    }
    return static_cast<double>(ms) * 1e-3;
  }

  GraphExecHandle graph_of(int nodes) {
    FN_CUDA(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < nodes; ++i) empty_kernel<<<1, 32, 0, stream_.get()>>>();
    cudaGraph_t graph = nullptr;
    FN_CUDA(cudaStreamEndCapture(stream_.get(), &graph));
    const GraphHandle holder(graph);
    cudaGraphExec_t exec = nullptr;
    FN_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    return GraphExecHandle(exec);
  }

  void graphs(CudaBounds& b) {
    const GraphExecHandle one = graph_of(1), many = graph_of(kGraphNodes);
    const auto time = [&](const GraphExecHandle& graph) {
      return best([&] { FN_CUDA(cudaGraphLaunch(graph.get(), stream_.get())); });
    };
    b.graph_node = (time(many) - time(one)) / (kGraphNodes - 1);
    double launch = 1e30;
    for (int i = 0; i < kRuns; ++i) {  // what a waiting host sees
      const auto start = std::chrono::steady_clock::now();
      FN_CUDA(cudaGraphLaunch(one.get(), stream_.get()));
      FN_CUDA(cudaStreamSynchronize(stream_.get()));
      launch = std::min(
          launch, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    b.graph_launch = launch;
  }

  void links(CudaBounds& b) {
    constexpr std::size_t kMost = std::size_t{256} << 20;
    const std::size_t most = std::min(kMost, bytes_);
    void* data = nullptr;
    FN_CUDA(cudaHostAlloc(&data, most, cudaHostAllocPortable));
    const PinnedBlock host(data);
    // Up to the size of an expert line and beyond.
    for (const std::size_t bytes : {std::size_t{1} << 16, std::size_t{1} << 20,
                                    std::size_t{1862400}, std::size_t{1} << 24, kMost}) {
      if (bytes > most) continue;
      const auto rate = [&](void* to, const void* from, cudaMemcpyKind kind) {
        const int copies = static_cast<int>(std::clamp<std::size_t>(most / bytes, 1, 32));
        return static_cast<double>(bytes) * copies / best([&] {
                 for (int i = 0; i < copies; ++i) {
                   FN_CUDA(cudaMemcpyAsync(to, from, bytes, kind, stream_.get()));
                 }
               });
      };
      b.link.push_back({bytes, rate(to_.get(), host.get(), cudaMemcpyHostToDevice),
                        rate(host.get(), to_.get(), cudaMemcpyDeviceToHost)});
    }
  }

  int multiprocessors_ = 0;
  std::size_t bytes_ = 0;
  StreamHandle stream_;
  DeviceBlock from_, to_;
  TimedEvent begin_, end_;
};

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, ordinal) != cudaSuccess) {
    cudaGetLastError();  // newer drivers drop attributes: the receipt says 0
    return 0;
  }
  return value;
}

void require_device(int ordinal) {
  const int count = cuda_device_count();
  if (ordinal < 0 || ordinal >= count) {
    throw InputError("CUDA device " + std::to_string(ordinal) +
                     " was asked for; this machine has " + std::to_string(count));
  }
}

}  // namespace
}  // namespace cuda

CudaBounds measure_cuda_bounds(int ordinal) {
  cuda::require_device(ordinal);
  return cuda::Bench(ordinal).run();
}

CudaMachine cuda_machine(int ordinal) {
  cuda::require_device(ordinal);
  cudaDeviceProp prop{};
  FN_CUDA(cudaGetDeviceProperties(&prop, ordinal));
  CudaMachine m;
  m.name = prop.name;
  for (const char byte : prop.uuid.bytes) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
    m.uuid += hex;
  }
  m.major = prop.major;
  m.minor = prop.minor;
  m.multiprocessors = prop.multiProcessorCount;
  m.memory_bytes = prop.totalGlobalMem;
  m.ecc = prop.ECCEnabled != 0;
  m.clock_khz = cuda::attribute(cudaDevAttrClockRate, ordinal);
  m.memory_clock_khz = cuda::attribute(cudaDevAttrMemoryClockRate, ordinal);
  FN_CUDA(cudaDriverGetVersion(&m.driver));
  FN_CUDA(cudaRuntimeGetVersion(&m.runtime));
  m.compiler = "nvcc " + std::to_string(__CUDACC_VER_MAJOR__) + "." +
               std::to_string(__CUDACC_VER_MINOR__) + "." + std::to_string(__CUDACC_VER_BUILD__);
  return m;
}

}  // namespace flashnext
