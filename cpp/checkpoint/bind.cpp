#include "cpp/checkpoint/bind.h"

#include "cpp/base/half.h"
#include "cpp/checkpoint/safetensors.h"

#include <cstring>

namespace flashnext {
namespace {

constexpr std::size_t kNamesInMessage = 4;

std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kNamesInMessage; ++i) {
    if (i > 0) text += ", ";
    text += names[i];
  }
  if (names.size() > kNamesInMessage) {
    text += ", and " + std::to_string(names.size() - kNamesInMessage) + " more";
  }
  return text;
}

std::string missing_remedy(const std::string& name) {
  if (name.starts_with("mtp.hyper_connection_mixer.")) {
    return "Some packs keep these tensors in mtp_hyper_connection_mixer_patch.safetensors: "
           "download that file into the folder";
  }
  if (name.find(".ngram_embedding.") != std::string::npos) {
    return "The n-gram table is the file ngram_embedding.safetensors: download it into the folder";
  }
  if (name.starts_with("mtp.")) {
    return "Download the missing files, or set mtp_num_hidden_layers to 0 in config.json to run "
           "without drafts";
  }
  return "Download the missing files, or check that config.json belongs to this checkpoint";
}

}  // namespace

void expect_tensor(const Tensor& tensor, Dtype dtype, const std::vector<std::int64_t>& shape) {
  if (tensor.dtype == dtype && tensor.shape == shape) return;
  throw CheckpointError(tensor.name + ": is " + std::string(to_string(tensor.dtype)) + " " +
                        shape_text(tensor.shape) + ", but must be " +
                        std::string(to_string(dtype)) + " " + shape_text(shape) +
                        ". Check that config.json belongs to this checkpoint");
}

bool is_float(Dtype dtype) noexcept {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32;
}

std::vector<float> widen(const Tensor& tensor) {
  std::vector<float> values(tensor.bytes / item_bytes(tensor.dtype));
  if (tensor.dtype == Dtype::kF32) {
    if (!values.empty()) std::memcpy(values.data(), tensor.data, values.size() * sizeof(float));
    return values;
  }
  check(is_float(tensor.dtype), "checkpoint: values of a tensor that is no float");
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t bits = load_u16(tensor.data + 2 * i);
    values[i] = tensor.dtype == Dtype::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  return values;
}

Binder::Binder(Bound& bound)
    : bound_(bound), files_(bound.files), used_(bound.files.tensors().size(), false) {}

void Binder::mark(const Tensor& tensor) {
  used_[static_cast<std::size_t>(&tensor - files_.tensors().data())] = true;
}

const Tensor* Binder::take(std::string_view name) {
  const Tensor* tensor = files_.find(name);
  if (tensor != nullptr) mark(*tensor);
  return tensor;
}

void Binder::run(const Progress& progress) {
  const auto [first_mtp, last_mtp] = files_.with_prefix("mtp.");
  if (bound_.shape.mtp_layers > 0 && first_mtp == last_mtp) {
    bound_.shape.mtp_layers = 0;
    bound_.notes.push_back(
        "config.json names an MTP layer, but no mtp.* tensor exists: the model runs without "
        "drafts");
  }
  bound_.table = tensor_table(bound_.shape);
  bound_.plain.reserve(bound_.table.size());
  bound_.linear.reserve(bound_.table.size());
  for (const TensorRule& rule : bound_.table) {
    switch (rule.role) {
      case Role::kPlain:
        bind_plain(rule);
        break;
      case Role::kExl3:
        bind_linear(rule);
        break;
      case Role::kNgramTable:
        bind_ngram(rule);
        break;
    }
  }
  check_leftovers();
  check_values(checks_, progress);
}

void Binder::bind_plain(const TensorRule& rule) {
  const bool embedding = rule.family == "embedding";
  if (embedding) {
    const std::string module = rule.name.substr(0, rule.name.rfind('.'));
    const auto [begin, end] = files_.with_prefix(module + ".");
    for (const Tensor* t = begin; t != end; ++t) {
      if (!t->name.ends_with(".trellis")) continue;
      throw CheckpointError(t->name +
                            ": is a quantised token embedding, which is not implemented. "
                            "Quantise the model again and leave the token embedding in BF16");
    }
  }
  const Tensor* tensor = take(rule.name);
  if (tensor == nullptr) return missing(rule.name);
  if (!is_float(tensor->dtype)) {
    throw CheckpointError(rule.name + ": is " + std::string(to_string(tensor->dtype)) +
                          ", but must be F16, BF16 or F32. Convert it, or download the file again");
  }
  expect_tensor(*tensor, tensor->dtype, rule.shape);
  if (embedding && tensor->dtype != Dtype::kBF16) {
    throw CheckpointError(rule.name + ": is " + std::string(to_string(tensor->dtype)) +
                          ", but the token embedding must be BF16, in which it is used in place. "
                          "Convert that tensor to BF16");
  }
  checks_.push_back({tensor, false});
  bound_.plain.emplace(rule.name, tensor);
  bound_.family_bytes[rule.family] += tensor->bytes;
}

void Binder::check_leftovers() {
  std::vector<std::string> unknown;
  std::size_t drafts = 0;
  const std::vector<Tensor>& tensors = files_.tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    if (used_[i] || name.starts_with("model.visual.")) continue;
    if (bound_.shape.mtp_layers == 0 && name.starts_with("mtp.")) {
      ++drafts;
    } else {
      unknown.push_back(name);
    }
  }
  if (drafts > 0) {
    bound_.notes.push_back(std::to_string(drafts) +
                           " mtp.* tensors are not used: config.json names no MTP layer");
  }
  if (missing_.empty() && unknown.empty()) return;
  std::string text = "checkpoint " + bound_.folder + ": ";
  if (!missing_.empty()) {
    text += std::to_string(missing_.size()) + " tensors that config.json asks for are missing (" +
            list_names(missing_) + "). ";
  }
  if (!unknown.empty()) {
    text += std::to_string(unknown.size()) + " tensors belong to no part of the model (" +
            list_names(unknown) + "). ";
  }
  text += missing_.empty() ? "Remove the file that does not belong here (" +
                                 files_.files()[files_.find(unknown[0])->file].name +
                                 "), or check that config.json belongs to this checkpoint"
                           : missing_remedy(missing_[0]);
  throw CheckpointError(text);
}

}  // namespace flashnext
