// Times of the ops of experts in host memory at the model's size, by replays of captured graphs:
// resolve (all held, all absent, half on the processor), fetch of 1 to 10 lines, post and join with
// a thread that answers at once, and pinning. Prints JSON.
#include "cpp/device/cuda_device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace flashnext {
namespace {

constexpr std::int32_t kExperts = 512, kSlots = 10, kDim = 2560, kSteps = 40;
constexpr std::int64_t kLine = 1862400;

std::size_t z(std::int64_t n) { return static_cast<std::size_t>(n); }

class Bench {
 public:
  Bench() : device_(make_cuda_device(0, {})), stream_(*device_) {}

  template <class T>
  T* room(std::size_t n, Space space = Space::kDevice) {
    blocks_.emplace_back(*device_, space, n * sizeof(T), "bench");
    return blocks_.back().template as<T>();
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    T* at = room<T>(values.size());
    device_->copy_async(stream_.id(), at, values.data(), values.size() * sizeof(T));
    device_->synchronize(stream_.id());
    return at;
  }
  // Best microseconds of a replay; `prepare` before each.
  double time(
      const std::function<void(Device&, StreamId)>& enqueue,
      const std::function<void()>& prepare = [] {}) {
    Capture capture(*device_, stream_.id());
    enqueue(*device_, stream_.id());
    const Graph graph = capture.finish();
    double best = 1e30;
    for (int i = 0; i < 20; ++i) {
      prepare();
      device_->synchronize(stream_.id());
      const auto start = std::chrono::steady_clock::now();
      graph.replay(stream_.id());
      device_->synchronize(stream_.id());
      const std::chrono::duration<double, std::micro> spent =
          std::chrono::steady_clock::now() - start;
      best = std::min(best, spent.count());
    }
    return best;
  }
  // The same of one op: many against few of them in a graph, so that the launch drops out.
  double time_of_one(
      const std::function<void(Device&, StreamId, std::int32_t)>& enqueue,
      const std::function<void()>& prepare = [] {}) {
    const auto steps = [&](std::int32_t n) {
      return time(
          [&](Device& d, StreamId s) {
            for (std::int32_t i = 0; i < n; ++i) enqueue(d, s, i);
          },
          prepare);
    };
    return (steps(kSteps) - steps(kSteps / 4)) / (kSteps - kSteps / 4);
  }

  // A layer with `lines` lines; every step asks for `rows` rows of held or of absent experts. Where
  // these are shared the processor takes half of them.
  enum class Ask { kHeld, kAbsent, kShared };
  void resolve(std::int32_t rows, std::int32_t lines, Ask ask) {
    const bool held = ask == Ask::kHeld;
    const std::int32_t pairs = rows * kSlots;
    std::vector<std::int32_t> line_of(z(kExperts), -1), expert_of, ids;
    for (std::int32_t l = 0; l < lines; ++l) {
      line_of[z(l)] = l;
      expert_of.push_back(l);
    }
    std::vector<StepHead> heads;
    for (std::int32_t i = 0; i < kSteps; ++i) {
      heads.push_back({rows, 0, 0, i + 1});
      // Absent ones come back only when they have been given up again.
      for (std::int32_t p = 0; p < pairs; ++p) {
        ids.push_back(held ? p % lines : (lines + i * pairs + p) % kExperts);
      }
    }
    const StepHead* heads_there = put(heads);
    const std::int32_t* ids_there = put(ids);
    std::vector<std::int32_t> cpu_of;
    for (std::int32_t m = 0; m <= pairs; ++m) cpu_of.push_back(m / 2);
    ResolveArgs a{};
    a.tables = {put(line_of),
                put(expert_of),
                put(std::vector<std::int32_t>(z(lines), 0)),
                put(std::vector<std::int32_t>(z(kExperts), 0)),
                put(std::vector<std::int32_t>(z(kExperts), kUnordered)),
                put(std::vector<std::int32_t>{1}),
                ask == Ask::kShared ? put(cpu_of) : nullptr,
                nullptr,
                kExperts,
                lines};
    a.layout = {
        {0, 614400, 1228800}, {1843200, 1848320, 1853440}, {1858560, 1859840, 1861120}, kLine};
    a.experts = room<ExpertRef>(z(kExperts));
    a.group = room<std::int32_t>(z(kExperts));
    a.fetches = room<Fetch>(z(pairs));
    a.num_fetches = room<std::int32_t>(1);
    a.cpu = room<std::int32_t>(z(pairs));
    a.num_cpu = room<std::int32_t>(1);
    a.counters = room<CacheCounters>(1);
    a.slots = kSlots;
    const char* asks[] = {"_held", "_absent", "_shared"};
    const std::string name = "resolve_" + std::to_string(rows) + "_rows_" + std::to_string(lines) +
                             asks[static_cast<int>(ask)];
    report(name, time_of_one([&](Device& d, StreamId s, std::int32_t i) {
             a.head = heads_there + i;
             a.rows = {&a.head->rows, 1, rows};
             a.ids = ids_there + i * pairs;
             launch(d, s, a);
           }));
  }

  void fetch() {
    constexpr std::int32_t kHere = 64;
    const auto start = std::chrono::steady_clock::now();
    const auto* bank = room<std::byte>(z(kHere * kLine), Space::kPinned);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    std::printf("  \"pinning_gb_s\": %.2f,\n", 1e-9 * double(kHere * kLine) / spent.count());
    auto* lines = room<std::byte>(z(10 * kLine));
    std::vector<Fetch> list;
    for (std::int32_t i = 0; i < 10; ++i) list.push_back({lines + i * kLine, 7 * i % kHere, 0});
    FetchArgs a{put(list), nullptr, bank, room<CacheCounters>(1), kLine, 0, kSlots};
    for (const std::int32_t n : {0, 1, 2, 3, 5, 10}) {
      a.count = put(std::vector<std::int32_t>{n});
      const double us = time_of_one([&](Device& d, StreamId s, std::int32_t) { launch(d, s, a); });
      report("fetch_" + std::to_string(n), us);
      if (n > 0) {
        std::printf("  \"fetch_%d_gb_s\": %.2f,\n", n, 1e-3 * double(n * kLine) / us);
      }
    }
  }

  void mail(std::int32_t rows, std::int32_t experts) {
    const std::int32_t pairs = rows * kSlots;
    auto* head = room<MailboxHead>(1, Space::kPinned);
    std::memset(static_cast<void*>(head), 0, sizeof *head);
    const MailView mail{head, room<MailJob>(z(pairs), Space::kPinned),
                        room<float>(z(rows * kDim), Space::kPinned),
                        room<float>(z(pairs * kDim), Space::kPinned)};
    std::vector<std::int32_t> ids, cpu;
    for (std::int32_t p = 0; p < pairs; ++p) ids.push_back(p);
    cpu.assign(ids.begin(), ids.begin() + experts);
    cpu.resize(z(pairs), -1);
    const StepHead* step = put(std::vector<StepHead>{{rows, 0, 0, 1}});
    const CpuPostArgs post{{&step->rows, 1, rows},
                           put(std::vector<float>(z(rows * kDim), 1.0f)),
                           put(ids),
                           put(cpu),
                           put(std::vector<std::int32_t>{experts}),
                           put(std::vector<MailSequence>(1)),
                           mail,
                           0,
                           kSlots,
                           kDim};
    const CpuJoinArgs join{
        post.num_cpu,           post.sequence, mail, room<float>(z(pairs * kDim)),
        room<CacheCounters>(1), 2'000'000'000, 0,    kDim};
    std::atomic<bool> stop{false};
    std::thread answers([&] {
      const std::atomic_ref<std::uint32_t> posted(head->posted), done(head->done);
      while (!stop) done.store(posted.load(std::memory_order_acquire), std::memory_order_release);
    });
    report("post_join_" + std::to_string(rows) + "_rows_" + std::to_string(experts) + "_experts",
           time_of_one([&](Device& d, StreamId s, std::int32_t) {
             launch(d, s, post);
             launch(d, s, join);
           }));
    stop = true;
    answers.join();
    if (head->stalled != 0) std::printf("  \"stalled\": true,\n");
  }

 private:
  static void report(const std::string& name, double us) {
    std::printf("  \"%s_us\": %.2f,\n", name.c_str(), us);
  }
  std::unique_ptr<Device> device_;
  std::vector<Block> blocks_;
  Stream stream_;
};

int run() {
  if (cuda_device_count() == 0) {
    std::fprintf(stderr, "no CUDA device on this machine\n");
    return 1;
  }
  Bench bench;
  std::printf("{\n");
  for (const std::int32_t rows : {1, 4, 8}) {
    for (const std::int32_t lines : {115, 400}) {
      for (const auto ask : {Bench::Ask::kHeld, Bench::Ask::kAbsent, Bench::Ask::kShared}) {
        bench.resolve(rows, lines, ask);
      }
    }
  }
  bench.fetch();
  bench.mail(1, 0);
  bench.mail(1, 1);
  bench.mail(1, 3);
  bench.mail(8, 40);
  std::printf("  \"unit\": \"us\"\n}\n");
  return 0;
}

}  // namespace
}  // namespace flashnext

int main() {
  try {
    return flashnext::run();
  } catch (const flashnext::Error& error) {
    std::fprintf(stderr, "offload_gpu_bench: %s\n", error.what());
    return 1;
  }
}
