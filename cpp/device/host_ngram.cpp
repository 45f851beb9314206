// ngram_hash, ngram_gather, ngram_decode: rows of the hashed n-gram table (spec/model.md 6).
#include "cpp/device/host_rows.h"

#include <cstring>

namespace flashnext::host {

void ngram_hash(const NgramHashArgs& args, Context&) {
  check(args.heads >= 0 && args.heads <= kMaxNgramHeads, "ngram_hash: number of heads");
  const std::int32_t rows = args.step.head->rows;
  check(rows >= 0 && rows <= args.step.max_rows,
        "ngram_hash: more rows than the program was built for");
  const auto multiplier = [&](int i) { return static_cast<std::uint64_t>(args.multipliers[i]); };
  for (std::int32_t r = 0; r < rows; ++r) {
    const Row& row = args.step.rows[r];
    // Walking back, everything beyond a separator reads as the separator.
    const std::int32_t s1 = row.prev1;
    const std::int32_t s2 = s1 == args.separator ? args.separator : row.prev2;
    check_token(row.token, "ngram_hash", r);
    check_token(s1, "ngram_hash (previous token)", r);
    check_token(s2, "ngram_hash (token before the previous)", r);
    const std::uint64_t h2 = static_cast<std::uint64_t>(row.token) * multiplier(0) ^
                             static_cast<std::uint64_t>(s1) * multiplier(1);
    const std::uint64_t h3 = h2 ^ static_cast<std::uint64_t>(s2) * multiplier(2);
    for (std::int32_t i = 0; i < args.heads; ++i) {
      const std::uint64_t hash = i < args.heads / 2 ? h2 : h3;
      const auto size = static_cast<std::uint64_t>(args.sizes[i]);
      args.ids[std::int64_t{r} * args.heads + i] =
          args.offsets[i] + static_cast<std::int64_t>(hash % size);
    }
  }
}

void ngram_gather(const NgramGatherArgs& args, Context& context) {
  const std::int64_t n = std::int64_t{checked_rows(args.rows, "ngram_gather")} * args.heads;
  for (std::int64_t i = 0; i < n; ++i) {
    if (args.ids[i] < 0 || args.ids[i] >= args.table_rows) {
      throw InputError("ngram_gather: row id " + std::to_string(args.ids[i]) + " of head " +
                       std::to_string(i % args.heads) + " in row " +
                       std::to_string(i / args.heads) + " is outside of the table of " +
                       std::to_string(args.table_rows) + " rows");
    }
  }
  // Rows of a mapped file may have to come from the disk: small pieces keep every thread waiting
  // for a page of its own.
  const auto bytes = static_cast<std::size_t>(args.row_bytes);
  context.pool.parallel_for(n, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t id = args.ids[i];
      std::memcpy(args.packed + i * args.row_bytes,
                  args.shards[id / args.shard_rows] + (id % args.shard_rows) * args.row_bytes,
                  bytes);
    }
  });
}

void ngram_decode(const NgramDecodeArgs& args, Context& context) {
  check(args.bits >= 0 && args.bits <= 8, "ngram_decode: bits");
  const std::int64_t n = std::int64_t{checked_rows(args.rows, "ngram_decode")} * args.heads;
  context.pool.parallel_for(
      n, grain_for(64 * std::int64_t{args.width}), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::byte* row = args.packed + i * args.row_bytes;
          const std::uint16_t* bias =
              args.bias == nullptr ? nullptr : args.bias + i % args.heads * args.width;
          float* e = args.e + i * args.width;
          if (args.bits > 0) {
            exl3::ring_row(row, args.bits, args.width, bias, e);
            continue;
          }
          for (std::int32_t k = 0; k < args.width; ++k) {
            const float value = f16_to_f32(load_u16(row + std::int64_t{k} * 2));
            e[k] = bias == nullptr ? value : f16_to_f32(f32_to_f16(value + f16_to_f32(bias[k])));
          }
        }
      });
}

}  // namespace flashnext::host
