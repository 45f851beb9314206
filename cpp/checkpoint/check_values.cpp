// Values that are checked when a checkpoint opens: markers, and every float that is no table row:
// some GB of a big pack, most of them scattered in small tensors between trellises. They are
// visited in file order, in pieces, read ahead range by range, by all cores.
#include "cpp/base/half.h"
#include "cpp/base/thread_pool.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>

namespace flashnext {
namespace {

constexpr std::uint32_t kMul1 = 0x83DCD12Du;
constexpr std::size_t kPiece = 1u << 20;        // bytes of a tensor that are one check
constexpr std::int64_t kGrain = 32;             // checks a thread takes at once
constexpr std::size_t kBatch = 1 << 12;         // checks between two progress reports
constexpr std::uint64_t kFewBytes = 32u << 20;  // not worth the start of threads
constexpr std::ptrdiff_t kNear = 4096;          // tensors this close are read ahead as one range

// Masks of a 64-bit word of floats: `exponent` selects the exponent bits; adding `unit` carries
// into the sign bit exactly where all of them are set, that is, for NaN and infinity.
struct Lanes {
  std::uint64_t exponent, unit, sign;
};
constexpr Lanes kHalf = {0x7C007C007C007C00u, 0x0400040004000400u, 0x8000800080008000u};
constexpr Lanes kBrain = {0x7F807F807F807F80u, 0x0080008000800080u, 0x8000800080008000u};
constexpr Lanes kSingle = {0x7F8000007F800000u, 0x0080000000800000u, 0x8000000080000000u};

// A check, or a part of one.
struct Piece {
  const Tensor* tensor;
  std::size_t begin, bytes;
  bool marker;
  const std::byte* data() const noexcept { return tensor->data + begin; }
};

bool all_finite(const Piece& piece) noexcept {
  const Dtype dtype = piece.tensor->dtype;
  const Lanes lanes = dtype == Dtype::kF16 ? kHalf : dtype == Dtype::kBF16 ? kBrain : kSingle;
  const std::byte* data = piece.data();
  std::uint64_t bad = 0;
  std::size_t i = 0;
  for (; i + 8 <= piece.bytes; i += 8) {
    std::uint64_t w;
    std::memcpy(&w, data + i, sizeof w);
    bad |= ((w & lanes.exponent) + lanes.unit) & lanes.sign;
  }
  std::uint64_t tail = 0;
  if (i < piece.bytes) std::memcpy(&tail, data + i, piece.bytes - i);
  bad |= ((tail & lanes.exponent) + lanes.unit) & lanes.sign;
  return bad == 0;
}

std::string hex(std::uint32_t value) {
  constexpr char digits[] = "0123456789ABCDEF";
  std::string text = "0x";
  for (int shift = 28; shift >= 0; shift -= 4) text += digits[(value >> shift) & 15];
  return text;
}

// What is wrong, or nothing.
std::optional<std::string> problem_of(const Piece& piece) {
  const Tensor& tensor = *piece.tensor;
  if (piece.marker) {
    std::uint32_t value;
    std::memcpy(&value, tensor.data, sizeof value);
    if (value == kMul1) return std::nullopt;
    const bool swapped = value == __builtin_bswap32(kMul1);
    return tensor.name + ": the codebook marker is " + hex(value) + ", but mul1 has " + hex(kMul1) +
           (swapped ? " (the bytes are swapped)" : "") + ". The file is damaged: download it again";
  }
  if (all_finite(piece)) return std::nullopt;
  Tensor part = tensor;
  part.data += piece.begin;
  part.bytes = piece.bytes;
  const std::vector<float> values = widen(part);
  std::size_t at = 0;
  while (at < values.size() && values[at] - values[at] == 0) ++at;
  const bool nan = at < values.size() && values[at] != values[at];
  return tensor.name + ": element " + std::to_string(piece.begin / item_bytes(tensor.dtype) + at) +
         " is " + (nan ? "NaN" : "infinite") +
         ", but every value must be finite. The file is damaged: download it again, or quantise "
         "the model again";
}

void read_ahead(const Piece* begin, const Piece* end) noexcept {
  const std::byte* from = nullptr;
  const std::byte* to = nullptr;
  for (const Piece* piece = begin; piece != end; ++piece) {
    const std::byte* data = piece->data();
    if (from == nullptr || data - to > kNear) {
      if (from != nullptr) advise(from, static_cast<std::size_t>(to - from), Advice::kSoon);
      from = data;
    }
    to = data + piece->bytes;
  }
  if (from != nullptr) advise(from, static_cast<std::size_t>(to - from), Advice::kSoon);
}

std::vector<Piece> in_pieces(const std::vector<ValueCheck>& checks) {
  std::vector<Piece> pieces;
  pieces.reserve(checks.size());
  for (const ValueCheck& check : checks) {
    const std::size_t bytes = check.tensor->bytes;
    for (std::size_t begin = 0; begin < bytes; begin += kPiece) {
      pieces.push_back({check.tensor, begin, std::min(kPiece, bytes - begin), check.marker});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.tensor->file, a.data()) < std::pair(b.tensor->file, b.data());
  });
  return pieces;
}

}  // namespace

void check_values(const std::vector<ValueCheck>& tensors, const Progress& progress) {
  const std::vector<Piece> checks = in_pieces(tensors);
  std::uint64_t bytes = 0;
  for (const Piece& piece : checks) bytes += piece.bytes;
  const bool few = checks.size() < kBatch / 2 && bytes < kFewBytes;
  ThreadPool pool(few ? 1 : std::min(available_cores(), 16));
  std::mutex mutex;
  std::size_t first_bad = checks.size();
  std::string first_problem;
  for (std::size_t begin = 0; begin < checks.size(); begin += kBatch) {
    const std::size_t count = std::min(kBatch, checks.size() - begin);
    const Piece* batch = checks.data() + begin;
    pool.parallel_for(static_cast<std::int64_t>(count), kGrain,
                      [&](std::int64_t i, std::int64_t j) {
                        read_ahead(batch + i, batch + j);
                        for (std::int64_t k = i; k < j; ++k) {
                          const auto problem = problem_of(batch[k]);
                          if (!problem) continue;
                          const std::lock_guard lock(mutex);
                          const std::size_t at = begin + static_cast<std::size_t>(k);
                          if (at >= first_bad) continue;
                          first_bad = at;
                          first_problem = *problem;
                        }
                      });
    if (first_bad < checks.size()) throw CheckpointError(first_problem);
    if (progress) progress("check", begin + count, checks.size());
  }
}

}  // namespace flashnext
