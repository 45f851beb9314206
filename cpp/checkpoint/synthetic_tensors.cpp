// The tensors of a synthetic checkpoint: names and shapes from the tensor table, dtypes and rates
// of the published pack, and gains under which a random model behaves. With x the unit of a
// sublayer's input (deviation about 0.5), gains put queries, gates and router logits at a deviation
// of one to two and every sublayer's output well below the embedding's, so that tokens stay apart.
#include "cpp/checkpoint/ngram_hash.h"
#include "cpp/checkpoint/synthetic.h"

#include <cmath>

namespace flashnext {
namespace {

constexpr double kCodebookRms = 1.00031;  // of mul1 over all states
constexpr double kNgramScale = 0.25;      // a power of two: exact in fp16
constexpr std::int32_t kNgramBits = 5;
constexpr std::int64_t kNgramShards = 128;

bool ends(std::string_view name, std::string_view suffix) { return name.ends_with(suffix); }

std::int64_t round_up(std::int64_t n) { return (n + 127) / 128 * 128; }

std::int64_t rate_of(const TensorRule& rule) {
  if (rule.family == "experts" || rule.family == "mtp_experts") return 3;
  if (ends(rule.name, "index_qk_proj")) return 3;
  if (ends(rule.name, "mtp.fc_embedding") || ends(rule.name, "mtp.fc_hidden")) return 4;
  return 5;
}

double gain_of(std::string_view name) {
  if (ends(name, "lm_head")) return 4;
  if (ends(name, "gate_proj") || ends(name, "up_proj")) return 3;
  if (ends(name, "down_proj")) return 0.5;
  if (ends(name, "out_proj") || ends(name, "o_proj")) return 0.3;
  return 1;
}

Fill normal(double mean, double deviation) { return {Fill::Kind::kNormal, mean, deviation, {}}; }

SyntheticTensor plain_tensor(const TensorRule& rule) {
  const std::string_view name = rule.name;
  SyntheticTensor t{rule.name, Dtype::kF16, rule.shape, {}};
  const double fan_in = static_cast<double>(rule.shape.back());
  const auto over_root = [&](double gain) { return normal(0, gain / std::sqrt(fan_in)); };
  if (ends(name, "embed_tokens.weight")) {
    t.dtype = Dtype::kBF16;
    t.fill = normal(0, 1);
  } else if (ends(name, "A_log")) {  // decay rates of 1 to 16 and steps of 0.001 to 0.1, as trained
    t.dtype = Dtype::kBF16;
    t.fill = {Fill::Kind::kUniform, 0, 2.77, {}};
  } else if (ends(name, "dt_bias")) {
    t.dtype = Dtype::kBF16;
    t.fill = {Fill::Kind::kUniform, -6.9, -2.25, {}};
  } else if (ends(name, "linear_attn.conv1d.weight")) {
    t.dtype = Dtype::kBF16;
    t.fill = normal(0, 0.5);
  } else if (ends(name, "ple.conv1d.weight")) {
    t.fill = normal(0, 0.2);
  } else if (ends(name, "linear_attn.norm.weight")) {  // the only norm that is not zero-centred
    t.dtype = Dtype::kBF16;
    t.fill = normal(1, 0.05);
  } else if (rule.shape.size() == 1) {  // the other norms
    const bool half = ends(name, "hc_norm.weight") || ends(name, "pre_fc_norm_hidden.weight");
    t.dtype = half ? Dtype::kF16 : Dtype::kBF16;
    t.fill = normal(0, 0.05);
  } else if (ends(name, "input_mix_weight_down.weight") || ends(name, "mlp.gate.weight")) {
    t.fill = over_root(4);
  } else if (ends(name, "block_inject_weight.weight")) {
    t.fill = over_root(2);
  } else {
    t.fill = over_root(1);
  }
  return t;
}

std::vector<SyntheticTensor> linear_tensors(const TensorRule& rule) {
  const std::int64_t out = round_up(rule.shape[0]);
  const std::int64_t in = round_up(rule.shape[1]);
  const double scale = gain_of(rule.name) / (kCodebookRms * std::sqrt(static_cast<double>(in)));
  return {
      {rule.name + ".trellis", Dtype::kI16, {in / 16, out / 16, 16 * rate_of(rule)}, {}},
      {rule.name + ".suh", Dtype::kF16, {in}, {Fill::Kind::kSigns, scale, 0, {}}},
      {rule.name + ".svh", Dtype::kF16, {out}, {Fill::Kind::kSigns, 1, 0, {}}},
      {rule.name + ".mul1", Dtype::kI32, {}, {Fill::Kind::kIntegers, 0, 0, {}}},
  };
}

std::vector<SyntheticTensor> ngram_tensors(const ModelShape& shape, const TensorRule& rule) {
  const NgramHash hash = derive_ngram_hash(shape);
  const std::int64_t heads = shape.ngram_heads();
  std::vector<SyntheticTensor> list = {
      {rule.name + ".head_bias", Dtype::kF16, {heads, shape.ngram_width}, normal(0, 0.05)},
      {rule.name + ".head_offsets", Dtype::kI64, {heads}, {}},
      {rule.name + ".head_vocab_sizes", Dtype::kI64, {heads}, {}},
      {rule.name + ".layer_multipliers", Dtype::kI64, {shape.ngram_size}, {}},
  };
  list[1].fill = {Fill::Kind::kIntegers, 0, 0, hash.offsets};
  list[2].fill = {Fill::Kind::kIntegers, 0, 0, hash.sizes};
  list[3].fill = {Fill::Kind::kIntegers, 0, 0, hash.multipliers};
  const std::int64_t words = 1 + shape.ngram_width / 16 * kNgramBits;
  const std::int64_t shard_rows = (hash.rows + kNgramShards - 1) / kNgramShards;
  for (std::int64_t i = 0, left = hash.rows; left > 0; ++i, left -= shard_rows) {
    list.push_back({rule.name + ".shard_" + std::to_string(i) + ".trellis",
                    Dtype::kI16,
                    {std::min(left, shard_rows), words},
                    {Fill::Kind::kNgramRows, kNgramScale, 0, {}}});
  }
  return list;
}

}  // namespace

std::size_t SyntheticTensor::bytes() const noexcept {
  std::size_t n = item_bytes(dtype);
  for (const std::int64_t d : shape) n *= static_cast<std::size_t>(d);
  return n;
}

std::vector<SyntheticTensor> synthetic_tensors(const ModelShape& shape, const TensorRule& rule) {
  switch (rule.role) {
    case Role::kPlain:
      return {plain_tensor(rule)};
    case Role::kExl3:
      return linear_tensors(rule);
    case Role::kNgramTable:
      return ngram_tensors(shape, rule);
  }
  throw LogicError("synthetic: unknown role");
}

std::vector<SyntheticTensor> synthetic_tensors(const ModelShape& shape) {
  std::vector<SyntheticTensor> all;
  for (const TensorRule& rule : tensor_table(shape)) {
    for (SyntheticTensor& tensor : synthetic_tensors(shape, rule)) {
      all.push_back(std::move(tensor));
    }
  }
  return all;
}

}  // namespace flashnext
