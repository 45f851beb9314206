// What opens, and what it then says: the small models, the census of the full-size one, every legal
// variant of storage.
#include "tests/cpp/checkpoint_writer.h"

#include <cmath>
#include <set>

namespace flashnext::testing_checkpoint {
namespace {

constexpr const char* kNgram = "model.language_model.layers.0.ple.ple_embedding.ngram_embedding";
constexpr const char* kEmbedding = "model.language_model.layers.0.ple.ple_embedding";

Checkpoint open(const CheckpointWriter& writer, const TempFolder& folder) {
  writer.write(folder);
  return Checkpoint::open(folder.path());
}

bool notes_say(const Checkpoint& checkpoint, const std::string& part) {
  for (const std::string& note : checkpoint.notes()) {
    if (note.find(part) != std::string::npos) return true;
  }
  return false;
}

// Value of fp16 or bf16 bits from the definition of the formats.
double decode(std::uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const double fraction = bits & ((1 << fraction_bits) - 1);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                    : std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

void expect_whole(const Checkpoint& checkpoint) {
  std::uint64_t stored = 0, counted = 0;
  for (const Tensor& tensor : checkpoint.files().tensors()) stored += tensor.bytes;
  for (const auto& [family, bytes] : checkpoint.bytes_by_family()) counted += bytes;
  EXPECT_EQ(counted, stored);  // each tensor once
}

TEST(Open, DemoModel) {
  std::uint64_t done = 0, total = 1;
  const Checkpoint c =
      Checkpoint::open(demo_model(), [&](std::string_view stage, std::uint64_t d, std::uint64_t t) {
        EXPECT_EQ(stage, "check");
        EXPECT_GT(d, done);
        done = d;
        total = t;
      });
  EXPECT_EQ(done, total);
  EXPECT_EQ(c.folder(), demo_model());
  EXPECT_EQ(c.files().tensors().size(), 3867u);
  EXPECT_TRUE(c.has_mtp());
  expect_whole(c);
  const Exl3Weight& head = c.linear("lm_head");
  EXPECT_EQ(head.in, 256);
  EXPECT_EQ(head.out, 1536);
  EXPECT_EQ(head.words, 80);
  EXPECT_EQ(head.bias, nullptr);
  EXPECT_EQ(head.trellis, c.files().find("lm_head.trellis")->data);
  EXPECT_EQ(head.suh, c.files().find("lm_head.suh")->data);
  EXPECT_EQ(head.svh, c.files().find("lm_head.svh")->data);
  EXPECT_EQ(c.linear("model.language_model.layers.3.mlp.experts.31.down_proj").words, 48);
  EXPECT_EQ(c.plain("model.language_model.layers.0.linear_attn.A_log").dtype, Dtype::kF32);
  const NgramTable& table = c.ngram();
  EXPECT_EQ(table.bits, 5);
  EXPECT_EQ(table.row_bytes, 102);
  EXPECT_EQ(table.rows, 16256);
  EXPECT_EQ(table.shard_rows, 8128);
  EXPECT_EQ(table.shards.size(), 2u);
  EXPECT_EQ(table.bias.size(), 8u * 160);
  EXPECT_EQ(table.sizes.size(), 8u);
  EXPECT_TRUE(notes_say(c, "ngram_embedding.safetensors: 6 tensors are not listed"));
}

TEST(Open, SecondModelWithItsSidecar) {
  if (!std::filesystem::exists(sidecar_model())) GTEST_SKIP() << "no " << sidecar_model();
  const Checkpoint c = Checkpoint::open(sidecar_model());
  EXPECT_EQ(c.linear("lm_head").words, 64);
  EXPECT_EQ(c.ngram().bits, 4);
  EXPECT_EQ(c.ngram().row_bytes, 82);
  EXPECT_TRUE(notes_say(c, "mtp_hyper_connection_mixer_patch.safetensors: 3 tensors"));
  expect_whole(c);
}

// spec: 303,253 text tensors with the draft head, of which 128 + 4 belong to the n-gram table.
TEST(Open, CensusOfTheFullModel) {
  Config config = Config::tiny();
  const std::pair<const char*, const char*> real[] = {
      {"vocab_size", "248320"},
      {"hidden_size", "2560"},
      {"num_hidden_layers", "48"},
      {"num_attention_heads", "24"},
      {"num_key_value_heads", "2"},
      {"head_dim", "256"},
      {"linear_num_key_heads", "16"},
      {"linear_num_value_heads", "48"},
      {"num_experts", "512"},
      {"num_experts_per_tok", "10"},
      {"moe_intermediate_size", "640"},
      {"shared_expert_intermediate_size", "640"},
      {"hc_count", "4"},
      {"hc_lowrank", "320"},
      {"ple_layer_ids", "[2]"},
      {"ple_embed_dim", "2560"},
      {"heads_per_ngram", "8"},
      {"ngram_vocab_size_base", "20000000"},
      {"make_ngram_vocab_size_divisible_by", "128"},
      {"indexer_n_heads", "4"},
      {"indexer_budget", "2048"},
      {"eos_token_id", "248044"},
  };
  for (const auto& [key, value] : real) config.text[key] = value;
  config.text.erase("layer_types");
  const ModelShape shape = parse_config(config.nested(), "config.json");
  std::uint64_t tensors = 0, linears = 0, expert_weights = 0;
  std::set<std::string> names;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const TensorRule& rule : tensor_table(shape)) {
    EXPECT_TRUE(names.insert(rule.name).second) << rule.name;
    tensors += rule.role == Role::kExl3 ? 4 : rule.role == Role::kPlain ? 1 : 128 + 4;
    linears += rule.role == Role::kExl3;
    if (rule.family == "experts") {
      expert_weights += static_cast<std::uint64_t>(rule.shape[0] * rule.shape[1]);
    }
    shapes[rule.name] = rule.shape;
  }
  EXPECT_EQ(tensors, 303253u);
  EXPECT_EQ(linears, 49u * (3 * 512 + 3) + 36 * 3 + 13 * 5 + 1 + 2);
  EXPECT_EQ(expert_weights, 120795955200u);  // routed total 120.8 G
  using Shape = std::vector<std::int64_t>;
  const std::string p = "model.language_model.layers.";
  EXPECT_EQ(shapes.at("lm_head"), (Shape{248320, 2560}));
  EXPECT_EQ(shapes.at(p + "0.linear_attn.in_proj_qkv"), (Shape{10240, 2560}));
  EXPECT_EQ(shapes.at(p + "0.linear_attn.out_proj"), (Shape{2560, 6144}));
  EXPECT_EQ(shapes.at(p + "0.linear_attn.conv1d.weight"), (Shape{10240, 1, 4}));
  EXPECT_EQ(shapes.at(p + "3.self_attn.q_proj"), (Shape{12288, 2560}));
  EXPECT_EQ(shapes.at(p + "3.self_attn.indexer.index_qk_proj"), (Shape{640, 2560}));
  EXPECT_EQ(shapes.at(p + "47.mlp_hyper_connection.block_inject_weight.weight"), (Shape{4, 10240}));
  EXPECT_EQ(shapes.at(p + "1.ple.key_proj.weight"), (Shape{10240, 2560}));
  EXPECT_EQ(shapes.at(p + "1.ple.ple_embedding.ngram_embedding"), (Shape{320001536, 160}));
  EXPECT_EQ(shapes.at("mtp.layers.0.mlp.experts.511.down_proj"), (Shape{2560, 640}));
}

TEST(Open, ValuesAreWidenedExactly) {
  const TempFolder folder;
  CheckpointWriter writer;
  const std::string half = "model.language_model.layers.0.linear_attn.in_proj_a.weight";
  const std::string brain = "model.language_model.layers.0.linear_attn.norm.weight";
  const std::string single = "model.language_model.layers.0.linear_attn.A_log";
  writer.tensors[single] = {"F32", {3}, raw(std::vector<float>{-1.5f, 0x1p-24f, 65504.0f})};
  writer.tensors[brain].bytes.replace(0, 4, "\x80\xBF\xC0\x3F", 4);  // -1, 1.5
  const Checkpoint c = open(writer, folder);
  for (const std::string& name : {half, brain}) {
    const std::string& bytes = writer.tensors[name].bytes;
    const std::vector<float> values = c.values(name);
    ASSERT_EQ(values.size(), bytes.size() / 2);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, bytes.data() + 2 * i, 2);
      ASSERT_EQ(values[i], decode(bits, name == half ? 5 : 8)) << name << " " << i;
    }
  }
  EXPECT_EQ(c.half_values(single), (std::vector<std::uint16_t>{0xBE00, 0x0001, 0x7BFF}));
  const std::vector<std::uint16_t> halves = c.half_values(half);
  EXPECT_EQ(raw(halves), writer.tensors[half].bytes);
  EXPECT_EQ(c.half_values(brain)[0], 0xBC00);
  EXPECT_EQ(c.half_values(brain)[1], 0x3E00);
  EXPECT_THROW(c.plain("lm_head"), LogicError);
  EXPECT_THROW(c.linear(half), LogicError);
}

TEST(Open, HalfValuesRefuseOverflow) {
  const TempFolder folder;
  CheckpointWriter writer;
  const std::string name = "model.language_model.layers.0.linear_attn.A_log";
  writer.tensors[name] = {"F32", {3}, raw(std::vector<float>{1, 2, 65520.0f})};
  const Checkpoint c = open(writer, folder);
  EXPECT_EQ(c.values(name)[2], 65520.0f);
  try {
    c.half_values(name);
    FAIL();
  } catch (const CheckpointError& error) {
    expect_parts(error.what(), {name, "element 2 = 65520", "fp16"});
  }
}

TEST(Open, TheHeadMayBePaddedAndDataUnaligned) {
  const TempFolder folder;
  const Checkpoint c = open(CheckpointWriter(), folder);
  EXPECT_EQ(c.shape().vocab, 200);
  EXPECT_EQ(c.linear("lm_head").out, 256);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(c.linear("lm_head").suh) % 2, 1u);
  expect_whole(c);
}

TEST(Open, PackedSignsBiasAndRedundantWeights) {
  const TempFolder folder;
  CheckpointWriter writer;
  writer.tensors.erase("lm_head.suh");
  writer.add("lm_head.su", "I16", {8});
  writer.tensors["lm_head.bias"] = {"BF16", {256}, std::string(512, '\x3F')};
  writer.add("lm_head.weight", "F16", {200, 128});
  writer.add("model.visual.blocks.0.attn.qkv.weight", "BF16", {4, 4});
  const Checkpoint c = open(writer, folder);
  const Exl3Weight& head = c.linear("lm_head");
  for (std::size_t i = 0; i < 128; ++i) {
    const auto byte = static_cast<unsigned char>(writer.tensors["lm_head.su"].bytes[i / 8]);
    std::uint16_t bits;
    std::memcpy(&bits, head.suh + 2 * i, 2);
    EXPECT_EQ(decode(bits, 5), (byte >> (i % 8) & 1) != 0 ? -1.0 : 1.0) << i;
  }
  ASSERT_NE(head.bias, nullptr);
  EXPECT_EQ(head.bias[255], static_cast<float>(decode(0x3F3F, 8)));
}

TEST(Open, DraftHeadIsOptionalAsAWhole) {
  CheckpointWriter writer;
  std::erase_if(writer.tensors, [](const auto& t) { return t.first.starts_with("mtp."); });
  {
    const TempFolder folder;
    const Checkpoint c = open(writer, folder);
    EXPECT_FALSE(c.has_mtp());
    EXPECT_EQ(c.shape().mtp_layers, 0);
    EXPECT_TRUE(notes_say(c, "no mtp.* tensor exists"));
  }
  CheckpointWriter unused;
  unused.config.text.erase("mtp_num_hidden_layers");
  const TempFolder folder;
  const Checkpoint c = open(unused, folder);
  EXPECT_FALSE(c.has_mtp());
  EXPECT_TRUE(notes_say(c, "mtp.* tensors are not used"));
}

TEST(Open, NgramTableInOnePieceUnquantisedAndAliased) {
  CheckpointWriter writer;
  const std::string prefix = kNgram;
  StoredTensor whole = writer.tensors.at(prefix + ".shard_0.trellis");
  const StoredTensor& second = writer.tensors.at(prefix + ".shard_1.trellis");
  whole.shape[0] += second.shape[0];
  whole.bytes += second.bytes;
  const std::int64_t rows = whole.shape[0];
  writer.tensors.erase(prefix + ".shard_0.trellis");
  writer.tensors.erase(prefix + ".shard_1.trellis");
  writer.tensors[prefix + ".trellis"] = whole;
  {
    const TempFolder folder;
    const Checkpoint c = open(writer, folder);
    EXPECT_EQ(c.ngram().shards.size(), 1u);
    EXPECT_EQ(c.ngram().shard_rows, rows);
    EXPECT_EQ(std::memcmp(c.ngram().shards[0], whole.bytes.data(), whole.bytes.size()), 0);
  }
  writer.tensors.erase(prefix + ".trellis");
  writer.tensors.erase(prefix + ".head_bias");
  for (int i = 0; i < 12; ++i) {  // 10 and 11 sort before 2 as text
    writer.add(prefix + ".shard_" + std::to_string(i) + ".weight", "F16", {i < 11 ? 10 : 2, 160});
  }
  const auto rename = [&](const std::string& from, const std::string& to) {
    auto node = writer.tensors.extract(prefix + from);
    node.key() = kEmbedding + to;
    writer.tensors.insert(std::move(node));
  };
  rename(".head_offsets", ".ngram_heads_offsets");
  rename(".head_vocab_sizes", ".ngram_heads_vocab_sizes");
  rename(".layer_multipliers", ".layer_multipliers");
  const TempFolder folder;
  const Checkpoint c = open(writer, folder);
  EXPECT_EQ(c.ngram().bits, 0);
  EXPECT_EQ(c.ngram().row_bytes, 320);
  EXPECT_EQ(c.ngram().shard_rows, 10);
  EXPECT_EQ(c.ngram().rows, 112);
  EXPECT_TRUE(c.ngram().bias.empty());
  ASSERT_EQ(c.ngram().shards.size(), 12u);
  for (std::size_t i = 0; i < 12; ++i) {
    const std::string name = prefix + ".shard_" + std::to_string(i) + ".weight";
    EXPECT_EQ(c.ngram().shards[i], c.files().find(name)->data);
  }
}

TEST(Open, WithoutNgramLayer) {
  CheckpointWriter writer;
  writer.config.text.erase("ple_layer_ids");
  std::erase_if(writer.tensors,
                [](const auto& t) { return t.first.find(".ple.") != std::string::npos; });
  const TempFolder folder;
  const Checkpoint c = open(writer, folder);
  EXPECT_THROW(c.ngram(), LogicError);
  expect_whole(c);
}

TEST(Open, QuantizationConfigIsOnlyANote) {
  CheckpointWriter writer;
  const auto storage = [](const std::string& shape) {
    return R"({"bits": 3, "tensor_storage": {"lm_head": {"stored_tensors": {"lm_head.trellis": )"
           R"({"shape": )" +
           shape + R"(, "n_bytes": 1}}, "quant_format": "exl3"}}})";
  };
  for (const auto& [text, note] : std::map<std::string, std::string>{
           {storage("[8, 16, 48]"), ""},
           {storage("[8, 16, 64]"), "lm_head.trellis has 48 words a tile, not 64"},
           {"{", "not usable"},
           {storage("3"), "not usable"}}) {
    writer.extra["quantization_config.json"] = text;
    const TempFolder folder;
    const Checkpoint c = open(writer, folder);
    EXPECT_EQ(notes_say(c, "quantization_config.json"), !note.empty()) << text;
    EXPECT_TRUE(note.empty() || notes_say(c, note)) << text;
  }
}

}  // namespace
}  // namespace flashnext::testing_checkpoint
