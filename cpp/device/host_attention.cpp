// Attention over the allowed positions of a row, on the host (spec/model.md 4, spec/numerics.md 4).
#include "cpp/base/errors.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/host_vec.h"

#include <algorithm>

namespace flashnext::host {

namespace {

constexpr int kMaxAttendHeads = 16;  // heads that one piece of work carries

// One row for some heads that read the same kv head. The allowed positions, ascending: all of
// 0 .. entries - 1 when `blocks` is null, else the tokens of the blocks, then the tail.
struct AttendRow {
  const float* q;              // (heads, dim)
  const float* gate;           // heads of 2 * dim floats apart
  float* y;                    // (heads, dim)
  const std::uint16_t* k;      // plane (pages, kv_heads, 64, dim), at the kv head
  const std::uint16_t* v;      // likewise
  const std::int32_t* pages;   // (max_pages)
  const std::int32_t* blocks;  // (count) ascending, or null
  std::int64_t page_stride;    // elements
  int heads;
  int dim;
  int block;
  int selected;  // count * block
  int tail;      // first position of the tail
  int entries;
};

// Keys and values of entries [first, first + 64) or to the end; how many.
int gather_tile(const AttendRow& row, int first, const std::uint16_t** key,
                const std::uint16_t** value) {
  const int n = std::min(kPageTokens, row.entries - first);
  for (int e = 0; e < n; ++e) {
    const int entry = first + e;
    int pos = entry;
    if (row.blocks != nullptr) {
      pos = entry < row.selected ? row.blocks[entry / row.block] * row.block + entry % row.block
                                 : row.tail + (entry - row.selected);
    }
    const std::int64_t at =
        row.pages[pos / kPageTokens] * row.page_stride + std::int64_t{pos % kPageTokens} * row.dim;
    key[e] = row.k + at;
    value[e] = row.v + at;
  }
  return n;
}

}  // namespace
}  // namespace flashnext::host

// clang-format off
#include "cpp/device/host_vec_begin_4.inc"
#include "cpp/device/host_attention_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_8.inc"
#include "cpp/device/host_attention_kernels.inc"
#include "cpp/device/host_vec_end.inc"

#include "cpp/device/host_vec_begin_16.inc"
#include "cpp/device/host_attention_kernels.inc"
#include "cpp/device/host_vec_end.inc"
// clang-format on

namespace flashnext::host {

void attention(const AttentionArgs& args, Context& context) {
  const AttnDims& dims = args.dims;
  check(dims.head_dim % 16 == 0, "attention heads are a multiple of 16 wide");
  check(dims.heads % dims.kv_heads == 0, "attention heads are a multiple of the kv heads");
  const StepView& step = args.step;
  const std::int64_t rows = step.head->rows;
  const int group = dims.heads / dims.kv_heads;
  // With few rows the heads of a kv head are spread over the threads; heads do not mix, so the
  // bits stay.
  const bool few = rows * dims.kv_heads < 2 * context.pool.threads();
  const int part = std::min(few ? 4 : kMaxAttendHeads, group);
  const int parts = (group + part - 1) / part;
  const auto attend = pick(context.isa, lanes4::attend, lanes8::attend, lanes16::attend);

  const std::int64_t pieces = rows * dims.kv_heads * parts;
  context.pool.parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t piece = begin; piece < end; ++piece) {
      const std::int64_t r = piece / (dims.kv_heads * parts);
      const std::int64_t kv = piece / parts % dims.kv_heads;
      const int first = static_cast<int>(piece % parts) * part;
      const std::int64_t head = r * dims.heads + kv * group + first;
      const Row& at = step.rows[r];
      AttendRow row;
      row.q = args.q + head * dims.head_dim;
      row.gate = args.qg + head * 2 * dims.head_dim + dims.head_dim;
      row.y = args.y + head * dims.head_dim;
      row.page_stride = std::int64_t{dims.kv_heads} * kPageTokens * dims.head_dim;
      row.k = args.planes.k + kv * kPageTokens * dims.head_dim;
      row.v = args.planes.v + kv * kPageTokens * dims.head_dim;
      row.pages = step.pages + std::int64_t{at.lane} * step.max_pages;
      row.heads = std::min(part, group - first);
      row.dim = dims.head_dim;
      row.block = dims.block;
      const std::int32_t count = args.count[r];
      row.blocks = count < 0 ? nullptr : args.blocks + r * dims.max_blocks;
      row.selected = count < 0 ? 0 : count * dims.block;
      row.tail = count < 0 ? 0 : (at.pos + 1) / dims.block * dims.block;
      row.entries = row.selected + at.pos + 1 - row.tail;
      attend(row);
    }
  });
}

std::size_t workspace_bytes(const AttentionArgs&, int) { return 0; }

}  // namespace flashnext::host
