// Time of the ops around the experts on one device, by replays of a graph that holds many launches
// over rotating weights (more of them than a cache holds). One line of JSON a measurement.
//
//   device_ops_bench [cuda|host]
#include "cpp/device/cuda_device.h"
#include "cpp/device/host_device.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace flashnext;

namespace {

constexpr std::int32_t kDim = 2560, kStreams = 4, kRank = 320, kExperts = 512, kSlots = 10;
constexpr std::int32_t kStack = kDim * kStreams;
constexpr int kSets = 10;

class Bench {
 public:
  explicit Bench(Device& device) : device_(device), stream_(device) {}

  void* block(std::size_t bytes) {
    blocks_.emplace_back(device_, Space::kDevice, bytes, "bench");
    return blocks_.back().data();
  }
  // Random values of a normal distribution, in fp16 or fp32.
  template <class T>
  T* random(std::size_t n, float scale) {
    constexpr std::size_t kPeriod = 1 << 20;
    if (staging_.data() == nullptr) {
      staging_ = Block(device_, Space::kPinned, kPeriod * sizeof(float), "staging");
    }
    std::normal_distribution<float> normal(0.0f, scale);
    T* staging = staging_.as<T>();
    for (std::size_t i = 0; i < std::min(n, kPeriod); ++i) {
      const float v = normal(engine_);
      if constexpr (sizeof(T) == 4) {
        staging[i] = v;
      } else {
        staging[i] = f16(v);
      }
    }
    T* to = static_cast<T*>(block(n * sizeof(T)));
    for (std::size_t i = 0; i < n; i += kPeriod) {
      device_.copy_async(stream_.id(), to + i, staging, std::min(kPeriod, n - i) * sizeof(T));
    }
    device_.synchronize(stream_.id());
    return to;
  }
  template <class Args>
  Workspace workspace(const Args& args) {
    const std::size_t bytes = device_.workspace_bytes(Args::kOp, &args);
    return {bytes > 0 ? block(bytes) : nullptr, bytes};
  }
  const std::int32_t* count(std::int32_t rows) {
    auto* at = static_cast<std::int32_t*>(block(sizeof(StepHead)));
    Block staging(device_, Space::kPinned, sizeof(StepHead), "staging");
    *staging.as<StepHead>() = {rows, 1, rows, 0};
    device_.copy_async(stream_.id(), at, staging.data(), sizeof(StepHead));
    device_.synchronize(stream_.id());
    return at;
  }
  // body(set) launches once with weights `set`.
  void measure(const std::string& name, std::int32_t rows, double bytes,
               const std::function<void(int)>& body) {
    const int launches = rows > 100 ? kSets : 10 * kSets;
    Capture capture(device_, stream_.id());
    for (int i = 0; i < launches; ++i) body(i % kSets);
    const Graph graph = capture.finish();
    std::vector<double> us;
    for (int i = 0; i < 12; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      graph.replay(stream_.id());
      device_.synchronize(stream_.id());
      const std::chrono::duration<double, std::micro> t = std::chrono::steady_clock::now() - begin;
      if (i >= 2) us.push_back(t.count() / launches);
    }
    std::sort(us.begin(), us.end());
    const double median = us[us.size() / 2];
    std::printf(
        "{\"op\": \"%s\", \"rows\": %d, \"us\": %.2f, \"min_us\": %.2f, \"gb_per_s\": %.0f}\n",
        name.c_str(), rows, median, us[0], bytes / median * 1e-3);
    std::fflush(stdout);
  }
  StreamId stream() const { return stream_.id(); }
  void drop() { blocks_.clear(); }

 private:
  static std::uint16_t f16(float v) {
    std::uint32_t bits;
    std::memcpy(&bits, &v, 4);
    if ((bits & 0x7FFFFFFFu) < 0x38800000u) return 0;
    return static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) |
                                      (((bits & 0x7FFFFFFFu) - 0x38000000u) >> 13));
  }
  Device& device_;
  Stream stream_;
  Block staging_;
  std::vector<Block> blocks_;
  std::mt19937 engine_{1};
};

void mix(Device& device, Bench& bench, std::int32_t rows) {
  std::vector<MixArgs> sets(kSets);
  for (MixArgs& a : sets) {
    a = {};
    a.rows = {bench.count(rows), 1, rows};
    a.streams = bench.random<float>(std::size_t(rows) * kStack, 1.0f);
    a.pending_inj = bench.random<float>(std::size_t(rows) * kStreams, 0.01f);
    a.pending_y = bench.random<float>(std::size_t(rows) * kDim, 0.01f);
    a.w.norm = bench.random<float>(kStack, 1.0f);
    a.w.down = bench.random<std::uint16_t>(std::size_t(kRank) * kStack, 0.02f);
    a.w.up = bench.random<std::uint16_t>(std::size_t(kRank) * kStack, 0.05f);
    a.w.inject = bench.random<std::uint16_t>(std::size_t(kStreams) * kStack, 0.02f);
    a.x = bench.random<float>(std::size_t(rows) * kDim, 1.0f);
    a.inj = bench.random<float>(std::size_t(rows) * kStreams, 1.0f);
    a.eps = 1e-6f;
    a.num_streams = kStreams;
    a.dim = kDim;
    a.rank = kRank;
    a.workspace = &a == &sets[0] ? bench.workspace(a) : sets[0].workspace;
  }
  bench.measure("mix", rows, 2.0 * kStack * (2 * kRank + kStreams),
                [&](int i) { launch(device, bench.stream(), sets[std::size_t(i)]); });
  bench.drop();
}

void dense(Device& device, Bench& bench, const std::string& name, std::vector<std::int32_t> outs,
           std::int32_t rows) {
  std::vector<DenseArgs> sets(kSets);
  double bytes = 0;
  for (DenseArgs& a : sets) {
    a = {};
    a.rows = {bench.count(rows), 1, rows};
    a.x = bench.random<float>(std::size_t(rows) * kDim, 1.0f);
    a.n = static_cast<std::int32_t>(outs.size());
    bytes = 0;
    for (std::size_t i = 0; i < outs.size(); ++i) {
      a.w[i] = {bench.random<std::uint16_t>(std::size_t(outs[i]) * kDim, 0.05f), kDim, outs[i]};
      a.y[i] = bench.random<float>(std::size_t(rows) * std::size_t(outs[i]), 1.0f);
      bytes += 2.0 * outs[i] * kDim;
    }
    a.workspace = bench.workspace(a);
  }
  bench.measure("dense " + name, rows, bytes,
                [&](int i) { launch(device, bench.stream(), sets[std::size_t(i)]); });
  bench.drop();
}

void experts_around(Device& device, Bench& bench, std::int32_t rows) {
  const RowCount count{bench.count(rows), 1, rows};
  auto* ticket = static_cast<std::int32_t*>(bench.block(sizeof(std::int32_t)));
  device.zero_async(bench.stream(), ticket, sizeof(std::int32_t));
  std::vector<RouteArgs> routes(kSets);
  for (RouteArgs& a : routes) {
    a = {};
    a.rows = count;
    a.x = bench.random<float>(std::size_t(rows) * kDim, 1.0f);
    a.router = {bench.random<std::uint16_t>(std::size_t(kExperts) * kDim, 0.05f), kDim, kExperts};
    a.shared_gate = {bench.random<std::uint16_t>(kDim, 0.05f), kDim, 1};
    a.ids = bench.random<std::int32_t>(std::size_t(rows) * kSlots, 1.0f);
    a.weights = bench.random<float>(std::size_t(rows) * kSlots, 1.0f);
    a.gate = bench.random<float>(std::size_t(rows), 1.0f);
    a.top_k = kSlots;
    a.normalise = 1;
    a.ticket = ticket;
    a.workspace = bench.workspace(a);
  }
  bench.measure("route", rows, 2.0 * (kExperts + 1) * kDim,
                [&](int i) { launch(device, bench.stream(), routes[std::size_t(i)]); });
  CombineArgs combine{count,
                      bench.random<float>(std::size_t(rows) * kSlots * kDim, 1.0f),
                      bench.random<float>(std::size_t(rows) * kSlots, 1.0f),
                      bench.random<float>(std::size_t(rows) * kDim, 1.0f),
                      bench.random<float>(std::size_t(rows), 1.0f),
                      bench.random<float>(std::size_t(rows) * kDim, 1.0f),
                      kSlots,
                      kDim};
  bench.measure("combine", rows, 4.0 * (kSlots + 2) * kDim * rows,
                [&](int) { launch(device, bench.stream(), combine); });
  bench.drop();
}

void sample(Device& device, Bench& bench, const std::string& name, SampleParams params,
            std::int32_t rows) {
  constexpr std::int32_t kVocab = 248320;
  SampleArgs a{};
  a.step.head = reinterpret_cast<const StepHead*>(bench.count(rows));
  a.step.max_outputs = rows;
  Block staging(device, Space::kPinned, sizeof(SampleParams) * std::size_t(rows), "staging");
  for (std::int32_t r = 0; r < rows; ++r) staging.as<SampleParams>()[r] = params;
  auto* at = static_cast<SampleParams*>(bench.block(staging.bytes()));
  device.copy_async(bench.stream(), at, staging.data(), staging.bytes());
  device.synchronize(bench.stream());
  a.step.sampling = at;
  a.logits = bench.random<float>(std::size_t(rows) * kVocab, 3.0f);
  a.tokens = static_cast<std::int32_t*>(bench.block(4 * std::size_t(rows)));
  a.vocab = kVocab;
  a.limit = kVocab - 100;
  a.workspace = bench.workspace(a);
  bench.measure("sample " + name, rows, 4.0 * kVocab * rows,
                [&](int) { launch(device, bench.stream(), a); });
  bench.drop();
}

}  // namespace

int main(int argc, char** argv) {
  const bool host = argc > 1 && std::strcmp(argv[1], "host") == 0;
  if (!host && cuda_device_count() == 0) {
    std::printf("{\"skipped\": \"no CUDA device\"}\n");
    return 0;
  }
  const std::unique_ptr<Device> device = host ? make_host_device({}) : make_cuda_device(0, {});
  Bench bench(*device);
  for (std::int32_t rows : {1, 2, 4, 8, 16, 64, 512, 2048}) mix(*device, bench, rows);
  for (std::int32_t rows : {1, 8, 64, 2048}) {
    dense(*device, bench, "router", {kExperts, 1}, rows);
    dense(*device, bench, "a b", {48, 48}, rows);
    dense(*device, bench, "ple", {kStack, kDim}, rows);
    experts_around(*device, bench, rows);
  }
  for (std::int32_t rows : {1, 8}) {
    sample(*device, bench, "argmax", {1, 0.0f, 1.0f, 0.0f, 0, 7, 0}, rows);
    sample(*device, bench, "temperature", {1, 1.0f, 1.0f, 0.0f, 0, 7, 0}, rows);
    sample(*device, bench, "top_k top_p", {1, 0.8f, 0.95f, 0.0f, 50, 7, 0}, rows);
  }
  return 0;
}
