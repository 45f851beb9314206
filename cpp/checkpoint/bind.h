// Inside the room: the tensor table laid over the files. Structure is checked first, from the
// headers alone; the values that are checked (scales, markers, small tensors) are read after, in
// the order of the file and by several threads.
#pragma once

#include "cpp/checkpoint/checkpoint.h"

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace flashnext {

// What Checkpoint owns.
struct Bound {
  std::string folder;
  ModelShape shape;
  TensorFiles files;
  std::vector<TensorRule> table;
  std::vector<std::string> notes;
  std::unordered_map<std::string_view, const Tensor*> plain;       // keys: names of `table`
  std::unordered_map<std::string_view, const Exl3Weight*> linear;  // keys: names of `table`
  std::deque<Exl3Weight> linears;
  NgramTable ngram;
  std::deque<std::vector<float>> biases;
  std::deque<std::vector<std::uint16_t>> signs;  // expanded from packed bits
  std::map<std::string, std::uint64_t> family_bytes;
};

// A tensor whose values are looked at: finite floats, or the constant of the mul1 marker.
struct ValueCheck {
  const Tensor* tensor;
  bool marker;
};
void check_values(const std::vector<ValueCheck>& checks, const Progress& progress);

// Fills table, plain, linear, ngram and family_bytes of `bound` from its shape and files.
class Binder {
 public:
  explicit Binder(Bound& bound);
  void run(const Progress& progress);

 private:
  void bind_plain(const TensorRule& rule);
  void bind_linear(const TensorRule& rule);
  void bind_ngram(const TensorRule& rule);
  void check_leftovers();

  // The stored members of a linear; null where absent.
  struct Members {
    const Tensor *trellis, *weight, *suh, *svh, *su, *sv, *mul1, *mcg, *bias;
  };
  Members take_members(const std::string& prefix);
  void check_trellis(const TensorRule& rule, const Tensor& trellis) const;
  // One scale vector as fp16: as it lies, or expanded from packed signs. Null when neither exists.
  const std::byte* bind_scale(const Tensor* half, const Tensor* packed, std::int64_t length,
                              std::uint64_t& bytes);
  const float* bind_bias(const TensorRule& rule, const Tensor& bias, std::int32_t out);
  void check_codebook(const std::string& prefix, const Members& members);
  void check_expert_rate(const TensorRule& rule, std::int32_t words);

  void bind_ngram_rows(const TensorRule& rule, std::uint64_t& bytes);
  void check_ngram_metadata(const TensorRule& rule, const Tensor& first) const;
  void bind_ngram_hash(const TensorRule& rule, std::uint64_t& bytes);
  std::vector<std::int64_t> ngram_constants(const std::string& name, const std::string& alias,
                                            std::int64_t length, std::uint64_t& bytes);

  const Tensor* take(std::string_view name);  // find and mark as consumed; null when absent
  void mark(const Tensor& tensor);
  void missing(std::string name) { missing_.push_back(std::move(name)); }

  Bound& bound_;
  const TensorFiles& files_;
  std::vector<bool> used_;  // (tensors)
  std::vector<std::string> missing_;
  std::vector<ValueCheck> checks_;
  struct Rate {
    std::int32_t words;
    const TensorRule* first;
  };
  std::unordered_map<std::string, Rate> expert_rates_;  // by layer and projection
};

// Throws unless dtype and shape are these.
void expect_tensor(const Tensor& tensor, Dtype dtype, const std::vector<std::int64_t>& shape);
bool is_float(Dtype dtype) noexcept;
// Values [0, n) of a float tensor as fp32.
std::vector<float> widen(const Tensor& tensor);

// Compares the rates that quantization_config.json claims with the shapes: notes, never errors.
void compare_quantization_config(const std::string& path, const TensorFiles& files,
                                 std::vector<std::string>& notes);

}  // namespace flashnext
