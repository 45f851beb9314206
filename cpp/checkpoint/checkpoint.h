// A checkpoint folder, checked in full and mapped: safetensors files, config, tensor table.
// Owns the mappings. Immutable after open(), so any thread may read. Nothing of the tables is
// copied or touched beyond the headers and the small tensors whose values are checked (scales,
// markers, hash constants).
#pragma once

#include "cpp/base/errors.h"
#include "cpp/checkpoint/model_shape.h"
#include "cpp/exl3/weight.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace flashnext {

enum class Dtype : std::uint8_t {
  kF16,
  kBF16,
  kF32,
  kF64,
  kI8,
  kU8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kBool,
  kF8
};
std::size_t item_bytes(Dtype dtype) noexcept;
std::string_view to_string(Dtype dtype) noexcept;

// One tensor as it lies in its file; `data` may have any alignment.
struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kU8;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::uint32_t file = 0;  // index into TensorFiles::files()
};

// A range of a checkpoint's data, and where a copy of it shall go.
struct ReadPiece {
  const std::byte* from;
  std::size_t bytes;
  std::byte* to;
};

// What exists: the union of all *.safetensors of a folder (spec/exl3.md 1.7, 6), nothing judged but
// the container itself.
class TensorFiles {
 public:
  struct File {
    std::string name;
    std::size_t bytes;
    std::map<std::string, std::string> metadata;
  };
  // Throws CheckpointError: unreadable or truncated file, lying header, duplicate name, index that
  // disagrees.
  static TensorFiles open(const std::string& folder);
  // The same over whole files that already lie in memory and outlive the result (tests, fuzzing).
  struct Buffer {
    std::string name;
    const std::byte* data;
    std::size_t bytes;
  };
  static TensorFiles view(const std::vector<Buffer>& buffers);

  const std::vector<File>& files() const;
  const std::vector<Tensor>& tensors() const;       // sorted by name
  const Tensor* find(std::string_view name) const;  // null when absent
  // The tensors whose names begin with `prefix`: [first, last) of tensors().
  std::pair<const Tensor*, const Tensor*> with_prefix(std::string_view prefix) const;
  // What is legal but worth a word, e.g. files outside the index.
  const std::vector<std::string>& notes() const;
  // Copies every piece, whose order it changes. What lies in a mapped file is read from the file,
  // neighbours in one call and straight to their places; the rest is copied from memory. Throws
  // CheckpointError when a file cannot be read. Any thread.
  void read(std::span<ReadPiece> pieces) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

// A line of the tensor table that drives loading and checking (spec/model.md 8).
enum class Role : std::uint8_t { kPlain, kExl3, kNgramTable };
struct TensorRule {
  std::string name;  // full name; for kExl3 the prefix of its members
  Role role;
  std::vector<std::int64_t>
      shape;  // kPlain: as stored; kExl3: {out, in} of the model, before padding to 128
  // embedding, gdn, attention, router, experts, shared, mixers, ple, ngram, head, mtp, mtp_experts
  std::string family;
};
// Every text tensor that a model of this shape has, in load order.
std::vector<TensorRule> tensor_table(const ModelShape& shape);

struct NgramTable {
  std::vector<const std::byte*> shards;
  std::int64_t shard_rows = 0;  // rows of every shard but the last
  std::int64_t rows = 0;
  std::int32_t bits = 0;  // K; 0: plain fp16 rows
  std::int32_t row_bytes = 0;
  std::vector<std::uint16_t> bias;           // fp16 (heads, 160); empty: none
  std::vector<std::int64_t> offsets, sizes;  // (heads)
  std::vector<std::int64_t> multipliers;     // (ngram_size)
};

using Progress =
    std::function<void(std::string_view stage, std::uint64_t done, std::uint64_t total)>;

struct SyntheticOptions;

class Checkpoint {
 public:
  // Opens and checks everything: after this every access succeeds. `progress` (may be empty) hears
  // stage "check". Throws CheckpointError naming the tensor or key, both values, and the remedy.
  static Checkpoint open(const std::string& folder, const Progress& progress = {});
  // The same over a parsed config and open files; quantization_config.json is not consulted.
  static Checkpoint bind(const ModelShape& shape, const TensorFiles& files,
                         const Progress& progress = {});
  // Random weights of this shape in memory (synthetic.h): every tensor of the table, no files.
  static Checkpoint synthetic(const ModelShape& shape, const SyntheticOptions& options);

  const std::string& folder() const;
  const ModelShape& shape() const;
  const TensorFiles& files() const;
  const std::vector<TensorRule>& table() const;
  // Warnings that do not stop loading: K of quantization_config.json against the shapes, files
  // outside the index, ...
  const std::vector<std::string>& notes() const;
  bool has_mtp() const;

  // A tensor of role kPlain; throws LogicError when the table has no such name.
  const Tensor& plain(std::string_view name) const;
  // Values of a plain tensor widened to fp32 (F16, BF16, F32).
  std::vector<float> values(std::string_view name) const;
  // Bits of a plain tensor as fp16: F16 as stored; BF16 and F32 converted (CheckpointError when a
  // value overflows).
  std::vector<std::uint16_t> half_values(std::string_view name) const;
  // Members of an EXL3 linear, in place in the mapping; bias pointer null unless stored (then owned
  // by this object).
  const Exl3Weight& linear(std::string_view prefix) const;
  const NgramTable& ngram() const;  // LogicError when the model has no n-gram layer
  // See TensorFiles::read: the pieces may begin anywhere that this checkpoint points to.
  void read(std::span<ReadPiece> pieces) const { files().read(pieces); }
  // Size in bytes by family, from the table.
  std::map<std::string, std::uint64_t> bytes_by_family() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace flashnext
