// One EXL3 linear (spec/exl3.md 1.1): its members found, checked against the model, and laid out as
// pointers.
#include "cpp/base/half.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/safetensors.h"
#include "cpp/exl3/exl3.h"

#include <string>
#include <tuple>
#include <utility>

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

// Members are neighbours in the sorted list, so one lookup finds them all.
Binder::Members Binder::take_members(const std::string& prefix) {
  constexpr std::pair<std::string_view, const Tensor * Members::*> known[] = {
      {".trellis", &Members::trellis}, {".weight", &Members::weight}, {".suh", &Members::suh},
      {".svh", &Members::svh},         {".su", &Members::su},         {".sv", &Members::sv},
      {".mul1", &Members::mul1},       {".mcg", &Members::mcg},       {".bias", &Members::bias}};
  const std::vector<Tensor>& all = files_.tensors();
  const auto ours = [&](const Tensor& t) { return t.name.starts_with(prefix); };
  const Tensor* first = files_.find(prefix + ".trellis");
  const Tensor* last = nullptr;
  if (first == nullptr) {
    std::tie(first, last) = files_.with_prefix(prefix + ".");
  } else {
    last = first + 1;
    while (first != all.data() && ours(*(first - 1))) --first;
    while (last != all.data() + all.size() && ours(*last)) ++last;
  }
  Members members{};
  for (const Tensor* tensor = first; tensor != last; ++tensor) {
    const std::string_view member = std::string_view(tensor->name).substr(prefix.size());
    for (const auto& [name, slot] : known) {
      if (member != name) continue;
      members.*slot = tensor;
      mark(*tensor);
    }
  }
  return members;
}

void Binder::bind_linear(const TensorRule& rule) {
  const std::string& prefix = rule.name;
  const Members members = take_members(prefix);
  if (members.trellis == nullptr) {
    if (members.weight != nullptr) {
      throw CheckpointError(prefix +
                            ".weight: is stored unquantised, without a trellis, where the engine "
                            "takes an EXL3 linear. Quantise the model with exllamav3");
    }
    return missing(prefix + ".trellis");
  }
  check_trellis(rule, *members.trellis);
  check_codebook(prefix, members);
  std::uint64_t bytes = members.trellis->bytes + members.mul1->bytes;
  Exl3Weight weight{};
  weight.trellis = members.trellis->data;
  weight.in = static_cast<std::int32_t>(16 * members.trellis->shape[0]);
  weight.out = static_cast<std::int32_t>(16 * members.trellis->shape[1]);
  weight.words = static_cast<std::int32_t>(members.trellis->shape[2]);
  weight.suh = bind_scale(members.suh, members.su, weight.in, bytes);
  weight.svh = bind_scale(members.svh, members.sv, weight.out, bytes);
  if (weight.suh == nullptr) missing(prefix + ".suh");
  if (weight.svh == nullptr) missing(prefix + ".svh");
  if (members.bias != nullptr) {
    weight.bias = bind_bias(rule, *members.bias, weight.out);
    bytes += members.bias->bytes;
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

void Binder::check_codebook(const std::string& prefix, const Members& members) {
  const Tensor* mcg = members.mcg;
  const Tensor* mul1 = members.mul1;
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
  checks_.push_back({mul1, true});
}

// The packed form is ignored beside the fp16 one.
const std::byte* Binder::bind_scale(const Tensor* half, const Tensor* packed, std::int64_t length,
                                    std::uint64_t& bytes) {
  if (half != nullptr) {
    expect_tensor(*half, Dtype::kF16, {length});
    checks_.push_back({half, false});
    bytes += half->bytes;
    return half->data;
  }
  if (packed == nullptr) return nullptr;
  expect_tensor(*packed, Dtype::kI16, {length / 16});
  std::vector<std::uint16_t> values(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool negative = (load_u16(packed->data + i / 16 * 2) >> (i % 16) & 1) != 0;
    values[i] = negative ? 0xBC00 : 0x3C00;  // -1, +1
  }
  bytes += packed->bytes;
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
