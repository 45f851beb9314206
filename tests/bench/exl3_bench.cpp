// Speed of the integer linear on one core, as JSON: for every instruction set and rate the packed
// weights read per second by one row, the products per second with more rows, and the core's plain
// read bandwidth to hold the first against. Weights are random tensors, together larger than any
// cache, taken in turn. Times are the thread's processor time, medians of repeats, so that a shared
// machine disturbs them little.
//
//   exl3_bench [--isa NAME] [--k K] [--megabytes N] [--repeats N]
#include "cpp/base/half.h"
#include "cpp/exl3/exl3.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <time.h>
#include <vector>

namespace {

using namespace flashnext;
using exl3::Isa;

constexpr std::int32_t kIn = 2560;
constexpr std::int32_t kOut = 1280;

struct Options {
  std::string isa;
  double k = 0.0;  // 0: all
  std::size_t megabytes = 128;
  int repeats = 5;
};

double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::byte, Free>;

Buffer allocate(std::size_t bytes) {
  return Buffer(static_cast<std::byte*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
}

Buffer random_bytes(std::size_t bytes) {
  Buffer b = allocate(bytes);
  std::mt19937_64 random(1);
  for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
    const std::uint64_t v = random();
    std::memcpy(b.get() + i, &v, sizeof v);
  }
  return b;
}

template <class Body>
double median_seconds(int repeats, Body body) {
  std::vector<double> times;
  body();
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    body();
    times.push_back(seconds() - start);
  }
  std::nth_element(times.begin(), times.begin() + repeats / 2, times.end());
  return times[static_cast<std::size_t>(repeats / 2)];
}

// Bytes per second of a loop that only adds up a buffer.
double read_bandwidth(const std::byte* data, std::size_t bytes, int repeats) {
  using Vector = std::uint64_t __attribute__((vector_size(32)));
  volatile std::uint64_t sink = 0;
  const double t = median_seconds(repeats, [&] {
    Vector sum[8] = {};
    for (std::size_t i = 0; i + 256 <= bytes; i += 256) {
      for (std::size_t k = 0; k < 8; ++k) {
        Vector v;
        std::memcpy(&v, data + i + 32 * k, sizeof v);
        sum[k] += v;
      }
    }
    std::uint64_t total = 0;
    for (const Vector& v : sum) total += v[0] + v[1] + v[2] + v[3];
    sink = sink + total;
  });
  return static_cast<double>(bytes) / t;
}

struct Result {
  double multiply;  // seconds of one linear
  double prepare;   // seconds of one row
};

Result measure(Isa isa, std::int32_t words, std::int32_t rows, const Buffer& weights,
               std::size_t bytes, const Exl3Weight& scales, int repeats) {
  const std::size_t size =
      static_cast<std::size_t>(kIn / 16) * (kOut / 16) * static_cast<std::size_t>(words) * 2;
  const std::size_t tensors = bytes / size;
  // Many rows need few tensors to take a while; one row goes through all of them.
  const std::size_t turns = std::max<std::size_t>(2, tensors / static_cast<std::size_t>(rows));
  std::vector<float> x(static_cast<std::size_t>(rows) * kIn);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (float& v : x) v = normal(random);
  std::vector<float> y(static_cast<std::size_t>(rows) * kOut);
  const Buffer memory = allocate(exl3::prepared_bytes(rows, kIn));
  const exl3::Prepared p = exl3::place_prepared(memory.get(), rows, kIn);
  Exl3Weight w = scales;
  w.words = words;
  w.trellis = weights.get();
  Result result{};
  result.prepare =
      median_seconds(repeats,
                     [&] { exl3::prepare(w, x.data(), kIn, exl3::kLevels, isa, 0, rows, p); }) /
      rows;
  std::size_t next = 0;
  result.multiply = median_seconds(repeats,
                                   [&] {
                                     for (std::size_t i = 0; i < turns; ++i) {
                                       w.trellis = weights.get() + next * size;
                                       next = (next + 1) % tensors;
                                       exl3::multiply(w, p, isa, 0, kOut / 128, y.data(), kOut);
                                     }
                                   }) /
                    static_cast<double>(turns);
  return result;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--isa") o.isa = argv[i + 1];
    if (name == "--k") o.k = std::atof(argv[i + 1]);
    if (name == "--megabytes") o.megabytes = static_cast<std::size_t>(std::atol(argv[i + 1]));
    if (name == "--repeats") o.repeats = std::atoi(argv[i + 1]);
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const std::size_t bytes = o.megabytes << 20;
  const Buffer weights = random_bytes(bytes);
  std::vector<std::uint16_t> scale(kIn, f32_to_f16(0.0625f));
  const std::byte* halves = reinterpret_cast<const std::byte*>(scale.data());
  const Exl3Weight scales = {nullptr, halves, halves, nullptr, kIn, kOut, 0, 0};

  const double bandwidth = read_bandwidth(weights.get(), bytes, o.repeats);
  std::printf(
      "{\"bench\": \"exl3\", \"in\": %d, \"out\": %d, \"megabytes\": %zu, \"repeats\": %d, ", kIn,
      kOut, o.megabytes, o.repeats);
  std::printf("\"clock\": \"thread processor time\", \"read_gb_per_s\": %.2f, \"results\": [",
              bandwidth / 1e9);
  const char* comma = "\n";
  for (const Isa isa : exl3::kIsas) {
    const std::string name(exl3::to_string(isa));
    if (!exl3::supported(isa) || (!o.isa.empty() && o.isa != name)) continue;
    for (const std::int32_t words : {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128}) {
      const double k = words / 16.0;
      if (o.k != 0.0 && o.k != k) continue;
      const double weights_of_linear = static_cast<double>(kIn) * kOut;
      // The oracle is not made for speed: one tensor a repeat tells enough.
      const std::size_t used = isa == Isa::kScalar ? std::min<std::size_t>(bytes, 8 << 20) : bytes;
      for (const std::int32_t rows : {1, 2, 4, 8, 64, 512}) {
        if (isa == Isa::kScalar && rows > 8) continue;
        const Result r = measure(isa, words, rows, weights, used, scales, o.repeats);
        const double macs = weights_of_linear * rows / r.multiply;
        const double packed = weights_of_linear * k / 8 / r.multiply;
        std::printf("%s{\"isa\": \"%s\", \"k\": %g, \"rows\": %d, \"us\": %.1f, ", comma,
                    name.c_str(), k, rows, r.multiply * 1e6);
        std::printf("\"prepare_us_per_row\": %.2f, \"packed_gb_per_s\": %.3f, ", r.prepare * 1e6,
                    packed / 1e9);
        std::printf("\"of_read_bandwidth\": %.3f, \"gweights_per_s\": %.3f, \"gmac_per_s\": %.2f, ",
                    packed / bandwidth, weights_of_linear / r.multiply / 1e9, macs / 1e9);
        // One product of V and B is four of int8 digits, two operations each.
        std::printf("\"int8_gop_per_s\": %.1f}", 8 * macs / 1e9);
        std::fflush(stdout);
        comma = ",\n";
      }
    }
  }
  std::printf("\n]}\n");
  return 0;
}
