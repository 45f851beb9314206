// The three attention ops in order over the tokens of two lanes, with small dims and a poisoned
// page pool.
#pragma once

#include "host_step.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace flashnext::test {

using Floats = std::vector<float>;
using Ids = std::vector<std::int32_t>;

inline constexpr int kHeads = 4, kKvHeads = 2, kDim = 256, kRotary = 64;
inline constexpr int kIndexHeads = 4, kIndexDim = 128, kBlock = 4, kMaxBlocks = 8;
inline constexpr int kMaxPages = 6, kPages = 14, kContext = kMaxPages * kPageTokens;
inline constexpr AttnDims kDims = {kHeads,    kKvHeads, kDim,       kRotary, kIndexHeads,
                                   kIndexDim, kBlock,   kMaxBlocks, 1e-6f};
// Two lanes, pages out of order.
inline const Ids kTable = {7, 2, 11, 0, 5, 9, 3, 12, 1, 13, 4, 8};

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
inline double wide(float x) { return static_cast<double>(x); }

// Inputs of all tokens of one lane.
struct Tokens {
  Tokens(int n, std::uint32_t seed)
      : qg(uniform(size(n) * kHeads * 2 * kDim, -2, 2, seed)),
        k(uniform(size(n) * kKvHeads * kDim, -2, 2, seed + 1)),
        v(uniform(size(n) * kKvHeads * kDim, -2, 2, seed + 2)),
        index(uniform(size(n) * (kIndexHeads + 1) * kIndexDim, -2, 2, seed + 3)) {}
  Floats qg, k, v, index;
};

struct Weights {
  Floats q = uniform(kDim, 0.5f, 1.5f, 1), k = uniform(kDim, 0.5f, 1.5f, 2);
  Floats iq = uniform(kIndexDim, 0.5f, 1.5f, 3), ik = uniform(kIndexDim, 0.5f, 1.5f, 4);
  Floats rope = Floats(kContext * kRotary);
  Weights() {
    for (int pos = 0; pos < kContext; ++pos) {
      for (int i = 0; i < kRotary / 2; ++i) {
        const double angle = pos * std::pow(1e7, -2.0 * i / kRotary);
        rope[size(pos * kRotary + i)] = static_cast<float>(std::cos(angle));
        rope[size(pos * kRotary + kRotary / 2 + i)] = static_cast<float>(std::sin(angle));
      }
    }
  }
};

inline constexpr int kSlots = 3;  // of state
inline constexpr std::int64_t kSlotStride = (kBlock - 1) * kIndexDim + 16;

// The page pool and the slots, poisoned.
struct Cache {
  std::vector<std::uint16_t> k =
      std::vector<std::uint16_t>(kPages * kKvHeads * kPageTokens * kDim, 0xFFFF);
  std::vector<std::uint16_t> v = k;
  Floats pooled = Floats(kPages * kPageTokens / kBlock * kIndexDim, kNan);
  Floats windows = Floats(kSlots * kSlotStride, kNan);
  KvPlanes planes() { return {k.data(), v.data(), pooled.data()}; }
};

// The outputs of all rows a lane ever had.
struct Rows {
  Floats q, iq, y;
  Ids blocks, count;
  void append(const Rows& more) {
    q.insert(q.end(), more.q.begin(), more.q.end());
    iq.insert(iq.end(), more.iq.begin(), more.iq.end());
    y.insert(y.end(), more.y.begin(), more.y.end());
    blocks.insert(blocks.end(), more.blocks.begin(), more.blocks.end());
    count.insert(count.end(), more.count.begin(), more.count.end());
  }
  bool operator==(const Rows&) const = default;
};

template <class T>
std::vector<T> row_of(const std::vector<T>& all, std::int64_t row, int width) {
  const auto first = all.begin() + row * width;
  return std::vector<T>(first, first + width);
}

// The three ops in order over `step`; row r of it takes the inputs of lanes[row.lane] at row.pos.
inline Rows run(TestStep step, const std::vector<Tokens>& lanes, Cache& cache,
                exl3::Isa isa = exl3::Isa::kAvx512, int threads = 1) {
  static const Weights weights;
  step.pages = kTable;
  step.max_pages = kMaxPages;
  const std::size_t rows = step.rows.size();
  Tokens in(0, 0);
  for (const Row& row : step.rows) {
    const Tokens& lane = lanes[size(row.lane)];
    const auto add = [&](Floats& to, const Floats& from, int width) {
      const Floats one = row_of(from, row.pos, width);
      to.insert(to.end(), one.begin(), one.end());
    };
    add(in.qg, lane.qg, kHeads * 2 * kDim);
    add(in.k, lane.k, kKvHeads * kDim);
    add(in.v, lane.v, kKvHeads * kDim);
    add(in.index, lane.index, (kIndexHeads + 1) * kIndexDim);
  }
  Rows out{Floats(rows * kHeads * kDim, kNan), Floats(rows * kIndexHeads * kIndexDim, kNan),
           Floats(rows * kHeads * kDim, kNan), Ids(rows * kMaxBlocks, -7), Ids(rows, -7)};
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  AttnPrepareArgs prepare{};
  prepare.step = step.view();
  prepare.dims = kDims;
  prepare.qg = in.qg.data();
  prepare.k = in.k.data();
  prepare.v = in.v.data();
  prepare.index = in.index.data();
  prepare.q_norm = weights.q.data();
  prepare.k_norm = weights.k.data();
  prepare.iq_norm = weights.iq.data();
  prepare.ik_norm = weights.ik.data();
  prepare.rope = weights.rope.data();
  prepare.planes = cache.planes();
  prepare.window = cache.windows.data();
  prepare.slot_stride = kSlotStride;
  prepare.q = out.q.data();
  prepare.iq = out.iq.data();
  host::attn_prepare(prepare, context);

  IndexSelectArgs select{};
  select.step = step.view();
  select.dims = kDims;
  select.iq = out.iq.data();
  select.planes = cache.planes();
  select.blocks = out.blocks.data();
  select.count = out.count.data();
  select.max_context = kContext;
  std::vector<std::byte> scratch(host::workspace_bytes(select, threads));
  select.workspace = {scratch.data(), scratch.size()};
  host::index_select(select, context);

  AttentionArgs attend{};
  attend.step = step.view();
  attend.dims = kDims;
  attend.q = out.q.data();
  attend.qg = in.qg.data();
  attend.blocks = out.blocks.data();
  attend.count = out.count.data();
  attend.planes = cache.planes();
  attend.y = out.y.data();
  attend.max_context = kContext;
  host::attention(attend, context);
  return out;
}

}  // namespace flashnext::test
