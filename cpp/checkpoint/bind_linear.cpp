// One EXL3 linear (spec/exl3.md 1.1): its members found, checked against the model, and laid out as
// pointers.
#include "cpp/base/half.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/safetensors.h"
#include "cpp/exl3/exl3.h"

#include <cmath>
#include <string>

namespace flashnext {
namespace {

constexpr std::int64_t kTile = 128;

std::int64_t round_up(std::int64_t n) { return (n + kTile - 1) / kTile * kTile; }

std::string rate_text(std::int32_t words) {
  std::string text = std::to_string(words / 16);
  if (words % 16 != 0) text += ".5";
  return "K = " + text;
}

}  // namespace

void Binder::bind_linear(const TensorRule& rule) {
  const std::string& prefix = rule.name;
  const Tensor* trellis = take(prefix + ".trellis");
  if (trellis == nullptr) {
    if (files_.find(prefix + ".weight") != nullptr) {
      throw CheckpointError(prefix +
                            ".weight: is stored unquantised, without a trellis, where the engine "
                            "takes an EXL3 linear. Quantise the model with exllamav3");
    }
    for (const char* member : {".suh", ".svh", ".su", ".sv", ".mul1"}) take(prefix + member);
    return missing(prefix + ".trellis");
  }
  take(prefix + ".weight");  // redundant beside a trellis
  check_trellis(rule, *trellis);
  std::uint64_t bytes = trellis->bytes;
  Exl3Weight weight{};
  weight.trellis = trellis->data;
  weight.in = static_cast<std::int32_t>(16 * trellis->shape[0]);
  weight.out = static_cast<std::int32_t>(16 * trellis->shape[1]);
  weight.words = static_cast<std::int32_t>(trellis->shape[2]);
  check_codebook(prefix, bytes);
  weight.suh = bind_scale(prefix, ".suh", ".su", weight.in, bytes);
  weight.svh = bind_scale(prefix, ".svh", ".sv", weight.out, bytes);
  if (const Tensor* bias = take(prefix + ".bias")) {
    weight.bias = bind_bias(rule, *bias, weight.out);
    bytes += bias->bytes;
  }
  check_expert_rate(rule, weight.words);
  bound_.linears.push_back(weight);
  bound_.linear.emplace(prefix, &bound_.linears.back());
  bound_.family_bytes[rule.family] += bytes;
}

void Binder::check_trellis(const TensorRule& rule, const Tensor& trellis) const {
  const auto fail = [&](const std::string& what) {
    throw CheckpointError(trellis.name + ": is " + std::string(to_string(trellis.dtype)) + " " +
                          shape_text(trellis.shape) + ", but " + what);
  };
  if (trellis.dtype != Dtype::kI16 || trellis.shape.size() != 3) {
    fail("a trellis must be I16 of three dimensions. Quantise the model again with exllamav3");
  }
  const std::int64_t words = trellis.shape[2];
  if (words > 128 || !exl3::valid_words(static_cast<std::int32_t>(words))) {
    fail(
        "its last dimension must be 16 K with K = 1 to 8, 1.5, 2.5 or 3.5: this rate is not "
        "implemented. Quantise the model again");
  }
  const std::int64_t out = round_up(rule.shape[0]);
  const std::int64_t in = round_up(rule.shape[1]);
  if (trellis.shape[0] != in / 16 || trellis.shape[1] != out / 16) {
    fail("config.json makes this linear " + std::to_string(rule.shape[1]) + " -> " +
         std::to_string(rule.shape[0]) + ", so its shape must be " +
         shape_text({in / 16, out / 16, words}) +
         ". Check that config.json belongs to this checkpoint");
  }
}

void Binder::check_codebook(const std::string& prefix, std::uint64_t& bytes) {
  const Tensor* mcg = take(prefix + ".mcg");
  const Tensor* mul1 = take(prefix + ".mul1");
  if (mcg != nullptr && mul1 != nullptr) {
    throw CheckpointError(prefix +
                          ": has the markers of two codebooks, mcg and mul1. Download the file "
                          "again, or quantise the model again with mul1");
  }
  if (mul1 == nullptr) {
    throw CheckpointError(prefix + ": codebook " + (mcg != nullptr ? "mcg" : "3inst") +
                          " is not implemented; quantise the model again with codebook mul1");
  }
  if (mul1->dtype != Dtype::kI32 || mul1->bytes != 4) {
    throw CheckpointError(mul1->name + ": is " + std::string(to_string(mul1->dtype)) + " " +
                          shape_text(mul1->shape) +
                          ", but a codebook marker must be one I32. Download the file again");
  }
  bytes += mul1->bytes;
  checks_.push_back({mul1, true});
}

const std::byte* Binder::bind_scale(const std::string& prefix, std::string_view half,
                                    std::string_view packed, std::int64_t length,
                                    std::uint64_t& bytes) {
  const std::string half_name = prefix + std::string(half);
  const Tensor* bits = take(prefix + std::string(packed));  // ignored beside the fp16 form
  if (const Tensor* scale = take(half_name)) {
    expect_tensor(*scale, Dtype::kF16, {length});
    checks_.push_back({scale, false});
    bytes += scale->bytes;
    return scale->data;
  }
  if (bits == nullptr) {
    missing(half_name);
    return nullptr;
  }
  expect_tensor(*bits, Dtype::kI16, {length / 16});
  std::vector<std::uint16_t> values(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool negative = (load_u16(bits->data + i / 16 * 2) >> (i % 16) & 1) != 0;
    values[i] = negative ? 0xBC00 : 0x3C00;  // -1, +1
  }
  bytes += bits->bytes;
  bound_.signs.push_back(std::move(values));
  return reinterpret_cast<const std::byte*>(bound_.signs.back().data());
}

const float* Binder::bind_bias(const TensorRule& rule, const Tensor& bias, std::int32_t out) {
  if (rule.family == "experts" || rule.family == "mtp_experts") {
    throw CheckpointError(bias.name +
                          ": a bias in a routed expert is not implemented. Models of this "
                          "architecture have none: check config.json");
  }
  if (!is_float(bias.dtype)) {
    throw CheckpointError(bias.name + ": is " + std::string(to_string(bias.dtype)) +
                          ", but a bias must be F16, BF16 or F32. Download the file again");
  }
  expect_tensor(bias, bias.dtype, {out});
  checks_.push_back({&bias, false});
  bound_.biases.push_back(widen(bias));
  return bound_.biases.back().data();
}

// The expert op takes one rate a projection for all experts of a layer.
void Binder::check_expert_rate(const TensorRule& rule, std::int32_t words) {
  if (rule.family != "experts" && rule.family != "mtp_experts") return;
  constexpr std::string_view mark = ".experts.";
  const std::size_t at = rule.name.find(mark);
  const std::string group = rule.name.substr(0, at) + rule.name.substr(rule.name.rfind('.'));
  const auto [found, fresh] = expert_rates_.try_emplace(group, Rate{words, &rule});
  if (fresh || found->second.words == words) return;
  throw CheckpointError(rule.name + ": has " + rate_text(words) + ", but " +
                        found->second.first->name + " has " + rate_text(found->second.words) +
                        "; the experts of one projection in a layer must have one rate. Quantise "
                        "the model again");
}

}  // namespace flashnext
