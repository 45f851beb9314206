// The values of synthetic tensors: blocks of random values, one a way of drawing, repeated in the
// address space.
#include "cpp/base/half.h"
#include "cpp/base/thread_pool.h"
#include "cpp/checkpoint/repeating_memory.h"
#include "cpp/checkpoint/synthetic.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace flashnext {
namespace {

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15u;
constexpr std::uint32_t kMul1 = 0x83DCD12Du;
constexpr std::size_t kValuesPeriod = std::size_t{8} << 20;  // at most, of values that are numbers
constexpr std::size_t kRowsPeriod = std::size_t{16} << 20;   // at most, of n-gram rows
constexpr std::size_t kAlign = 256;
constexpr std::int64_t kPiece = std::int64_t{1} << 20;  // bytes a thread draws at once

std::uint64_t mix64(std::uint64_t v) noexcept {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
  return v ^ (v >> 31);
}

std::uint64_t hash_text(std::string_view text, std::uint64_t seed) noexcept {
  std::uint64_t h = seed ^ 0xCBF29CE484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mix64(h);
}

// Word i of the stream `seed`: any piece can be drawn on its own.
std::uint64_t word(std::uint64_t seed, std::uint64_t i) noexcept {
  return mix64(seed + i * kGamma);
}

std::uint16_t to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

std::uint16_t encode(Dtype dtype, double value) {
  check(dtype == Dtype::kF16 || dtype == Dtype::kBF16, "synthetic: numbers are F16 or BF16");
  const auto f = static_cast<float>(value);
  return dtype == Dtype::kF16 ? f32_to_f16(f) : to_bf16(f);
}

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

// A way of drawing; tensors that agree in it share a block.
struct Source {
  Fill::Kind kind;
  Dtype dtype;
  double a, b;
  std::size_t row;  // bytes of an n-gram row, else of an element
  auto key() const { return std::tuple(kind, dtype, a, b, row); }
  bool operator<(const Source& other) const { return key() < other.key(); }
};

Source source_of(const SyntheticTensor& t) {
  std::size_t row = item_bytes(t.dtype);
  if (t.fill.kind == Fill::Kind::kNgramRows) row *= static_cast<std::size_t>(t.shape.back());
  return {t.fill.kind, t.dtype, t.fill.a, t.fill.b, row};
}

// Draws the 16-bit elements [begin, end) of a block, both even.
void draw_numbers(const Source& source, std::uint64_t seed, std::uint16_t* out, std::size_t begin,
                  std::size_t end) {
  if (source.kind == Fill::Kind::kNormal) {
    // The sum of four bytes is near enough to normal: mean 510, variance 4 (256^2 - 1) / 12.
    std::array<std::uint16_t, 1021> table;
    const double deviation = std::sqrt(4 * 65535.0 / 12);
    for (std::size_t i = 0; i < table.size(); ++i) {
      table[i] =
          encode(source.dtype, source.a + source.b * (static_cast<double>(i) - 510) / deviation);
    }
    const auto sum = [](std::uint64_t w) {
      return (w & 255) + (w >> 8 & 255) + (w >> 16 & 255) + (w >> 24 & 255);
    };
    for (std::size_t i = begin; i < end; i += 2) {
      const std::uint64_t w = word(seed, i / 2);
      out[i] = table[sum(w)];
      out[i + 1] = table[sum(w >> 32)];
    }
    return;
  }
  if (source.kind == Fill::Kind::kSigns) {
    const std::uint16_t plus = encode(source.dtype, source.a);
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t bit = word(seed, i / 64) >> (i % 64) & 1;
      out[i] = static_cast<std::uint16_t>(plus | bit << 15);
    }
    return;
  }
  for (std::size_t i = begin; i < end; ++i) {
    const double at = static_cast<double>(word(seed, i) >> 11) * 0x1p-53;
    out[i] = encode(source.dtype, source.a + (source.b - source.a) * at);
  }
}

void draw_block(const Source& source, std::uint64_t seed, std::byte* out, std::size_t bytes,
                ThreadPool& pool) {
  const bool bits = source.kind == Fill::Kind::kBits || source.kind == Fill::Kind::kNgramRows;
  pool.parallel_for(
      static_cast<std::int64_t>(bytes), kPiece, [&](std::int64_t first, std::int64_t last) {
        const auto begin = static_cast<std::size_t>(first), end = static_cast<std::size_t>(last);
        if (!bits) {
          auto* numbers = reinterpret_cast<std::uint16_t*>(out);
          return draw_numbers(source, seed, numbers, begin / 2, end / 2);
        }
        for (std::size_t i = begin; i < end; i += 8) {
          const std::uint64_t w = word(seed, i / 8);
          std::memcpy(out + i, &w, sizeof w);
        }
      });
  if (source.kind != Fill::Kind::kNgramRows) return;
  const std::uint16_t scale = encode(Dtype::kF16, source.a);
  for (std::size_t i = 0; i < bytes; i += source.row) std::memcpy(out + i, &scale, sizeof scale);
}

}  // namespace

struct SyntheticMemory::State {
  std::uint64_t seed = 0;
  std::map<Source, RepeatingMemory> blocks;
  std::map<std::string, std::vector<std::byte>, std::less<>> constants;
  std::uint32_t marker = kMul1;

  std::pair<const RepeatingMemory*, std::size_t> place(const SyntheticTensor& tensor) const;
  const std::byte* constant(const SyntheticTensor& tensor) const;
};

SyntheticMemory::SyntheticMemory(const std::vector<SyntheticTensor>& tensors,
                                 const SyntheticOptions& options)
    : state_(std::make_unique<State>()) {
  state_->seed = mix64(options.seed + kGamma);
  struct Need {
    std::size_t longest = 0, sum = 0;
  };
  std::map<Source, Need> needs;
  for (const SyntheticTensor& t : tensors) {
    const std::size_t bytes = t.bytes();
    if (t.fill.kind != Fill::Kind::kIntegers) {
      Need& need = needs[source_of(t)];
      need.longest = std::max(need.longest, bytes);
      need.sum += bytes;
    } else if (t.dtype == Dtype::kI64) {
      check(t.fill.integers.size() * 8 == bytes, "synthetic: wrong number of integers");
      std::vector<std::byte>& out = state_->constants[t.name];
      out.resize(bytes);
      std::memcpy(out.data(), t.fill.integers.data(), bytes);
    }
  }
  ThreadPool pool(std::min(available_cores(), 16));
  std::uint64_t stream = 0;
  for (const auto& [source, need] : needs) {
    const bool rows = source.kind == Fill::Kind::kNgramRows;
    const std::size_t most = source.kind == Fill::Kind::kBits ? options.pool_bytes
                             : rows                           ? kRowsPeriod
                                                              : kValuesPeriod;
    // A whole number of rows and of pages.
    const std::size_t unit = std::lcm(source.row, RepeatingMemory::kPage);
    const std::size_t period =
        std::max(unit, std::min(round_up(need.sum, unit), most / unit * unit));
    RepeatingMemory block(period, period + need.longest);
    draw_block(source, mix64(state_->seed + ++stream * kGamma), block.data(), period, pool);
    block.seal();
    state_->blocks.emplace(source, std::move(block));
  }
}

SyntheticMemory::~SyntheticMemory() = default;
SyntheticMemory::SyntheticMemory(SyntheticMemory&&) noexcept = default;

// A block and the place in it where a drawn tensor begins.
std::pair<const RepeatingMemory*, std::size_t> SyntheticMemory::State::place(
    const SyntheticTensor& tensor) const {
  const Source source = source_of(tensor);
  const auto block = blocks.find(source);
  check(block != blocks.end(), "synthetic: a tensor outside the list");
  const bool rows = source.kind == Fill::Kind::kNgramRows;
  const std::size_t unit = rows ? source.row : kAlign;
  const std::size_t places = block->second.period() / unit;
  return {&block->second, hash_text(tensor.name, seed) % places * unit};
}

const std::byte* SyntheticMemory::State::constant(const SyntheticTensor& tensor) const {
  if (tensor.dtype == Dtype::kI32) return reinterpret_cast<const std::byte*>(&marker);
  const auto found = constants.find(tensor.name);
  check(found != constants.end(), "synthetic: a tensor outside the list");
  return found->second.data();
}

const std::byte* SyntheticMemory::at(const SyntheticTensor& tensor) const {
  if (tensor.fill.kind == Fill::Kind::kIntegers) return state_->constant(tensor);
  const auto [block, offset] = state_->place(tensor);
  return block->data() + offset;
}

void SyntheticMemory::pieces(
    const SyntheticTensor& tensor,
    const std::function<void(const std::byte* data, std::size_t bytes)>& visit) const {
  std::size_t left = tensor.bytes();
  if (tensor.fill.kind == Fill::Kind::kIntegers) return visit(state_->constant(tensor), left);
  auto [block, offset] = state_->place(tensor);
  while (left > 0) {
    const std::size_t n = std::min(left, block->period() - offset);
    visit(block->data() + offset, n);
    left -= n;
    offset = 0;
  }
}

}  // namespace flashnext
