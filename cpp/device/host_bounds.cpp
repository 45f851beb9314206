#include "cpp/base/errors.h"
#include "cpp/base/half.h"
#include "cpp/base/thread_pool.h"
#include "cpp/device/bounds.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

namespace flashnext {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRuns = 5;
constexpr std::size_t kPiece = 1 << 16;  // words a thread reads at once: half a MB
constexpr std::int32_t kIn = 2560, kOut = 640, kWords = 48;  // gate or up of an expert, K = 3
constexpr std::int32_t kRows = exl3::kRowGroup;
constexpr std::size_t kTrellis = std::size_t{kIn / 16} * (kOut / 16) * kWords * 2;
constexpr std::size_t kLinear = kTrellis + 2 * (kIn + kOut);

double best_seconds(const std::function<void()>& run) {
  double best = 1e30;
  for (int i = 0; i < kRuns; ++i) {
    const Clock::time_point start = Clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return best;
}

// Sums the words; four independent sums keep the loads ahead.
std::uint64_t sum_words(const std::uint64_t* words, std::size_t n) {
  std::uint64_t a = 0, b = 0, c = 0, d = 0;
  for (std::size_t i = 0; i + 4 <= n; i += 4) {
    a += words[i];
    b += words[i + 1];
    c += words[i + 2];
    d += words[i + 3];
  }
  return a + b + c + d;
}

class Rates {
 public:
  Rates(exl3::Isa isa, std::size_t bytes) : isa_(isa), memory_(bytes / 8) {
    std::uint64_t state = 1;
    for (std::uint64_t& word : memory_) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      word = state ^ state >> 29;
    }
    std::fill(std::begin(signs_), std::end(signs_), f32_to_f16(1.0f / std::sqrt(2560.0f)));
    for (std::size_t i = 0; i < std::size(x_); ++i) {
      x_[i] = std::sin(static_cast<float>(i));
    }
    prepared_memory_.resize(exl3::prepared_bytes(kRows, kIn) + 256);
    void* memory = prepared_memory_.data();
    std::size_t space = prepared_memory_.size();
    std::align(256, space - 256, memory, space);
    prepared_ = exl3::place_prepared(memory, kRows, kIn);
    // One row again and again: the arithmetic does not depend on the values.
    exl3::prepare(linear_at(0), x_, 0, exl3::kLevels, isa_, 0, kRows, prepared_);
  }

  // Reads the first `words` words `repeats` times over.
  double read(ThreadPool& pool, std::size_t words, std::int64_t repeats) {
    const auto pieces = static_cast<std::int64_t>(std::max<std::size_t>(words / kPiece, 1));
    const std::size_t piece = std::min(words, kPiece);
    const double seconds = best_seconds([&] {
      pool.parallel_for(pieces * repeats, 1, [&](std::int64_t i, std::int64_t j) {
        for (; i < j; ++i) {
          const auto at = static_cast<std::size_t>(i % pieces) * piece;
          sink_.fetch_xor(sum_words(memory_.data() + at, piece));
        }
      });
    });
    return static_cast<double>(pieces * repeats) * static_cast<double>(piece * 8) / seconds;
  }
  std::size_t words() const { return memory_.size(); }

  // `linears` products of `rows` rows, each of its own weights in the first linears * kLinear
  // bytes, `repeats` times over. Returns products (linears) a second.
  double exl3(ThreadPool& pool, std::int32_t rows, std::int64_t linears, std::int64_t repeats) {
    const std::int64_t n = linears * repeats;
    const exl3::Prepared prepared = exl3::rows_of(prepared_, 0, rows);
    const double seconds = best_seconds([&] {
      pool.parallel_for(n, 1, [&](std::int64_t i, std::int64_t j) {
        std::vector<float> y(static_cast<std::size_t>(rows) * kOut);
        for (; i < j; ++i) {
          exl3::multiply(linear_at(i % linears), prepared, isa_, 0, kOut / 128, y.data(), kOut);
          std::uint32_t bits;
          std::memcpy(&bits, y.data(), sizeof bits);
          sink_.fetch_xor(bits);
        }
      });
    });
    return static_cast<double>(n) / seconds;
  }

  std::int64_t linears() const { return static_cast<std::int64_t>(memory_.size() * 8 / kLinear); }

 private:
  Exl3Weight linear_at(std::int64_t i) const {
    Exl3Weight w{};
    w.trellis =
        reinterpret_cast<const std::byte*>(memory_.data()) + static_cast<std::size_t>(i) * kLinear;
    w.suh = w.svh = reinterpret_cast<const std::byte*>(signs_);
    w.in = kIn;
    w.out = kOut;
    w.words = kWords;
    return w;
  }

  exl3::Isa isa_;
  std::vector<std::uint64_t> memory_;
  std::uint16_t signs_[kIn];
  float x_[kIn];
  std::vector<std::byte> prepared_memory_;
  exl3::Prepared prepared_{};
  std::atomic<std::uint64_t> sink_{0};  // keeps the work from being optimised away
};

}  // namespace

HostBounds measure_host_bounds(int threads, exl3::Isa isa, std::size_t bytes) {
  if (!exl3::supported(isa)) {
    throw InputError("isa = \"" + std::string(exl3::to_string(isa)) +
                     "\": this processor does not run it");
  }
  check(bytes >= 2 * kLinear, "measure_host_bounds: too little memory to measure");
  Rates rates(isa, bytes);
  ThreadPool one(1), all(threads);
  HostBounds b;
  b.threads = all.threads();
  const auto measure = [&](ThreadPool& pool, double& read, double& read_cached, double& row,
                           double& row_cached, double& macs) {
    const std::int64_t threads_used = pool.threads();
    const auto linear_bytes = static_cast<double>(kLinear);
    read = rates.read(pool, rates.words(), 1);
    read_cached = rates.read(pool, kPiece, 64 * threads_used);
    row = linear_bytes * rates.exl3(pool, 1, rates.linears(), 1);
    row_cached = linear_bytes * rates.exl3(pool, 1, 1, 64 * threads_used);
    macs = double{kIn} * kOut * kRows * rates.exl3(pool, kRows, 1, threads_used);
  };
  measure(one, b.core_read, b.core_read_cached, b.core_exl3, b.core_exl3_cached, b.core_exl3_macs);
  measure(all, b.all_read, b.all_read_cached, b.all_exl3, b.all_exl3_cached, b.all_exl3_macs);
  return b;
}

}  // namespace flashnext
