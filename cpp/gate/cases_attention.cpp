// Cases of sparse attention over caches whose pages lie out of order.
#include "cpp/base/half.h"
#include "cpp/gate/cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace flashnext::gate {

namespace {

constexpr std::int32_t kLanes = 2;
constexpr std::int32_t kHeadDim = 256;
constexpr std::int32_t kRotary = 64;
constexpr std::int32_t kIndexHeads = 4;
constexpr std::int32_t kIndexDim = 128;
constexpr std::int32_t kBlock = 4;
constexpr std::int32_t kPageBlocks = kPageTokens / kBlock;

AttnDims dims_of(const AttnShape& s) {
  return {s.heads,   s.kv_heads, kHeadDim,     kRotary, kIndexHeads,
          kIndexDim, kBlock,     s.max_blocks, 1e-6f};
}

std::string name_of(const char* op, const AttnShape& s, std::int32_t pos0) {
  return std::string(op) + " " + std::to_string(s.heads) + " heads, " +
         std::to_string(s.max_blocks) + " blocks, from " + std::to_string(pos0);
}

// Rows [pos0, pos0 + n) of every lane, and the pages of both; page 0 belongs to nobody.
struct TwoLanes {
  std::int32_t max_pages, num_pages;
  std::vector<std::int32_t> pages;  // (lanes, max_pages)
  std::vector<Row> rows;
  std::vector<Segment> segments;

  TwoLanes(Random& random, std::int32_t pos0, std::int32_t n)
      : max_pages((pos0 + n + kPageTokens - 1) / kPageTokens + 1),
        num_pages(kLanes * max_pages + 1),
        pages(z(kLanes) * z(max_pages)) {
    std::iota(pages.begin(), pages.end(), 1);
    for (std::size_t i = pages.size(); i > 1; --i) {
      std::swap(pages[i - 1], pages[z(random.below(static_cast<std::int32_t>(i)))]);
    }
    // One lane's state stays in its slot, the other's moves into the last.
    for (std::int32_t l = 0; l < kLanes; ++l) {
      segments.push_back({l * n, n, pos0, l, l, l == 0 ? l : kLanes});
      for (std::int32_t i = 0; i < n; ++i) rows.push_back({1, 0, 0, pos0 + i, l, l});
    }
  }
};

struct StepBuffers {
  std::size_t rows, segments, pages;
  std::int32_t max_pages;
  StepView view(const Placed& p) const {
    StepView step{};
    step.head = p.head;
    step.rows = p.at<Row>(rows);
    step.segments = p.at<Segment>(segments);
    step.pages = p.at<std::int32_t>(pages);
    step.max_pages = max_pages;
    step.max_rows = p.max_rows;
    step.max_segments = kLanes;
    return step;
  }
};

StepBuffers add_step(Case& c, const TwoLanes& lanes) {
  c.rows = static_cast<std::int32_t>(lanes.rows.size());
  c.segments = kLanes;
  return {c.add("rows", lanes.rows), c.add("segments", lanes.segments), c.add("pages", lanes.pages),
          lanes.max_pages};
}

// Random keys or values at positions below `tokens` of every lane, NaN elsewhere.
std::vector<std::uint16_t> cache(Random& random, const AttnShape& s, const TwoLanes& lanes,
                                 std::int32_t tokens) {
  const std::size_t head = z(kPageTokens) * kHeadDim;
  const std::size_t page = z(s.kv_heads) * head;
  std::vector<std::uint16_t> plane(z(lanes.num_pages) * page, 0x7E00);
  for (std::size_t i = 0; i < lanes.pages.size(); ++i) {
    const auto first = static_cast<std::int32_t>(i) % lanes.max_pages * kPageTokens;
    const std::size_t n = z(std::clamp(tokens - first, 0, kPageTokens)) * kHeadDim;
    for (std::size_t h = 0; h < z(s.kv_heads); ++h) {
      const std::vector<std::uint16_t> values = random.halves(n, 0.8f);
      std::copy(values.begin(), values.end(),
                plane.begin() + static_cast<std::ptrdiff_t>(z(lanes.pages[i]) * page + h * head));
    }
  }
  return plane;
}

}  // namespace

Case attn_prepare_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows) {
  Random random(51);
  Case c;
  c.op = Op::kAttnPrepare;
  c.name = name_of("attn_prepare", s, pos0);
  const TwoLanes lanes(random, pos0, rows);
  const StepBuffers step = add_step(c, lanes);
  const std::size_t total = z(c.rows);
  const std::int32_t positions = pos0 + rows;
  std::vector<float> rope(z(positions) * kRotary);
  for (std::int32_t pos = 0; pos < positions; ++pos) {
    for (std::int32_t i = 0; i < kRotary / 2; ++i) {
      const double angle = pos * std::pow(1e7, -2.0 * i / kRotary);
      rope[z(pos * kRotary + i)] = static_cast<float>(std::cos(angle));
      rope[z(pos * kRotary + kRotary / 2 + i)] = static_cast<float>(std::sin(angle));
    }
  }
  const auto qg = c.add("qg", random.floats(total * z(2 * s.heads * kHeadDim)));
  const auto k = c.add("k", random.floats(total * z(s.kv_heads * kHeadDim)));
  const auto v = c.add("v", random.floats(total * z(s.kv_heads * kHeadDim)));
  const auto index = c.add("index", random.floats(total * z((kIndexHeads + 1) * kIndexDim)));
  const auto q_norm = c.add("q_norm", random.floats(kHeadDim, 0.2f, 1.0f));
  const auto k_norm = c.add("k_norm", random.floats(kHeadDim, 0.2f, 1.0f));
  const auto iq_norm = c.add("iq_norm", random.floats(kIndexDim, 0.2f, 1.0f));
  const auto ik_norm = c.add("ik_norm", random.floats(kIndexDim, 0.2f, 1.0f));
  const auto rope_at = c.add("rope", rope);
  // The past is there, so that blocks which it began are completed; keys of fp16 may differ by a
  // unit where a sum rounds the other way.
  const auto k_plane = c.add_output("keys", cache(random, s, lanes, pos0), 0, 5e-4);
  const auto v_plane = c.add_output("values", cache(random, s, lanes, pos0), 0, 0);
  const std::int64_t stride = (kBlock - 1) * kIndexDim + 32;
  const auto window = c.add_output("window", random.floats(z(kLanes + 1) * z(stride)), 0, 0);
  const auto pooled = c.add_output(
      "index_pooled", random.floats(z(lanes.num_pages) * kPageBlocks * kIndexDim), 0, 2e-6);
  const auto q = c.out<float>("q", z(s.heads * kHeadDim), 2e-6);
  const auto iq = c.out<float>("iq", z(kIndexHeads * kIndexDim), 2e-6);
  c.launch = [=](const Placed& p) {
    AttnPrepareArgs a{};
    a.step = step.view(p);
    a.dims = dims_of(s);
    a.qg = p.at<float>(qg);
    a.k = p.at<float>(k);
    a.v = p.at<float>(v);
    a.index = p.at<float>(index);
    a.q_norm = p.at<float>(q_norm);
    a.k_norm = p.at<float>(k_norm);
    a.iq_norm = p.at<float>(iq_norm);
    a.ik_norm = p.at<float>(ik_norm);
    a.rope = p.at<float>(rope_at);
    a.planes = {p.at<std::uint16_t>(k_plane), p.at<std::uint16_t>(v_plane), p.at<float>(pooled)};
    a.window = p.at<float>(window);
    a.slot_stride = stride;
    a.q = p.at<float>(q);
    a.iq = p.at<float>(iq);
    enqueue(p, a);
  };
  return c;
}

Case index_select_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows) {
  Random random(52);
  Case c;
  c.op = Op::kIndexSelect;
  c.name = name_of("index_select", s, pos0);
  const TwoLanes lanes(random, pos0, rows);
  const StepBuffers step = add_step(c, lanes);
  const auto small = [&](std::size_t n) {
    std::vector<float> v(n);
    for (float& x : v) x = static_cast<float>(random.below(5) - 2);
    return v;
  };
  std::vector<float> queries = small(z(c.rows) * z(kIndexHeads * kIndexDim));
  std::fill_n(queries.begin(), kIndexHeads * kIndexDim, 0.0f);  // a row whose scores are all zero
  const auto iq = c.add("iq", queries);
  const auto pooled = c.add("index_pooled", small(z(lanes.num_pages) * kPageBlocks * kIndexDim));
  const auto blocks =
      c.add_output("blocks", std::vector<std::int32_t>(z(c.rows) * z(s.max_blocks), -7), 0, 0);
  const auto count = c.out<std::int32_t>("count", 1);
  const std::int32_t context = lanes.max_pages * kPageTokens;
  c.launch = [=](const Placed& p) {
    IndexSelectArgs a{};
    a.step = step.view(p);
    a.dims = dims_of(s);
    a.iq = p.at<float>(iq);
    a.planes.index_pooled = p.at<float>(pooled);
    a.blocks = p.at<std::int32_t>(blocks);
    a.count = p.at<std::int32_t>(count);
    a.max_context = context;
    enqueue(p, a);
  };
  return c;
}

Case attention_case(const AttnShape& s, std::int32_t pos0, std::int32_t rows) {
  Random random(53);
  Case c;
  c.op = Op::kAttention;
  c.name = name_of("attention", s, pos0);
  const TwoLanes lanes(random, pos0, rows);
  const StepBuffers step = add_step(c, lanes);
  // A random choice of blocks where there are more than the budget.
  std::vector<std::int32_t> counts, chosen;
  for (const Row& row : lanes.rows) {
    const std::int32_t complete = (row.pos + 1) / kBlock;
    std::vector<std::int32_t> mine(z(s.max_blocks), -1);
    counts.push_back(complete > s.max_blocks ? s.max_blocks : -1);
    std::int32_t taken = 0;
    for (std::int32_t b = 0; complete > s.max_blocks && b < complete; ++b) {
      if (random.below(complete - b) < s.max_blocks - taken) mine[z(taken++)] = b;
    }
    chosen.insert(chosen.end(), mine.begin(), mine.end());
  }
  const std::size_t width = z(s.heads * kHeadDim);
  const auto q = c.add("q", random.floats(z(c.rows) * width));
  const auto qg = c.add("qg", random.floats(2 * z(c.rows) * width));
  const auto blocks = c.add("blocks", chosen);
  const auto count = c.add("count", counts);
  const auto k_plane = c.add("keys", cache(random, s, lanes, pos0 + rows));
  const auto v_plane = c.add("values", cache(random, s, lanes, pos0 + rows));
  const auto y = c.out<float>("y", width, 5e-6);
  const std::int32_t context = lanes.max_pages * kPageTokens;
  c.launch = [=](const Placed& p) {
    AttentionArgs a{};
    a.step = step.view(p);
    a.dims = dims_of(s);
    a.q = p.at<float>(q);
    a.qg = p.at<float>(qg);
    a.blocks = p.at<std::int32_t>(blocks);
    a.count = p.at<std::int32_t>(count);
    a.planes.k = p.at<std::uint16_t>(k_plane);
    a.planes.v = p.at<std::uint16_t>(v_plane);
    a.y = p.at<float>(y);
    a.max_context = context;
    enqueue(p, a);
  };
  return c;
}

}  // namespace flashnext::gate
