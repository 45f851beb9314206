// Latency of experts computed by the processor, as JSON: for 1 to 10 experts of the real size (2560
// and 640 wide, K = 3) and each number of threads, the time from a posting in the mailbox to done
// and the packed bytes read per second, against the same threads' plain read bandwidth; and the
// time of a posting with next to no work. Experts are random, together larger than any cache, taken
// in turn. Times are of the wall clock, best and median of the repeats.
//
//   cpu_experts_bench [--threads N] [--isa NAME] [--rows N] [--megabytes N] [--repeats N] [--pin 1]
#include "cpp/base/half.h"
#include "cpp/base/thread_pool.h"
#include "cpp/cache/cpu_experts.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <thread>
#include <vector>

namespace {

using namespace flashnext;

constexpr std::int32_t kSlots = 10;

struct Options {
  int threads = 0;  // 0: 1, 2, 4, .. and all but one
  std::string isa = "auto";
  std::int32_t rows = 1;
  std::size_t megabytes = 256;
  int repeats = 60;
  bool pin = false;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte, Free>;

Buffer random_bytes(std::size_t bytes) {
  bytes = (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20);
  Buffer b(static_cast<std::byte*>(std::aligned_alloc(2 << 20, bytes)));
  madvise(b.get(), bytes, MADV_HUGEPAGE);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    const std::uint64_t v = random();
    std::memcpy(b.get() + i, &v, sizeof v);
  }
  return b;
}

struct Model {
  Model(std::int32_t d, std::int32_t e, std::size_t bytes) : dim(d), inner(e) {
    const std::size_t one = static_cast<std::size_t>(d) * static_cast<std::size_t>(e) * 3 / 8;
    const std::size_t line = (3 * one + 4095) / 4096 * 4096;
    const std::size_t n = std::max<std::size_t>(kSlots, bytes / line);
    memory = random_bytes(n * line);
    scales.assign(static_cast<std::size_t>(std::max(d, e)), f32_to_f16(0.0625f));
    const std::byte* halves = reinterpret_cast<const std::byte*>(scales.data());
    refs.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t p = 0; p < 3; ++p) {
        refs[i].trellis[p] = memory.get() + i * line + p * one;
        refs[i].suh[p] = refs[i].svh[p] = halves;
      }
    }
  }
  std::int32_t dim, inner;
  Buffer memory;
  std::vector<std::uint16_t> scales;
  std::vector<ExpertRef> refs;
};

struct Times {
  double best, median;
};

Times times_of(std::vector<double> t) {
  std::sort(t.begin(), t.end());
  return {t.front(), t[t.size() / 2]};
}

// Seconds of postings of `experts` experts, each with `rows` jobs.
Times measure(const Model& m, const Options& o, int threads, std::int32_t experts,
              std::int32_t rows, int repeats) {
  const std::int32_t pairs = rows * kSlots;
  MailboxHead head{};
  std::vector<MailJob> jobs(static_cast<std::size_t>(pairs));
  std::vector<float> x(static_cast<std::size_t>(rows * m.dim));
  std::vector<float> y(static_cast<std::size_t>(pairs * m.dim));
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& v : x) v = normal(random);
  cache::CpuOptions options;
  options.threads = threads;
  options.isa = exl3::isa_named(o.isa);
  if (o.pin) {
    for (int i = 1; i <= threads; ++i) options.cores.push_back(i % available_cores());
  }
  cache::CpuExperts workers({&head, jobs.data(), x.data(), y.data()}, {{m.refs, {48, 48, 48}}},
                            {m.dim, m.inner, kSlots, exl3::kLevels, pairs}, options);
  workers.arm();
  std::size_t next = 0;
  std::vector<double> times;
  for (int i = 0; i < repeats + 3; ++i) {
    std::int32_t n = 0;
    for (std::int32_t e = 0; e < experts; ++e) {
      for (std::int32_t r = 0; r < rows; ++r) {
        jobs[static_cast<std::size_t>(n++)] = {static_cast<std::int32_t>(next), r * kSlots + e};
      }
      next = (next + 1) % m.refs.size();
    }
    head.num_jobs = n;
    const std::uint32_t sequence = static_cast<std::uint32_t>(i) + 1;
    const double start = now();
    std::atomic_ref(head.posted).store(sequence, std::memory_order_release);
    while (std::atomic_ref(head.done).load(std::memory_order_acquire) != sequence) {
      // Without a core of its own, waiting must not take one from the workers.
      if (threads >= available_cores()) std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
    if (i >= 3) times.push_back(now() - start);
  }
  return times_of(times);
}

// Bytes per second of threads that only add up a buffer.
double read_bandwidth(const Model& m, int threads, int repeats) {
  using Vector = std::uint64_t __attribute__((vector_size(32)));
  const std::size_t bytes = m.refs.size() * static_cast<std::size_t>(m.dim) *
                            static_cast<std::size_t>(m.inner) * 9 / 8 / 4096 * 4096;
  const std::byte* data = m.memory.get();
  ThreadPool pool(threads);
  std::atomic<std::uint64_t> sink{0};
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const double start = now();
    pool.parallel_for(static_cast<std::int64_t>(bytes / 4096), 64,
                      [&](std::int64_t begin, std::int64_t end) {
                        Vector sum[8] = {};
                        for (std::int64_t at = begin * 4096; at < end * 4096; at += 256) {
                          for (std::int64_t k = 0; k < 8; ++k) {
                            Vector v;
                            std::memcpy(&v, data + at + 32 * k, sizeof v);
                            sum[k] += v;
                          }
                        }
                        std::uint64_t total = 0;
                        for (const Vector& v : sum) total += v[0] + v[1] + v[2] + v[3];
                        sink.fetch_add(total, std::memory_order_relaxed);
                      });
    times.push_back(now() - start);
  }
  return static_cast<double>(bytes) / times_of(times).best;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--threads") o.threads = std::atoi(argv[i + 1]);
    if (name == "--isa") o.isa = argv[i + 1];
    if (name == "--rows") o.rows = std::atoi(argv[i + 1]);
    if (name == "--megabytes") o.megabytes = static_cast<std::size_t>(std::atol(argv[i + 1]));
    if (name == "--repeats") o.repeats = std::atoi(argv[i + 1]);
    if (name == "--pin") o.pin = std::atoi(argv[i + 1]) != 0;
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  prctl(PR_SET_TIMERSLACK, 1000);
  const Model model(2560, 640, o.megabytes << 20);
  const Model small(128, 128, 0);
  std::vector<int> all;
  if (o.threads > 0) {
    all = {o.threads};
  } else {
    const int most = std::max(1, available_cores() - 1);
    for (int t = 1; t < most; t *= 2) all.push_back(t);
    all.push_back(most);
  }
  std::printf("{\"bench\": \"cpu_experts\", \"isa\": \"%s\", \"cores\": %d, \"rows\": %d, ",
              std::string(exl3::to_string(exl3::isa_named(o.isa))).c_str(), available_cores(),
              o.rows);
  std::printf("\"megabytes\": %zu, \"repeats\": %d, \"pinned\": %s, \"threads\": [", o.megabytes,
              o.repeats, o.pin ? "true" : "false");
  const char* comma = "\n";
  for (const int threads : all) {
    const double read = read_bandwidth(model, threads, 5);
    const Times idle = measure(small, o, threads, 1, 1, 400);
    std::printf("%s{\"threads\": %d, \"read_gb_per_s\": %.2f, ", comma, threads, read / 1e9);
    std::printf("\"small_us\": {\"best\": %.2f, \"median\": %.2f}, \"postings\": [",
                idle.best * 1e6, idle.median * 1e6);
    comma = "\n  ";
    for (std::int32_t experts = 1; experts <= kSlots; ++experts) {
      const Times t = measure(model, o, threads, experts, o.rows, o.repeats);
      const double bytes = experts * (2560.0 * 640 * 9 / 8 + 3 * 2 * (2560 + 640));
      std::printf("%s{\"experts\": %d, \"us\": {\"best\": %.1f, \"median\": %.1f}, ", comma,
                  experts, t.best * 1e6, t.median * 1e6);
      std::printf("\"gb_per_s\": {\"best\": %.2f, \"median\": %.2f}, \"of_read\": %.3f}",
                  bytes / t.best / 1e9, bytes / t.median / 1e9, bytes / t.median / read);
      std::fflush(stdout);
      comma = ",\n  ";
    }
    std::printf("]}");
    comma = ",\n";
  }
  std::printf("\n]}\n");
  return 0;
}
