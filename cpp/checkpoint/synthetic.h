// Random checkpoints of the architecture, for tests and measurements: any bits are a valid trellis,
// and scales are chosen so that activations, router choices and logits stay in a sane range through
// all layers. Checkpoint::synthetic() is the form in memory, write_synthetic() the form on disk;
// the same shape and options give the same values in both (a large n-gram table apart, which on
// disk is a hole).
#pragma once

#include "cpp/checkpoint/checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace flashnext {

struct SyntheticOptions {
  std::uint64_t seed = 1;
  // Random bits are drawn once and repeat with at most this period, which bounds the memory of the
  // form in memory and the time of both.
  std::size_t pool_bytes = std::size_t{256} << 20;
};

// The real model's dimensions (spec/model.md 1) with any number of layers; one layer has no n-gram
// table, since that sits in the second.
ModelShape flash_next_shape(std::int32_t layers = 48);
// The demo model's dimensions.
ModelShape tiny_shape(std::int32_t layers = 8);
// "flash-next" or "tiny"; layers 0: all of that model's. Throws InputError for anything else.
ModelShape synthetic_shape(std::string_view like, std::int32_t layers);

// How the values of a tensor are drawn.
struct Fill {
  enum class Kind : std::uint8_t {
    kBits,       // anything
    kNormal,     // mean a, deviation b; F16 or BF16
    kUniform,    // a to b; F16 or BF16
    kSigns,      // +-a; F16
    kNgramRows,  // word 0 of a row is the scale a in F16, the rest anything
    kIntegers,   // `integers`, or the marker of the mul1 codebook for an I32
  };
  Kind kind = Kind::kBits;
  double a = 0;
  double b = 0;
  std::vector<std::int64_t> integers;
};

struct SyntheticTensor {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  Fill fill;
  std::size_t bytes() const noexcept;
};

// The stored tensors of one line of the tensor table, with the rates of the published pack
// (spec/exl3.md 1.3).
std::vector<SyntheticTensor> synthetic_tensors(const ModelShape& shape, const TensorRule& rule);
// Those of the whole table, in load order.
std::vector<SyntheticTensor> synthetic_tensors(const ModelShape& shape);

// The values of a list of tensors. Tensors that are drawn alike share one block of random values
// that repeats in the address space, each from a place of its own.
class SyntheticMemory {
 public:
  SyntheticMemory(const std::vector<SyntheticTensor>& tensors, const SyntheticOptions& options);
  ~SyntheticMemory();
  SyntheticMemory(SyntheticMemory&&) noexcept;

  // tensor.bytes() readable bytes, valid as long as this object; the tensor must be of the list.
  const std::byte* at(const SyntheticTensor& tensor) const;
  // The same bytes in pieces, all from the first period: memory that is in use already.
  void pieces(const SyntheticTensor& tensor,
              const std::function<void(const std::byte* data, std::size_t bytes)>& visit) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// config.json of a shape: parse_config() gives the shape back.
std::string synthetic_config(const ModelShape& shape);

// Bytes of disk that write_synthetic() takes; holes are not counted.
std::uint64_t synthetic_disk_bytes(const ModelShape& shape);

// Writes safetensors shards, their index, the n-gram table (as a hole when large) and config.json
// into a new or empty folder. `progress` hears stage "write" in bytes and may throw: then, and on
// any error, what was written is removed. Throws InputError (folder not empty, not writable) and
// OutOfMemory (disk), which names the bytes needed and free.
void write_synthetic(const std::string& folder, const ModelShape& shape,
                     const SyntheticOptions& options, const Progress& progress = {});

}  // namespace flashnext
