// The n-gram table (spec/exl3.md 1.5, spec/model.md 6): shards in order, hash constants held
// against the config. Only headers and constants are read, never a row.
#include "cpp/base/half.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/ngram_hash.h"
#include "cpp/checkpoint/safetensors.h"

#include <charconv>
#include <cstring>
#include <optional>

namespace flashnext {
namespace {

constexpr std::string_view kShard = "shard_";

// N of "shard_N" + suffix, written as the decimal number without leading zeros.
std::optional<std::int64_t> shard_number(std::string_view member, std::string_view suffix) {
  if (!member.starts_with(kShard) || !member.ends_with(suffix)) return std::nullopt;
  if (member.size() <= kShard.size() + suffix.size()) return std::nullopt;
  const std::string_view digits =
      member.substr(kShard.size(), member.size() - kShard.size() - suffix.size());
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  if (number < 0 || std::to_string(number) != digits) return std::nullopt;
  return number;
}

using Shards = std::map<std::int64_t, const Tensor*>;

void add_shard(Shards& shards, std::int64_t number, const Tensor& tensor) {
  if (!shards.emplace(number, &tensor).second) {
    throw CheckpointError(tensor.name + ": the table exists both in one piece and in shards (" +
                          shards.at(number)->name + "). Remove one of the two");
  }
}

}  // namespace

void Binder::bind_ngram(const TensorRule& rule) {
  std::uint64_t bytes = 0;
  bind_ngram_rows(rule, bytes);
  bind_ngram_hash(rule, bytes);
  bound_.family_bytes[rule.family] += bytes;
}

void Binder::bind_ngram_rows(const TensorRule& rule, std::uint64_t& bytes) {
  Shards packed, plain;
  const auto [begin, end] = files_.with_prefix(rule.name + ".");
  for (const Tensor* t = begin; t != end; ++t) {
    const std::string_view member = std::string_view(t->name).substr(rule.name.size() + 1);
    if (member == "trellis") add_shard(packed, 0, *t);
    if (member == "weight") add_shard(plain, 0, *t);
    if (const auto number = shard_number(member, ".trellis")) add_shard(packed, *number, *t);
    if (const auto number = shard_number(member, ".weight")) add_shard(plain, *number, *t);
  }
  for (const auto& [number, tensor] : packed) mark(*tensor);
  for (const auto& [number, tensor] : plain) mark(*tensor);  // redundant beside packed rows
  const Shards& shards = packed.empty() ? plain : packed;
  if (shards.empty()) return missing(rule.name + ".shard_0.trellis");

  const std::int64_t width = rule.shape[1];
  const Tensor& first = *shards.begin()->second;
  NgramTable& table = bound_.ngram;
  std::int64_t expected = 0;
  for (const auto& [number, tensor] : shards) {
    if (number != expected) {
      throw CheckpointError(rule.name + ": shard_" + std::to_string(expected) +
                            " is missing, shard_" + std::to_string(number) +
                            " exists. Download the missing file");
    }
    ++expected;
    const std::string found =
        std::string(to_string(tensor->dtype)) + " " + shape_text(tensor->shape);
    if (packed.empty() && tensor->dtype != Dtype::kF16) {
      throw CheckpointError(tensor->name + ": is " + found +
                            "; an unquantised n-gram table must be F16. Quantise it with "
                            "exllamav3, or convert it to F16");
    }
    const bool good =
        tensor->shape.size() == 2 && tensor->shape[0] > 0 &&
        (packed.empty() ? tensor->shape[1] == width
                        : tensor->dtype == Dtype::kI16 && tensor->shape[1] % (width / 16) == 1 &&
                              tensor->shape[1] > 1 && tensor->shape[1] <= 1 + 8 * (width / 16));
    if (!good) {
      throw CheckpointError(tensor->name + ": is " + found + ", but rows of the n-gram table are " +
                            (packed.empty() ? "[rows, " + std::to_string(width) + "]"
                                            : "I16 [rows, 1 + " + std::to_string(width / 16) +
                                                  " K] with K = 1 to 8") +
                            ". Download the file again");
    }
    if (tensor->shape[1] != first.shape[1]) {
      throw CheckpointError(tensor->name + ": has rows of " + std::to_string(tensor->shape[1]) +
                            " words, but " + first.name + " has " + std::to_string(first.shape[1]) +
                            ". Download the files again");
    }
    const bool last = expected == static_cast<std::int64_t>(shards.size());
    if (last ? tensor->shape[0] > first.shape[0] : tensor->shape[0] != first.shape[0]) {
      throw CheckpointError(tensor->name + ": has " + std::to_string(tensor->shape[0]) +
                            " rows, but " + first.name + " has " + std::to_string(first.shape[0]) +
                            "; only the last shard may be shorter. Download the files again");
    }
    table.shards.push_back(tensor->data);
    table.rows += tensor->shape[0];
    bytes += tensor->bytes;
    advise(tensor->data, tensor->bytes, Advice::kRandom);
  }
  table.shard_rows = first.shape[0];
  table.bits = packed.empty() ? 0 : static_cast<std::int32_t>(first.shape[1] / (width / 16));
  table.row_bytes = static_cast<std::int32_t>(2 * first.shape[1]);
  if (!packed.empty()) check_ngram_metadata(rule, first);
  if (table.rows != rule.shape[0]) {
    bound_.notes.push_back(rule.name + ": has " + std::to_string(table.rows) +
                           " rows, config.json " + "derives " + std::to_string(rule.shape[0]));
  }

  const Tensor* bias = take(rule.name + ".head_bias");
  if (bias == nullptr) {
    if (!packed.empty()) missing(rule.name + ".head_bias");
    return;
  }
  expect_tensor(*bias, Dtype::kF16, {bound_.shape.ngram_heads(), width});
  checks_.push_back({bias, false});
  table.bias.resize(bias->bytes / 2);
  std::memcpy(table.bias.data(), bias->data, bias->bytes);
  bytes += bias->bytes;
}

// What the writer says about its rows must be what they are.
void Binder::check_ngram_metadata(const TensorRule& rule, const Tensor& first) const {
  const TensorFiles::File& file = files_.files()[first.file];
  const auto format = file.metadata.find("format");
  if (format == file.metadata.end() || format->second != "exl3_ngram_trellis") return;
  const NgramTable& table = bound_.ngram;
  const std::pair<const char*, std::string> expected[] = {
      {"version", "1"},
      {"codebook", "mul1"},
      {"K", std::to_string(table.bits)},
      {"row_dim", std::to_string(rule.shape[1])},
      {"rows", std::to_string(table.rows)},
      {"shard_rows", std::to_string(table.shard_rows)},
  };
  for (const auto& [key, value] : expected) {
    const auto found = file.metadata.find(key);
    if (found == file.metadata.end() || found->second == value) continue;
    throw CheckpointError(file.name + ": its metadata say " + key + " = " + found->second +
                          ", but " + rule.name + " needs " + value +
                          ". Download the file again, or quantise the table again with mul1");
  }
}

// An I64 constant under its own name or that of the original checkpoint; equal when both exist.
std::vector<std::int64_t> Binder::ngram_constants(const std::string& name, const std::string& alias,
                                                  std::int64_t length, std::uint64_t& bytes) {
  std::vector<std::int64_t> values;
  for (const std::string& candidate : {name, alias}) {
    const Tensor* tensor = take(candidate);
    if (tensor == nullptr) continue;
    expect_tensor(*tensor, Dtype::kI64, {length});
    std::vector<std::int64_t> stored(static_cast<std::size_t>(length));
    std::memcpy(stored.data(), tensor->data, tensor->bytes);
    bytes += tensor->bytes;
    if (!values.empty() && values != stored) {
      throw CheckpointError(alias + ": differs from " + name + ". Download the files again");
    }
    values = std::move(stored);
  }
  if (values.empty()) missing(name);
  return values;
}

void Binder::bind_ngram_hash(const TensorRule& rule, std::uint64_t& bytes) {
  NgramTable& table = bound_.ngram;
  const ModelShape& shape = bound_.shape;
  const std::string above = rule.name.substr(0, rule.name.rfind('.'));
  const std::int64_t heads = shape.ngram_heads();
  table.offsets =
      ngram_constants(rule.name + ".head_offsets", above + ".ngram_heads_offsets", heads, bytes);
  table.sizes = ngram_constants(rule.name + ".head_vocab_sizes", above + ".ngram_heads_vocab_sizes",
                                heads, bytes);
  table.multipliers = ngram_constants(rule.name + ".layer_multipliers",
                                      above + ".layer_multipliers", shape.ngram_size, bytes);
  if (table.offsets.empty() || table.sizes.empty() || table.multipliers.empty() ||
      table.shards.empty()) {
    return;  // reported as missing
  }
  const NgramHash hash = derive_ngram_hash(shape);
  const auto compare = [&](const char* what, const std::vector<std::int64_t>& stored,
                           const std::vector<std::int64_t>& derived) {
    for (std::size_t i = 0; i < stored.size(); ++i) {
      if (stored[i] == derived[i]) continue;
      throw CheckpointError(
          rule.name + "." + what + ": element " + std::to_string(i) + " is " +
          std::to_string(stored[i]) + ", but config.json derives " + std::to_string(derived[i]) +
          " (vocab_size, ngram_vocab_size_base, heads_per_ngram, seed). Check that config.json "
          "belongs to this table");
    }
  };
  compare("head_offsets", table.offsets, hash.offsets);
  compare("head_vocab_sizes", table.sizes, hash.sizes);
  compare("layer_multipliers", table.multipliers, hash.multipliers);
  // The derived ranges are disjoint and ascending; what remains is that the table holds them all.
  const std::int64_t needed = table.offsets.back() + table.sizes.back();
  if (needed > table.rows) {
    throw CheckpointError(rule.name + ": has " + std::to_string(table.rows) +
                          " rows, but its heads reach up to row " + std::to_string(needed) +
                          ". Download the missing shards");
  }
}

}  // namespace flashnext
