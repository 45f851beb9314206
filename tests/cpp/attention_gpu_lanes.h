// Lanes of a page pool with pages out of order, and one attention layer over them.
#pragma once

#include "cpp/base/half.h"
#include "gpu_rig.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace flashnext::test {

using Floats = std::vector<float>;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

inline void append(Floats& to, const Floats& from) {
  to.insert(to.end(), from.begin(), from.end());
}

inline AttnDims attention_dims(int heads, int kv_heads, int max_blocks) {
  return {heads, kv_heads, 256, 64, 4, 128, 4, max_blocks, 1e-6f};
}

// `count` lanes of up to `tokens` positions; page 0 belongs to nobody.
struct Lanes {
  Lanes(int count, int tokens)
      : max_pages((tokens + kPageTokens - 1) / kPageTokens + 1), num_pages(count * max_pages + 1) {
    order.resize(size(count * max_pages));
    std::iota(order.begin(), order.end(), 1);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
  }
  StepParts step(std::vector<Segment> segments) const {
    return {std::move(segments), 0, order, max_pages};
  }
  std::int64_t page(int lane, int pos) const {
    return order[size(lane * max_pages + pos / kPageTokens)];
  }
  std::int64_t block_row(int lane, int block) const {
    return page(lane, 4 * block) * 16 + block % 16;
  }
  int max_pages;
  int num_pages;
  std::vector<std::int32_t> order;
};

inline constexpr int kSlots = 4;  // of state

struct Planes {
  Planes(Rig& rig, const AttnDims& d, const Lanes& lanes) : dims(d), pages(lanes.num_pages) {
    const std::vector<std::uint16_t> poison(half_count(), 0x7E00);
    planes.k = rig.put(poison);
    planes.v = rig.put(poison);
    planes.index_pooled = rig.put(Floats(pooled_count(), kNan));
    window = rig.put(Floats(window_count(), kNan));
  }
  // Random keys and values at the first `tokens` positions of every lane; the rest stays NaN.
  void fill(Rig& rig, const Lanes& lanes, int tokens, unsigned seed) {
    const std::size_t page_size = size(std::int64_t{dims.kv_heads} * kPageTokens * dims.head_dim);
    const std::size_t head_size = size(std::int64_t{kPageTokens} * dims.head_dim);
    for (std::uint16_t* plane : {planes.k, planes.v}) {
      const Floats values = uniform(half_count(), -1.5f, 1.5f, seed++);
      std::vector<std::uint16_t> bits(values.size(), 0x7E00);
      for (std::size_t i = 0; i < lanes.order.size(); ++i) {
        const int first = static_cast<int>(i) % lanes.max_pages * kPageTokens;
        const int n = std::clamp(tokens - first, 0, kPageTokens) * dims.head_dim;
        for (int h = 0; h < dims.kv_heads; ++h) {
          const std::size_t at = size(lanes.order[i]) * page_size + size(h) * head_size;
          const auto from = values.begin() + static_cast<std::ptrdiff_t>(at);
          std::transform(from, from + n, bits.begin() + static_cast<std::ptrdiff_t>(at),
                         f32_to_f16);
        }
      }
      rig.set(plane, bits);
    }
  }
  Floats keys(Rig& rig) const { return widened(rig.get(planes.k, half_count())); }
  Floats values(Rig& rig) const { return widened(rig.get(planes.v, half_count())); }
  Floats pooled(Rig& rig) const {
    return without_nan(rig.get(planes.index_pooled, pooled_count()));
  }
  Floats windows(Rig& rig) const { return without_nan(rig.get(window, window_count())); }
  std::size_t half_count() const {
    return size(std::int64_t{pages} * dims.kv_heads * kPageTokens * dims.head_dim);
  }
  std::size_t pooled_count() const {
    return size(std::int64_t{pages} * kPageTokens / dims.block * dims.index_dim);
  }
  std::size_t window_count() const { return size(kSlots * slot_stride()); }
  std::int64_t slot_stride() const { return std::int64_t{dims.block - 1} * dims.index_dim + 8; }

  AttnDims dims;
  int pages;
  KvPlanes planes{};
  float* window;  // (slots; block - 1, index_dim)

 private:
  // Untouched entries become a number that no other entry has.
  static Floats without_nan(Floats values) {
    for (float& v : values) v = std::isnan(v) ? -99.0f : v;
    return values;
  }
  static Floats widened(const std::vector<std::uint16_t>& bits) {
    Floats values(bits.size());
    std::transform(bits.begin(), bits.end(), values.begin(), f16_to_f32);
    return without_nan(values);
  }
};

// Projections of one sequence, by position.
struct LaneInputs {
  LaneInputs(const AttnDims& d, int tokens, unsigned seed)
      : qg(uniform(size(tokens) * size(2 * d.heads * d.head_dim), -2, 2, seed)),
        k(uniform(size(tokens) * size(d.kv_heads * d.head_dim), -2, 2, seed + 1)),
        v(uniform(size(tokens) * size(d.kv_heads * d.head_dim), -2, 2, seed + 2)),
        index(uniform(size(tokens) * size((d.index_heads + 1) * d.index_dim), -2, 2, seed + 3)) {}
  Floats qg, k, v, index;
};

struct Prepared {
  const float* qg;
  float* q;
  float* iq;
};

// attn_prepare of positions [first, first + n) of every lane, a segment each.
inline Prepared prepare_rows(Rig& rig, const AttnDims& d, const Planes& planes,
                             const StepView& step, const std::vector<const LaneInputs*>& lanes,
                             int first, int n) {
  auto rows = [&](Floats LaneInputs::*member, int width) {
    Floats all;
    for (const LaneInputs* lane : lanes) {
      const auto begin = (lane->*member).begin() + std::int64_t{first} * width;
      all.insert(all.end(), begin, begin + std::int64_t{n} * width);
    }
    return rig.put(all);
  };
  Floats rope(size(first + n) * 64);
  for (int pos = 0; pos < first + n; ++pos) {
    for (int i = 0; i < 32; ++i) {
      const double angle = pos * std::pow(1e7, -2.0 * i / 64);
      rope[size(pos * 64 + i)] = static_cast<float>(std::cos(angle));
      rope[size(pos * 64 + 32 + i)] = static_cast<float>(std::sin(angle));
    }
  }
  const std::size_t total = lanes.size() * size(n);
  AttnPrepareArgs a{};
  a.step = step;
  a.dims = d;
  a.qg = rows(&LaneInputs::qg, 2 * d.heads * d.head_dim);
  a.k = rows(&LaneInputs::k, d.kv_heads * d.head_dim);
  a.v = rows(&LaneInputs::v, d.kv_heads * d.head_dim);
  a.index = rows(&LaneInputs::index, (d.index_heads + 1) * d.index_dim);
  a.q_norm = rig.put(uniform(size(d.head_dim), 0.5f, 1.5f, 90));
  a.k_norm = rig.put(uniform(size(d.head_dim), 0.5f, 1.5f, 91));
  a.iq_norm = rig.put(uniform(size(d.index_dim), 0.5f, 1.5f, 92));
  a.ik_norm = rig.put(uniform(size(d.index_dim), 0.5f, 1.5f, 93));
  a.rope = rig.put(rope);
  a.planes = planes.planes;
  a.window = planes.window;
  a.slot_stride = planes.slot_stride();
  a.q = rig.put(Floats(total * size(d.heads * d.head_dim), kNan));
  a.iq = rig.put(Floats(total * size(d.index_heads * d.index_dim), kNan));
  rig.run(a);
  return {a.qg, a.q, a.iq};
}

// attention of rows with random queries and gates.
inline Floats attend_rows(Rig& rig, const AttnDims& d, const Planes& planes, const StepView& step,
                          const std::int32_t* count, const std::int32_t* blocks, int rows,
                          int max_context, unsigned seed) {
  const std::size_t n = size(rows) * size(d.heads * d.head_dim);
  AttentionArgs a{};
  a.step = step;
  a.dims = d;
  a.q = rig.put(uniform(n, -2, 2, seed));
  a.qg = rig.put(uniform(2 * n, -3, 3, seed + 1));
  a.blocks = blocks;
  a.count = count;
  a.planes = planes.planes;
  a.y = rig.put(Floats(n, kNan));
  a.max_context = max_context;
  rig.run(a);
  return rig.get(a.y, n);
}

}  // namespace flashnext::test
