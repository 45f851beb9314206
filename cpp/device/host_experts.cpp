// The op experts on the host. A pair is one (row, slot). Pairs of the group are sorted by expert
// and taken in batches that fit the workspace; a run of pairs with one expert is a segment, whose
// weight tiles are decoded once for all of its rows. With one row every slot is a segment, and
// (segment, projection, output block) jobs keep all threads busy. Sums are exact integers, so no
// grouping changes a bit.
#include "cpp/base/errors.h"
#include "cpp/device/host_ops.h"
#include "cpp/exl3/activation.h"

#include <algorithm>

namespace flashnext::host {

namespace {

constexpr std::int32_t kBlock = 128;
constexpr std::int32_t kBatchPairs = 512;  // bounds the workspace, about 28 KB a pair

struct Segment {
  std::int32_t expert;
  std::int32_t begin;  // first pair within the batch
  std::int32_t count;
};

struct Scratch {
  std::int32_t* starts;  // (num_experts + 1) first sorted pair of an expert
  std::int32_t* order;   // (pairs of the group) pair ids sorted by expert, then by id
  Segment* segments;     // (batch)
  exl3::Prepared in[2];  // (batch, dim) for gate and up
  exl3::Prepared inner;  // (batch, inner) for down
  float* product[2];     // (batch, inner) gate, up; then gate holds silu(gate) * up
  std::int32_t batch;    // pairs of a full batch
  std::size_t bytes;
};

Scratch place(const ExpertsArgs& args, void* memory) {
  std::byte* base = static_cast<std::byte*>(memory);
  Scratch s{};
  const auto take = [&](std::size_t bytes) {
    std::byte* at = base == nullptr ? nullptr : base + s.bytes;
    s.bytes += (bytes + 255) / 256 * 256;
    return at;
  };
  const std::int32_t pairs = max_pairs(args);
  s.batch = std::min(pairs, kBatchPairs);
  const std::size_t batch = static_cast<std::size_t>(s.batch);
  s.starts = reinterpret_cast<std::int32_t*>(
      take(sizeof(std::int32_t) * static_cast<std::size_t>(args.num_experts + 1)));
  s.order =
      reinterpret_cast<std::int32_t*>(take(sizeof(std::int32_t) * static_cast<std::size_t>(pairs)));
  s.segments = reinterpret_cast<Segment*>(take(sizeof(Segment) * batch));
  const auto take_prepared = [&](std::int32_t in) {
    std::byte* at = take(exl3::prepared_bytes(s.batch, in));
    return at == nullptr ? exl3::Prepared{} : exl3::place_prepared(at, s.batch, in);
  };
  for (exl3::Prepared& p : s.in) p = take_prepared(args.dim);
  s.inner = take_prepared(args.inner);
  for (float*& product : s.product) {
    product = reinterpret_cast<float*>(
        take(sizeof(float) * batch * static_cast<std::size_t>(args.inner)));
  }
  return s;
}

std::int32_t expert_of(const ExpertsArgs& args, std::int32_t pair) {
  return args.ids != nullptr ? args.ids[pair] : pair % args.slots;
}

bool is_in_group(const ExpertsArgs& args, std::int32_t expert) {
  return args.group == nullptr || args.group[expert] == args.only;
}

// Counting sort of the group's pairs by expert; returns their number.
std::int32_t sort_pairs(const ExpertsArgs& args, std::int32_t pairs, const Scratch& s) {
  std::fill(s.starts, s.starts + args.num_experts + 1, 0);
  for (std::int32_t pair = 0; pair < pairs; ++pair) {
    const std::int32_t expert = expert_of(args, pair);
    check(expert >= 0 && expert < args.num_experts, "experts: expert id out of range");
    if (is_in_group(args, expert)) ++s.starts[expert + 1];
  }
  for (std::int32_t e = 0; e < args.num_experts; ++e) s.starts[e + 1] += s.starts[e];
  const std::int32_t in_group = s.starts[args.num_experts];
  check(in_group <= max_pairs(args), "experts: more pairs than max_pairs in the group");
  for (std::int32_t pair = 0; pair < pairs; ++pair) {
    const std::int32_t expert = expert_of(args, pair);
    if (is_in_group(args, expert)) s.order[s.starts[expert]++] = pair;
  }
  return in_group;
}

Exl3Weight weight_of(const ExpertsArgs& args, std::int32_t expert, int projection) {
  const ExpertRef& ref = args.experts[expert];
  const bool down = projection == 2;
  return {
      ref.trellis[projection],      ref.suh[projection],          ref.svh[projection],    nullptr,
      down ? args.inner : args.dim, down ? args.dim : args.inner, args.words[projection], 0};
}

void run_batch(const ExpertsArgs& args, Context& context, const Scratch& s,
               const std::int32_t* order, std::int32_t pairs) {
  std::int32_t segments = 0;
  for (std::int32_t i = 0; i < pairs; ++i) {
    const std::int32_t expert = expert_of(args, order[i]);
    if (segments > 0 && s.segments[segments - 1].expert == expert &&
        s.segments[segments - 1].count < exl3::kRowGroup) {
      ++s.segments[segments - 1].count;
    } else {
      s.segments[segments++] = {expert, i, 1};
    }
  }
  const std::int64_t grain = pairs > 64 ? 4 : 1;

  context.pool.parallel_for(2 * pairs, 2 * grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int32_t i = static_cast<std::int32_t>(job / 2);
      const int projection = static_cast<int>(job % 2);
      const float* x = args.x + static_cast<std::int64_t>(order[i] / args.slots) * args.dim;
      exl3::prepare(weight_of(args, expert_of(args, order[i]), projection), x, args.dim,
                    args.levels, context.isa, 0, 1, exl3::rows_of(s.in[projection], i, 1));
    }
  });

  const std::int32_t inner_blocks = args.inner / kBlock;
  context.pool.parallel_for(
      static_cast<std::int64_t>(segments) * 2 * inner_blocks, 1,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t job = begin; job < end; ++job) {
          const Segment& segment = s.segments[job / (2 * inner_blocks)];
          const std::int32_t local = static_cast<std::int32_t>(job % (2 * inner_blocks));
          const int projection = local / inner_blocks;
          const std::int32_t block = local % inner_blocks;
          exl3::multiply(
              weight_of(args, segment.expert, projection),
              exl3::rows_of(s.in[projection], segment.begin, segment.count), context.isa, block,
              block + 1,
              s.product[projection] + static_cast<std::int64_t>(segment.begin) * args.inner,
              args.inner);
        }
      });

  context.pool.parallel_for(pairs, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int32_t pair = static_cast<std::int32_t>(i);
      float* h = s.product[0] + i * args.inner;
      exl3::silu_times(context.isa, h, s.product[1] + i * args.inner, args.inner);
      exl3::prepare(weight_of(args, expert_of(args, order[i]), 2), h, args.inner, args.levels,
                    context.isa, 0, 1, exl3::rows_of(s.inner, pair, 1));
    }
  });

  const std::int32_t dim_blocks = args.dim / kBlock;
  context.pool.parallel_for(
      static_cast<std::int64_t>(segments) * dim_blocks, 1,
      [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t job = begin; job < end; ++job) {
          const Segment& segment = s.segments[job / dim_blocks];
          const std::int32_t block = static_cast<std::int32_t>(job % dim_blocks);
          exl3::multiply(weight_of(args, segment.expert, 2),
                         exl3::rows_of(s.inner, segment.begin, segment.count), context.isa, block,
                         block + 1, args.y, args.dim, order + segment.begin);
        }
      });
}

}  // namespace

std::size_t workspace_bytes(const ExpertsArgs& args, int) {
  const std::size_t routed = place(args, nullptr).bytes;
  if (args.shared == nullptr) return routed;
  return std::max(routed, place(shared_alone(args), nullptr).bytes);
}

void experts(const ExpertsArgs& args, Context& context) {
  const std::int32_t rows = rows_of(args.rows);
  if (rows <= 0) return;
  const Scratch s = place(args, args.workspace.data);
  check(args.workspace.bytes >= s.bytes, "experts: workspace too small");
  const std::int32_t pairs = sort_pairs(args, rows * args.slots, s);
  for (std::int32_t first = 0; first < pairs; first += s.batch) {
    run_batch(args, context, s, s.order + first, std::min(s.batch, pairs - first));
  }
  if (args.shared != nullptr) experts(shared_alone(args), context);
}

}  // namespace flashnext::host
