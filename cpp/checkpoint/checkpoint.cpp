#include "cpp/checkpoint/checkpoint.h"

#include "cpp/base/half.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/bind_synthetic.h"
#include "cpp/checkpoint/safetensors.h"

#include <cstring>

namespace flashnext {
namespace {

constexpr std::uint64_t kMaxConfigBytes = 64u << 20;

}  // namespace

struct Checkpoint::State : Bound {
  SyntheticHold synthetic;
};

Checkpoint Checkpoint::open(const std::string& folder, const Progress& progress) {
  auto state = std::make_shared<State>();
  state->folder = folder;
  state->files = TensorFiles::open(folder);
  state->shape = parse_config(read_text(folder + "/config.json", "config.json", kMaxConfigBytes),
                              "config.json");
  state->notes = state->files.notes();
  Binder(*state).run(progress);
  const std::string quantization = folder + "/quantization_config.json";
  if (exists(quantization)) {
    compare_quantization_config(quantization, state->files, state->notes);
  }
  Checkpoint checkpoint;
  checkpoint.state_ = std::move(state);
  return checkpoint;
}

Checkpoint Checkpoint::bind(const ModelShape& shape, const TensorFiles& files,
                            const Progress& progress) {
  auto state = std::make_shared<State>();
  state->folder = "in memory";
  state->shape = shape;
  state->files = files;
  state->notes = files.notes();
  Binder(*state).run(progress);
  Checkpoint checkpoint;
  checkpoint.state_ = std::move(state);
  return checkpoint;
}

Checkpoint Checkpoint::synthetic(const ModelShape& shape, const SyntheticOptions& options) {
  auto state = std::make_shared<State>();
  state->shape = shape;
  bind_synthetic(*state, options, state->synthetic);
  Checkpoint checkpoint;
  checkpoint.state_ = std::move(state);
  return checkpoint;
}

const std::string& Checkpoint::folder() const { return state_->folder; }
const ModelShape& Checkpoint::shape() const { return state_->shape; }
const TensorFiles& Checkpoint::files() const { return state_->files; }
const std::vector<TensorRule>& Checkpoint::table() const { return state_->table; }
const std::vector<std::string>& Checkpoint::notes() const { return state_->notes; }
bool Checkpoint::has_mtp() const { return state_->shape.mtp_layers > 0; }

const Tensor& Checkpoint::plain(std::string_view name) const {
  const auto found = state_->plain.find(name);
  if (found == state_->plain.end()) {
    throw LogicError("checkpoint: the tensor table has no plain tensor " + std::string(name));
  }
  return *found->second;
}

std::vector<float> Checkpoint::values(std::string_view name) const { return widen(plain(name)); }

std::vector<std::uint16_t> Checkpoint::half_values(std::string_view name) const {
  const Tensor& tensor = plain(name);
  std::vector<std::uint16_t> bits(tensor.bytes / item_bytes(tensor.dtype));
  if (tensor.dtype == Dtype::kF16) {
    if (!bits.empty()) std::memcpy(bits.data(), tensor.data, tensor.bytes);
    return bits;
  }
  const std::vector<float> values = widen(tensor);
  for (std::size_t i = 0; i < values.size(); ++i) {
    bits[i] = f32_to_f16(values[i]);
    if ((bits[i] & 0x7C00u) == 0x7C00u) {
      throw CheckpointError(tensor.name + ": element " + std::to_string(i) + " = " +
                            std::to_string(values[i]) +
                            " does not fit fp16, in which the engine keeps this tensor. Quantise "
                            "the model again");
    }
  }
  return bits;
}

const Exl3Weight& Checkpoint::linear(std::string_view prefix) const {
  const auto found = state_->linear.find(prefix);
  if (found == state_->linear.end()) {
    throw LogicError("checkpoint: the tensor table has no EXL3 linear " + std::string(prefix));
  }
  return *found->second;
}

const NgramTable& Checkpoint::ngram() const {
  check(state_->shape.ple_layer >= 0, "checkpoint: the model has no n-gram layer");
  return state_->ngram;
}

std::map<std::string, std::uint64_t> Checkpoint::bytes_by_family() const {
  return state_->family_bytes;
}

}  // namespace flashnext
