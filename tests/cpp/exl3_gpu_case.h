// Random EXL3 weights on host and device, and one call of an op on both sides, compared bit by bit.
#pragma once

#include "cpp/base/half.h"
#include "cpp/device/host_ops.h"
#include "cuda/check.h"
#include "cuda/kernels.h"

#include <cstring>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <memory>
#include <random>
#include <vector>

namespace flashnext::exl3_case {

// A block that exists twice. Host side first; `upload` copies.
template <class T>
class Twin {
 public:
  explicit Twin(std::size_t n) : host(n) { FN_CUDA(cudaMalloc(&device_, n * sizeof(T) + 256)); }
  Twin(Twin&& other) noexcept
      : host(std::move(other.host)), device_(std::exchange(other.device_, nullptr)) {}
  Twin& operator=(Twin&&) = delete;
  ~Twin() { cudaFree(device_); }
  void upload() {
    FN_CUDA(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> v(host.size());
    FN_CUDA(cudaMemcpy(v.data(), device_, v.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }
  T* device() const { return static_cast<T*>(device_); }
  std::vector<T> host;

 private:
  void* device_ = nullptr;
};

struct Weight {
  Twin<std::byte> trellis, suh, svh;
  std::unique_ptr<Twin<float>> bias;
  std::int32_t in, out, words;

  Weight(std::int32_t in, std::int32_t out, std::int32_t words, std::mt19937& random,
         bool with_bias = false)
      : trellis(static_cast<std::size_t>(in / 16) * static_cast<std::size_t>(out / 16) *
                static_cast<std::size_t>(words) * 2),
        suh(static_cast<std::size_t>(in) * 2),
        svh(static_cast<std::size_t>(out) * 2),
        in(in),
        out(out),
        words(words) {
    for (std::size_t i = 0; i < trellis.host.size(); i += 4) {
      const std::uint32_t bits = random();
      std::memcpy(trellis.host.data() + i, &bits, 4);
    }
    fill_scales(suh.host, 0.02f, random);
    fill_scales(svh.host, 1.0f, random);
    if (with_bias) {
      bias = std::make_unique<Twin<float>>(static_cast<std::size_t>(out));
      std::normal_distribution<float> normal;
      for (float& v : bias->host) v = normal(random);
      bias->upload();
    }
    trellis.upload();
    suh.upload();
    svh.upload();
  }

  Exl3Weight host() const {
    return {trellis.host.data(),
            suh.host.data(),
            svh.host.data(),
            bias ? bias->host.data() : nullptr,
            in,
            out,
            words,
            0};
  }
  Exl3Weight device() const {
    return {trellis.device(),
            suh.device(),
            svh.device(),
            bias ? bias->device() : nullptr,
            in,
            out,
            words,
            0};
  }

 private:
  // Signed magnitudes around `size`; one in 64 is zero, as a padded channel would be.
  static void fill_scales(std::vector<std::byte>& to, float size, std::mt19937& random) {
    std::uniform_real_distribution<float> spread(0.5f, 2.0f);
    for (std::size_t i = 0; i < to.size(); i += 2) {
      float v = size * spread(random);
      if (random() % 2 == 0) v = -v;
      if (random() % 64 == 0) v = 0.0f;
      const std::uint16_t bits = f32_to_f16(v);
      std::memcpy(to.data() + i, &bits, 2);
    }
  }
};

inline void fill_normal(std::vector<float>& to, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (float& v : to) v = normal(random);
}

inline constexpr std::uint32_t kPoison = 0x7FA5A5A5u;

inline void poison(std::vector<float>& v) {
  for (float& f : v) std::memcpy(&f, &kPoison, 4);
}

// Equal bits; the message names the first difference.
inline void expect_same_bits(const std::vector<float>& device, const std::vector<float>& host,
                             std::int32_t row_length, const char* what) {
  ASSERT_EQ(device.size(), host.size());
  if (std::memcmp(device.data(), host.data(), host.size() * 4) == 0) return;
  std::size_t different = 0;
  std::size_t first = host.size();
  for (std::size_t i = 0; i < host.size(); ++i) {
    if (std::memcmp(&device[i], &host[i], 4) != 0) {
      first = std::min(first, i);
      ++different;
    }
  }
  const std::size_t length = static_cast<std::size_t>(row_length);
  ADD_FAILURE() << what << ": " << different << " of " << host.size()
                << " values differ, first in row " << first / length << " column " << first % length
                << ": device " << device[first] << " host " << host[first];
}

struct HostSide {
  ThreadPool pool{0};
  host::Context context{pool, exl3::best_isa()};
};

inline HostSide& host_side() {
  static HostSide side;
  return side;
}

// Scratch on the device, poisoned, with a guard behind it that a kernel must leave alone.
class DeviceScratch {
 public:
  explicit DeviceScratch(std::size_t bytes) : bytes_(bytes) {
    FN_CUDA(cudaMalloc(&data_, bytes + kGuard));
    FN_CUDA(cudaMemset(data_, 0xA5, bytes + kGuard));
  }
  ~DeviceScratch() {
    std::vector<unsigned char> guard(kGuard);
    cudaMemcpy(guard.data(), static_cast<std::byte*>(data_) + bytes_, kGuard,
               cudaMemcpyDeviceToHost);
    for (unsigned char c : guard) {
      if (c != 0xA5) {
        ADD_FAILURE() << "a kernel wrote behind its workspace";
        break;
      }
    }
    cudaFree(data_);
  }
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;
  Workspace workspace() const { return {data_, bytes_}; }

 private:
  static constexpr std::size_t kGuard = 4096;
  void* data_ = nullptr;
  std::size_t bytes_;
};

// Launches in a captured graph, replayed twice: what an op leaves in its scratch must not matter.
template <class Args>
void run_on_device(void (*launcher)(cudaStream_t, const Args&), const Args& args) {
  cudaStream_t stream;
  FN_CUDA(cudaStreamCreate(&stream));
  FN_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launcher(stream, args);
  cudaGraph_t graph;
  FN_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t exec;
  FN_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 2; ++i) FN_CUDA(cudaGraphLaunch(exec, stream));
  FN_CUDA(cudaStreamSynchronize(stream));
  FN_CUDA(cudaGraphExecDestroy(exec));
  FN_CUDA(cudaGraphDestroy(graph));
  FN_CUDA(cudaStreamDestroy(stream));
}

// y of every linear for `rows` of at most `max` rows, on the device, held against the host. Rows
// past the count must stay as they were. Returns the device's results.
inline std::vector<std::vector<float>> check_linear(const std::vector<const Weight*>& weights,
                                                    const std::vector<float>& x, std::int32_t rows,
                                                    std::int32_t max, std::int32_t levels,
                                                    const char* what) {
  const std::size_t all = static_cast<std::size_t>(max);
  Twin<std::int32_t> count(1);
  count.host[0] = rows;
  count.upload();
  Twin<float> input(all * static_cast<std::size_t>(weights[0]->in));
  std::copy_n(x.begin(), static_cast<std::size_t>(rows * weights[0]->in), input.host.begin());
  input.upload();
  std::vector<Twin<float>> y;
  Exl3LinearArgs on_host{};
  on_host.rows = {count.host.data(), 1, max};
  on_host.x = input.host.data();
  on_host.n = static_cast<std::int32_t>(weights.size());
  on_host.levels = levels;
  Exl3LinearArgs on_device = on_host;
  on_device.rows.count = count.device();
  on_device.x = input.device();
  for (std::size_t i = 0; i < weights.size(); ++i) {
    y.emplace_back(all * static_cast<std::size_t>(weights[i]->out));
    poison(y[i].host);
    y[i].upload();
    on_host.w[i] = weights[i]->host();
    on_device.w[i] = weights[i]->device();
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    on_host.y[i] = y[i].host.data();
    on_device.y[i] = y[i].device();
  }
  HostSide& side = host_side();
  std::vector<std::byte> scratch(host::workspace_bytes(on_host, side.pool.threads()) + 64);
  on_host.workspace = {scratch.data(), scratch.size()};
  host::exl3_linear(on_host, side.context);
  const DeviceScratch device_scratch(cuda::workspace_bytes(on_device));
  on_device.workspace = device_scratch.workspace();
  run_on_device(cuda::exl3_linear, on_device);
  std::vector<std::vector<float>> results;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    results.push_back(y[i].download());
    expect_same_bits(results.back(), y[i].host, weights[i]->out, what);
  }
  return results;
}

}  // namespace flashnext::exl3_case
