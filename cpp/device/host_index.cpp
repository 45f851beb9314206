// What attention needs before it runs, on the host: norms, RoPE and cache writes, and the selection
// of the blocks that a row may see (spec/model.md 4).
#include "cpp/base/errors.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/host_vec.h"

#include <algorithm>
#include <array>

// clang-format off
#include "cpp/device/host_vec_begin_4.inc"
#include "cpp/device/host_index_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_8.inc"
#include "cpp/device/host_index_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_16.inc"
#include "cpp/device/host_index_kernels.inc"
#include "cpp/device/host_vec_end.inc"
// clang-format on

namespace flashnext::host {

namespace {

constexpr int kMaxHead = 512;        // bounds local arrays
constexpr std::int64_t kChunk = 64;  // blocks whose scores one piece of work computes
constexpr std::int64_t kBatch = 16;  // rows whose scores the workspace holds at once

void check_dims(const AttnDims& dims) {
  check(dims.head_dim % 16 == 0 && dims.head_dim <= kMaxHead,
        "attention heads are a multiple of 16 and at most 512 wide");
  check(dims.index_dim % 16 == 0 && dims.index_dim <= kMaxHead,
        "index heads are a multiple of 16 and at most 512 wide");
  check(dims.block > 0 && kPageTokens % dims.block == 0, "selection blocks divide a page");
  check(dims.rotary % 2 == 0 && dims.rotary <= std::min(dims.head_dim, dims.index_dim),
        "the rotated dims fit the heads");
}

std::int64_t page_of(const StepView& step, const Row& row, std::int32_t pos) {
  return step.pages[std::int64_t{row.lane} * step.max_pages + pos / kPageTokens];
}

// fp16, round to nearest even. Not clamped: beyond the range it becomes infinity, which shows as
// infinity or NaN in the rows that see it. The norm keeps K far from that.
void narrow(const float* x, int n, std::uint16_t* y) {
  for (int i = 0; i < n; ++i) y[i] = f32_to_f16(x[i]);
}

// Order of scores as unsigned numbers: scores are >= 0, and NaN is above all.
std::uint32_t rank_of(float score) { return math::to_bits(score); }

// The `want` best of `n` scores by (score descending, index ascending), ascending by index; n >=
// want. The want-th score is found digit by digit from the top.
void select_best(const float* score, std::int64_t n, std::int64_t want, std::int32_t* out) {
  constexpr int kShifts[] = {21, 10, 0};
  constexpr int kWidths[] = {11, 11, 10};
  std::uint32_t prefix = 0;  // digits of the want-th score found so far
  std::uint32_t mask = 0;
  std::int64_t left = want;  // how many of those that share the prefix are taken
  for (int pass = 0; pass < 3; ++pass) {
    std::array<std::int64_t, 2048> count{};
    const std::uint32_t low = (1u << kWidths[pass]) - 1;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint32_t rank = rank_of(score[i]);
      if ((rank & mask) == prefix) ++count[(rank >> kShifts[pass]) & low];
    }
    std::uint32_t digit = low;
    while (count[digit] < left) left -= count[digit--];
    prefix |= digit << kShifts[pass];
    mask |= low << kShifts[pass];
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t rank = rank_of(score[i]);
    if (rank < prefix || (rank == prefix && left == 0)) continue;
    if (rank == prefix) --left;
    *out++ = static_cast<std::int32_t>(i);
  }
}

std::int64_t batch_rows(const IndexSelectArgs& args) {
  return std::min<std::int64_t>(kBatch, args.step.max_rows);
}

std::int64_t score_stride(const IndexSelectArgs& args) {
  return args.max_context / args.dims.block;
}

}  // namespace

void attn_prepare(const AttnPrepareArgs& args, Context& context) {
  const AttnDims& dims = args.dims;
  check_dims(dims);
  const StepView& step = args.step;
  const std::int64_t rows = step.head->rows;
  const int dim = dims.head_dim;
  const int idim = dims.index_dim;
  const auto rms = pick(context.isa, lanes4::rms_head, lanes8::rms_head, lanes16::rms_head);
  const auto rope = pick(context.isa, lanes4::rope_head, lanes8::rope_head, lanes16::rope_head);
  const auto mean = pick(context.isa, lanes4::mean_rows, lanes8::mean_rows, lanes16::mean_rows);

  // Units of a row: query heads, kv heads, index query heads.
  const std::int64_t units = dims.heads + dims.kv_heads + dims.index_heads;
  context.pool.parallel_for(rows * units, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t r = piece / units;
      std::int64_t unit = piece % units;
      const Row& row = step.rows[r];
      const float* table = args.rope + std::int64_t{row.pos} * dims.rotary;
      if (unit < dims.heads) {
        const std::int64_t head = r * dims.heads + unit;
        float* q = args.q + head * dim;
        rms(args.qg + head * 2 * dim, dim, args.q_norm, dims.eps, q);
        rope(q, table, dims.rotary);
        continue;
      }
      unit -= dims.heads;
      if (unit < dims.kv_heads) {
        const std::int64_t page = page_of(step, row, row.pos);
        const std::int64_t slot = row.pos % kPageTokens;
        const std::int64_t from = (r * dims.kv_heads + unit) * dim;
        const std::int64_t to = ((page * dims.kv_heads + unit) * kPageTokens + slot) * dim;
        float k[kMaxHead];
        rms(args.k + from, dim, args.k_norm, dims.eps, k);
        rope(k, table, dims.rotary);
        narrow(k, dim, args.planes.k + to);
        narrow(args.v + from, dim, args.planes.v + to);
        continue;
      }
      unit -= dims.kv_heads;
      const float* index = args.index + (r * (dims.index_heads + 1) + unit) * idim;
      float* iq = args.iq + (r * dims.index_heads + unit) * idim;
      rms(index, idim, args.iq_norm, dims.eps, iq);
      rope(iq, table, dims.rotary);
    }
  });

  // Blocks that a row of this step completes; their first keys may be of an earlier step.
  const WindowPushArgs push = index_push(args);
  context.pool.parallel_for(rows, 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const Row& row = step.rows[r];
      if ((row.pos + 1) % dims.block != 0) continue;
      const Segment& segment = step.segments[row.segment];
      const float* window = args.window + segment.state_in * args.slot_stride;
      const float* raw[kPageTokens];
      for (int i = 0; i < dims.block; ++i) {
        const std::int64_t t = r - segment.row0 - (dims.block - 1 - i);  // row of the segment
        raw[i] = t >= 0 ? push.x + (segment.row0 + t) * push.x_stride
                        : window + (dims.block - 1 + t) * idim;
      }
      const std::int32_t start = row.pos + 1 - dims.block;
      const std::int64_t at = page_of(step, row, start) * kPageTokens + start % kPageTokens;
      float* pooled = args.planes.index_pooled + at / dims.block * idim;
      float pool[kMaxHead];
      mean(raw, dims.block, idim, pool);
      rms(pool, idim, args.ik_norm, dims.eps, pooled);
      rope(pooled, args.rope + std::int64_t{start} * dims.rotary, dims.rotary);
    }
  });
  window_push(push, context);
}

void index_select(const IndexSelectArgs& args, Context& context) {
  const AttnDims& dims = args.dims;
  check_dims(dims);
  check(args.workspace.bytes >= workspace_bytes(args, context.pool.threads()),
        "index_select: the workspace is too small");
  const StepView& step = args.step;
  const std::int64_t rows = step.head->rows;
  const std::int64_t stride = score_stride(args);
  const std::int64_t page_blocks = kPageTokens / dims.block;
  const float scale = math::div(1.0f, math::sqrt(static_cast<float>(dims.index_dim)));
  const auto scores_of =
      pick(context.isa, lanes4::index_scores, lanes8::index_scores, lanes16::index_scores);
  float* scores = static_cast<float*>(args.workspace.data);  // (batch, stride)

  std::int64_t batch[kBatch];  // rows that select
  std::int64_t size = 0;
  std::int64_t most = 0;  // complete blocks, over the batch
  const auto blocks_of = [&](std::int64_t r) {
    return std::int64_t{(step.rows[r].pos + 1) / dims.block};
  };
  const auto run_batch = [&] {
    const std::int64_t chunks = (most + kChunk - 1) / kChunk;
    context.pool.parallel_for(size * chunks, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t piece = begin; piece < end; ++piece) {
        const std::int64_t i = piece / chunks;
        const std::int64_t r = batch[i];
        const std::int64_t first = piece % chunks * kChunk;
        const std::int64_t n = std::min(kChunk, blocks_of(r) - first);
        if (n <= 0) continue;
        const float* key[kChunk];
        for (std::int64_t j = 0; j < n; ++j) {
          const auto pos = static_cast<std::int32_t>((first + j) * dims.block);
          const std::int64_t block =
              page_of(step, step.rows[r], pos) * page_blocks + (first + j) % page_blocks;
          key[j] = args.planes.index_pooled + block * dims.index_dim;
        }
        scores_of(args.iq + r * dims.index_heads * dims.index_dim, dims.index_heads, dims.index_dim,
                  key, static_cast<int>(n), scale, scores + i * stride + first);
      }
    });
    context.pool.parallel_for(size, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        select_best(scores + i * stride, blocks_of(batch[i]), dims.max_blocks,
                    args.blocks + batch[i] * dims.max_blocks);
      }
    });
    size = 0;
    most = 0;
  };

  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t blocks = blocks_of(r);
    if (blocks <= dims.max_blocks) {
      args.count[r] = -1;
      continue;
    }
    check(blocks <= stride, "index_select: a row lies beyond max_context");
    args.count[r] = dims.max_blocks;
    batch[size++] = r;
    most = std::max(most, blocks);
    if (size == batch_rows(args)) run_batch();
  }
  if (size > 0) run_batch();
}

std::size_t workspace_bytes(const IndexSelectArgs& args, int) {
  return static_cast<std::size_t>(batch_rows(args) * score_stride(args)) * sizeof(float);
}

}  // namespace flashnext::host
