// Times of the EXL3 linears and the experts on the GPU at the real model's sizes: CUDA events over
// replays of a graph whose ops rotate through more weights than the cache holds. Prints a table,
// and JSON to the file named by the first argument.
#include "cpp/base/half.h"
#include "cuda/check.h"
#include "cuda/kernels.h"

#include <algorithm>
#include <cstdio>
#include <cuda_runtime_api.h>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace flashnext {
namespace {

constexpr double kInt8Peak = 1245e12;  // mma.sync on an H200, measured apart
constexpr std::size_t kPoolBytes = std::size_t{1536} << 20;

struct Result {
  std::string name;
  double us = 0;
  double bytes = 0;  // of packed weights
  double macs = 0;   // weights times rows
};

class Bench {
 public:
  Bench() {
    FN_CUDA(cudaStreamCreate(&stream_));
    std::vector<std::uint32_t> noise(std::size_t{1} << 24);
    for (std::uint32_t& v : noise) v = random_();
    pool_ = allocate(kPoolBytes);
    const std::size_t piece = noise.size() * 4;
    for (std::size_t at = 0; at < kPoolBytes; at += piece) {
      FN_CUDA(cudaMemcpy(pool_ + at, noise.data(), std::min(piece, kPoolBytes - at),
                         cudaMemcpyHostToDevice));
    }
    std::vector<std::uint16_t> scales(std::size_t{1} << 18);
    std::uniform_real_distribution<float> spread(-2.0f, 2.0f);
    for (std::uint16_t& s : scales) s = f32_to_f16(spread(random_));
    scales_ = upload(scales);
  }

  template <class T>
  T* upload(const std::vector<T>& v) {
    void* to = allocate(v.size() * sizeof(T));
    FN_CUDA(cudaMemcpy(to, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T*>(to);
  }
  std::byte* allocate(std::size_t bytes) {
    void* to = nullptr;
    FN_CUDA(cudaMalloc(&to, bytes));
    return static_cast<std::byte*>(to);
  }
  float* normal(std::size_t n) {
    std::vector<float> v(n);
    std::normal_distribution<float> normal;
    for (float& f : v) f = normal(random_);
    return upload(v);
  }

  // The next `bytes` of the pool.
  const std::byte* take(std::size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (at_ + bytes > kPoolBytes) at_ = 0;
    at_ += bytes;
    return pool_ + at_ - bytes;
  }
  Exl3Weight weight(std::int32_t in, std::int32_t out, std::int32_t rate) {
    return {take(trellis_bytes(in, out, rate)), scale(), scale(), nullptr, in, out, 16 * rate, 0};
  }
  static std::size_t trellis_bytes(std::int32_t in, std::int32_t out, std::int32_t rate) {
    return static_cast<std::size_t>(in) * static_cast<std::size_t>(out) *
           static_cast<std::size_t>(rate) / 8;
  }
  const std::byte* scale() const { return reinterpret_cast<const std::byte*>(scales_); }
  std::mt19937& random() { return random_; }

  bool eager = false;  // for a profiler: once, without a graph or a time

  // Seconds of one replay of what `body` enqueues; the best of `repeats`.
  double seconds(const std::function<void(cudaStream_t)>& body, int repeats) {
    if (eager) {
      body(stream_);
      FN_CUDA(cudaStreamSynchronize(stream_));
      return 1.0;
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    FN_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    body(stream_);
    FN_CUDA(cudaStreamEndCapture(stream_, &graph));
    FN_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin;
    cudaEvent_t end;
    FN_CUDA(cudaEventCreate(&begin));
    FN_CUDA(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < repeats + 1; ++i) {
      FN_CUDA(cudaEventRecord(begin, stream_));
      FN_CUDA(cudaGraphLaunch(exec, stream_));
      FN_CUDA(cudaEventRecord(end, stream_));
      FN_CUDA(cudaEventSynchronize(end));
      float ms = 0;
      FN_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i > 0) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    FN_CUDA(cudaEventDestroy(begin));
    FN_CUDA(cudaEventDestroy(end));
    FN_CUDA(cudaGraphExecDestroy(exec));
    FN_CUDA(cudaGraphDestroy(graph));
    return times[times.size() / 2] * 1e-3;
  }

  // Bytes read and written a second by a large copy.
  double copy_rate() {
    const std::size_t half = kPoolBytes / 2;
    std::byte* to = allocate(half);
    const double s = seconds(
        [&](cudaStream_t stream) {
          FN_CUDA(cudaMemcpyAsync(to, pool_, half, cudaMemcpyDeviceToDevice, stream));
        },
        5);
    return 2.0 * static_cast<double>(half) / s;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::byte* pool_ = nullptr;
  std::uint16_t* scales_ = nullptr;
  std::size_t at_ = 0;
  std::mt19937 random_{1};
};

struct Shape {
  std::int32_t out;
  std::int32_t rate;
};

// Ops of one bucket of rows. Buffers are shared by all ops of the bucket.
class Bucket {
 public:
  Bucket(Bench& bench, std::int32_t rows) : bench_(bench), rows_(rows) {
    count_ = bench.upload(std::vector<std::int32_t>{rows});
    const std::size_t n = static_cast<std::size_t>(rows);
    x_ = bench.normal(n * 6144);
    for (float*& y : y_) y = reinterpret_cast<float*>(bench.allocate(n * 12288 * 4));
    expert_y_ = reinterpret_cast<float*>(bench.allocate(n * 10 * 2560 * 4));
    scratch_bytes_ = 1 << 20;
    ExpertsArgs probe = experts(10);
    scratch_bytes_ = std::max(scratch_bytes_, cuda::workspace_bytes(probe));
    for (std::int32_t in : {2560, 6144}) {
      Exl3LinearArgs l = linear(in, {{12288, 5}, {512, 5}, {512, 5}, {640, 3}});
      scratch_bytes_ = std::max(scratch_bytes_, cuda::workspace_bytes(l));
    }
    scratch_ = bench.allocate(scratch_bytes_);
  }

  Exl3LinearArgs linear(std::int32_t in, const std::vector<Shape>& shapes) {
    Exl3LinearArgs a{};
    a.rows = {count_, 1, rows_};
    a.x = x_;
    for (const Shape& s : shapes) {
      a.w[a.n] = bench_.weight(in, s.out, s.rate);
      a.y[a.n] = y_[a.n];
      ++a.n;
    }
    a.levels = levels;
    a.workspace = {scratch_, scratch_bytes_};
    return a;
  }

  // slots = 1: the shared expert (K = 5, no ids). Else ten of 512 a row (K = 3).
  ExpertsArgs experts(std::int32_t slots) {
    const bool is_shared = slots == 1;
    const std::int32_t num = is_shared ? 1 : 512;
    const std::int32_t rate = is_shared ? 5 : 3;
    std::vector<ExpertRef> refs;
    for (std::int32_t e = 0; e < num; ++e) {
      ExpertRef r{};
      for (int i = 0; i < 3; ++i) {
        r.trellis[i] = bench_.take(Bench::trellis_bytes(2560, 640, rate));
        r.suh[i] = bench_.scale();
        r.svh[i] = bench_.scale();
      }
      refs.push_back(r);
    }
    std::vector<std::int32_t> ids;
    std::vector<std::int32_t> all(static_cast<std::size_t>(num));
    std::iota(all.begin(), all.end(), 0);
    for (std::int32_t r = 0; r < rows_; ++r) {
      for (std::int32_t s = 0; s < slots; ++s) {
        std::swap(all[static_cast<std::size_t>(s)],
                  all[static_cast<std::size_t>(s) +
                      bench_.random()() % (all.size() - static_cast<std::size_t>(s))]);
        ids.push_back(all[static_cast<std::size_t>(s)]);
      }
    }
    ExpertsArgs a{};
    a.rows = {count_, 1, rows_};
    a.x = x_;
    a.ids = is_shared ? nullptr : bench_.upload(ids);
    a.experts = bench_.upload(refs);
    a.y = expert_y_;
    a.num_experts = num;
    a.slots = slots;
    a.dim = 2560;
    a.inner = 640;
    for (std::int32_t& w : a.words) w = 16 * rate;
    a.levels = levels;
    a.workspace = {scratch_, scratch_bytes_};
    return a;
  }

  Result time_linear(const std::string& name, std::int32_t in, const std::vector<Shape>& shapes,
                     int copies, int repeats) {
    Result r{name, 0, 0, 0};
    for (const Shape& s : shapes) {
      r.bytes += static_cast<double>(Bench::trellis_bytes(in, s.out, s.rate));
      r.macs += static_cast<double>(in) * s.out * rows_;
    }
    std::vector<Exl3LinearArgs> all;
    for (int i = 0; i < copies; ++i) all.push_back(linear(in, shapes));
    r.us = 1e6 / copies *
           bench_.seconds(
               [&](cudaStream_t stream) {
                 for (const auto& a : all) cuda::exl3_linear(stream, a);
               },
               repeats);
    return r;
  }

  Result time_experts(const std::string& name, std::int32_t slots, int copies, int repeats) {
    const double weights = 3.0 * 2560 * 640;
    const double touched = slots == 1 ? 1.0 : std::min(512.0, static_cast<double>(rows_ * slots));
    Result r{name, 0, touched * weights * (slots == 1 ? 5 : 3) / 8, weights * rows_ * slots};
    std::vector<ExpertsArgs> all;
    for (int i = 0; i < copies; ++i) all.push_back(experts(slots));
    r.us = 1e6 / copies *
           bench_.seconds(
               [&](cudaStream_t stream) {
                 for (const auto& a : all) cuda::experts(stream, a);
               },
               repeats);
    return r;
  }

  // The EXL3 work of one token step through 12 layers (nine DeltaNet, three attention), no head.
  Result time_slice(const std::string& name, int repeats) {
    std::vector<Exl3LinearArgs> in;
    std::vector<Exl3LinearArgs> out;
    std::vector<ExpertsArgs> moe;
    std::vector<ExpertsArgs> shared;
    Result r{name, 0, 0, 0};
    for (int layer = 0; layer < 12; ++layer) {
      if (layer % 4 == 3) {
        in.push_back(linear(2560, {{12288, 5}, {512, 5}, {512, 5}, {640, 3}}));
      } else {
        in.push_back(linear(2560, {{10240, 5}, {6144, 5}}));
      }
      out.push_back(linear(6144, {{2560, 5}}));
      moe.push_back(experts(10));
      shared.push_back(experts(1));
      for (const auto& a : {in.back(), out.back()}) {
        for (int i = 0; i < a.n; ++i) {
          r.bytes +=
              static_cast<double>(Bench::trellis_bytes(a.w[i].in, a.w[i].out, a.w[i].words / 16));
          r.macs += static_cast<double>(a.w[i].in) * a.w[i].out * rows_;
        }
      }
      r.bytes += 3.0 * 2560 * 640 * (5 + 3 * std::min(512.0, 10.0 * rows_)) / 8;
      r.macs += 3.0 * 2560 * 640 * 11 * rows_;
    }
    r.us = 1e6 * bench_.seconds(
                     [&](cudaStream_t stream) {
                       for (std::size_t i = 0; i < in.size(); ++i) {
                         cuda::exl3_linear(stream, in[i]);
                         cuda::exl3_linear(stream, out[i]);
                         cuda::experts(stream, moe[i]);
                         cuda::experts(stream, shared[i]);
                       }
                     },
                     repeats);
    return r;
  }

  std::int32_t levels = 32258;

 private:
  Bench& bench_;
  std::int32_t rows_;
  std::int32_t* count_;
  float* x_;
  float* y_[kMaxLinears];
  float* expert_y_;
  std::byte* scratch_ = nullptr;
  std::size_t scratch_bytes_;
};

int run(const char* path, bool quick) {
  Bench bench;
  bench.eager = quick;
  const double copy = bench.copy_rate();
  std::printf("copy %.0f GB/s (read and written)\n", copy * 1e-9);
  std::printf("%-34s %10s %9s %7s %9s %7s\n", "op", "us", "GB/s", "of copy", "TOPS", "of peak");
  std::vector<Result> results;
  const auto report = [&](Result r, int products) {
    const double rate = r.bytes / r.us * 1e6;
    const double tops = 2 * products * r.macs / r.us * 1e6;
    std::printf("%-34s %10.2f %9.0f %6.1f%% %9.0f %6.1f%%\n", r.name.c_str(), r.us, rate * 1e-9,
                100 * rate / copy, tops * 1e-12, 100 * tops / kInt8Peak);
    std::fflush(stdout);
    results.push_back(std::move(r));
  };
  const int copies = quick ? 1 : 24;
  const int repeats = quick ? 1 : 15;
  for (std::int32_t rows : {1, 4, 8}) {
    if (quick && rows != 1) continue;
    Bucket b(bench, rows);
    const std::string at = " x" + std::to_string(rows);
    report(
        b.time_linear("K5 2560->10240+6144" + at, 2560, {{10240, 5}, {6144, 5}}, copies, repeats),
        4);
    report(b.time_linear("K5 2560->10240" + at, 2560, {{10240, 5}}, copies, repeats), 4);
    report(b.time_linear("K5 6144->2560" + at, 6144, {{2560, 5}}, copies, repeats), 4);
    report(b.time_linear("q k v index" + at, 2560, {{12288, 5}, {512, 5}, {512, 5}, {640, 3}},
                         copies, repeats),
           4);
    report(b.time_experts("10 experts" + at, 10, copies, repeats), 4);
    report(b.time_experts("shared expert" + at, 1, copies, repeats), 4);
    report(b.time_slice("12 layers" + at, repeats), 4);
  }
  {
    Bench& big = bench;
    const std::int32_t vocab = 248320;
    std::int32_t* count = big.upload(std::vector<std::int32_t>{1});
    Exl3LinearArgs a{};
    a.rows = {count, 1, 1};
    a.x = big.normal(2560);
    a.w[0] = big.weight(2560, vocab, 5);
    a.y[0] = reinterpret_cast<float*>(big.allocate(static_cast<std::size_t>(vocab) * 4));
    a.n = 1;
    a.levels = 32258;
    const std::size_t bytes = cuda::workspace_bytes(a);
    a.workspace = {big.allocate(bytes), bytes};
    const double s =
        big.seconds([&](cudaStream_t stream) { cuda::exl3_linear(stream, a); }, repeats);
    report({"head K5 2560->248320 x1", s * 1e6, 2560.0 * vocab * 5 / 8, 2560.0 * vocab}, 4);
  }
  for (std::int32_t rows : {64, 512, 8192}) {
    if (quick && rows != 8192) continue;
    Bucket b(bench, rows);
    const std::string at = " x" + std::to_string(rows);
    const int n = rows == 8192 ? 1 : 4;
    const int times = quick ? 1 : 3;
    report(b.time_linear("K5 2560->10240+6144" + at, 2560, {{10240, 5}, {6144, 5}}, n, times), 4);
    report(b.time_linear("K5 6144->2560" + at, 6144, {{2560, 5}}, n, times), 4);
    report(b.time_linear("q k v index" + at, 2560, {{12288, 5}, {512, 5}, {512, 5}, {640, 3}}, n,
                         times),
           4);
    report(b.time_experts("10 experts" + at, 10, n, times), 4);
    report(b.time_experts("shared expert" + at, 1, n, times), 4);
    if (quick) continue;
    report(b.time_slice("12 layers" + at, times), 4);
    if (rows == 8192) {
      b.levels = 127;
      report(b.time_slice("12 layers, one digit" + at, times), 2);
    }
  }
  if (path != nullptr) {
    std::FILE* f = std::fopen(path, "w");
    if (f == nullptr) return 1;
    std::fprintf(f, "{\"copy_bytes_per_s\": %.6g, \"int8_peak\": %.6g, \"results\": [", copy,
                 kInt8Peak);
    for (std::size_t i = 0; i < results.size(); ++i) {
      const Result& r = results[i];
      std::fprintf(f,
                   "%s\n  {\"name\": \"%s\", \"us\": %.3f, \"weight_bytes\": %.0f, \"macs\": %.6g}",
                   i == 0 ? "" : ",", r.name.c_str(), r.us, r.bytes, r.macs);
    }
    std::fprintf(f, "\n]}\n");
    std::fclose(f);
  }
  return 0;
}

}  // namespace
}  // namespace flashnext

// exl3_gpu_bench [FILE.json | --quick]: --quick runs every op once, for a profiler.
int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  return flashnext::run(argc > 1 && !quick ? argv[1] : nullptr, quick);
}
