// Checkpoints with one thing wrong: each is refused with the thing, the value and the remedy.
#include "tests/cpp/checkpoint_writer.h"

#include <cmath>

namespace flashnext::testing_checkpoint {
namespace {

const std::string kLayer = "model.language_model.layers.0.";
const std::string kNgram = kLayer + "ple.ple_embedding.ngram_embedding";
const std::string kExpert = kLayer + "mlp.experts.1.up_proj";
const std::string kNorm = kLayer + "linear_attn.norm.weight";

template <class Change>
std::string after(Change change) {
  CheckpointWriter writer;
  change(writer.tensors);
  return refusal(writer);
}

using Tensors = std::map<std::string, StoredTensor>;

TEST(Bad, TheUnchangedCheckpointOpens) { EXPECT_EQ(refusal(CheckpointWriter()), ""); }

TEST(Bad, MissingTensors) {
  const CheckpointWriter writer;
  for (const auto& [name, tensor] : writer.tensors) {
    CheckpointWriter without;
    without.tensors.erase(name);
    if (name.ends_with(".mul1")) {
      if (name.starts_with("lm_head")) {
        expect_parts(refusal(without), {"lm_head: codebook 3inst is not implemented", "mul1"});
      }
      continue;
    }
    if (name.find(".experts.") != std::string::npos && !name.starts_with(kExpert)) continue;
    if (name == kNgram + ".shard_0.trellis") {
      expect_parts(refusal(without), {kNgram + ": shard_0 is missing, shard_1 exists"});
    } else if (name == kNgram + ".shard_1.trellis") {
      without.metadata.clear();
      expect_parts(refusal(without), {kNgram, "has 56 rows", "reach up to row 112", "Download"});
    } else {
      expect_parts(refusal(without), {"1 tensors that config.json asks for are missing", name});
    }
  }
}

TEST(Bad, ManyMissingTensorsAreCounted) {
  const std::string message = after([](Tensors& t) {
    std::erase_if(t, [](const auto& e) { return e.first.starts_with(kLayer + "mlp."); });
  });
  // Two plain tensors and (3 + 1) * 3 linears.
  expect_parts(message, {"14 tensors", kLayer + "mlp.gate.weight", "and 10 more", "Download"});
}

TEST(Bad, ExtraTensors) {
  expect_parts(after([](Tensors& t) {
                 t["lm_head.extra"] = {"F16", {1}, "ab", "x.safetensors"};
               }),
               {"1 tensors belong to no part", "lm_head.extra", "Remove", "x.safetensors"});
  expect_parts(after([](Tensors& t) {
                 t[kLayer + "mlp.experts.3.up_proj.suh"] = {"F16", {1}, "ab"};
               }),
               {kLayer + "mlp.experts.3.up_proj.suh"});
  expect_parts(after([](Tensors& t) {
                 t[kNgram + ".shard_01.trellis"] = {"I16", {1}, "ab"};
               }),
               {"belong to no part", "shard_01"});
}

TEST(Bad, MissingSidecarAndPartialDraftHead) {
  const auto patch = [](const auto& e) {
    return e.first.starts_with("mtp.hyper_connection_mixer.");
  };
  expect_parts(after([&](Tensors& t) { std::erase_if(t, patch); }),
               {"3 tensors", "mtp.hyper_connection_mixer.hc_norm.weight",
                "mtp_hyper_connection_mixer_patch.safetensors", "download"});
  expect_parts(after([&](Tensors& t) {
                 std::erase_if(
                     t, [&](const auto& e) { return e.first.starts_with("mtp.") && !patch(e); });
               }),
               {"mtp.fc_embedding.trellis", "mtp_num_hidden_layers to 0"});
  expect_parts(after([](Tensors& t) {
                 std::erase_if(t, [](const auto& e) { return e.first.starts_with(kNgram); });
               }),
               {kNgram + ".shard_0.trellis", "ngram_embedding.safetensors"});
}

TEST(Bad, MissingSidecarOfTheSecondModel) {
  if (!std::filesystem::exists(sidecar_model())) GTEST_SKIP() << "no " << sidecar_model();
  const TempFolder folder;
  folder.link_all(sidecar_model());
  EXPECT_EQ(refusal(folder.path()), "");
  std::filesystem::remove(folder.path() + "/mtp_hyper_connection_mixer_patch.safetensors");
  expect_parts(refusal(folder.path()),
               {"3 tensors", "mtp_hyper_connection_mixer_patch.safetensors"});
}

TEST(Bad, EveryShardTruncated) {
  for (const auto& entry : std::filesystem::directory_iterator(demo_model())) {
    const std::string name = entry.path().filename();
    if (!name.ends_with(".safetensors")) continue;
    const std::string bytes = read_file(entry.path());
    for (const std::size_t keep : {bytes.size() - 1, bytes.size() / 2, std::size_t{1000},
                                   std::size_t{8}, std::size_t{5}, std::size_t{0}}) {
      const TempFolder folder;
      folder.link_all(demo_model());
      folder.write(name, bytes.substr(0, keep));
      expect_parts(refusal(folder.path()), {name, "truncated", "download"});
    }
    const TempFolder folder;
    folder.link_all(demo_model());
    std::filesystem::remove(folder.path() + "/" + name);
    const bool ngram = name == "ngram_embedding.safetensors";
    expect_parts(refusal(folder.path()), {ngram ? std::string("missing") : name, "ownload"});
  }
}

TEST(Bad, WrongShapesAndDtypes) {
  const auto reshaped = [](const std::string& name, const std::string& dtype,
                           std::vector<std::int64_t> shape) {
    CheckpointWriter writer;
    writer.add(name, dtype, std::move(shape));
    return refusal(writer);
  };
  expect_parts(reshaped(kNorm, "BF16", {127}), {kNorm, "BF16 [127]", "BF16 [128]", "config.json"});
  expect_parts(reshaped(kNorm, "BF16", {1, 128}), {kNorm, "[1, 128]", "[128]"});
  expect_parts(reshaped(kNorm, "I16", {128}), {kNorm, "I16", "F16, BF16 or F32"});
  expect_parts(reshaped(kNorm, "F64", {128}), {kNorm, "F64", "F16, BF16 or F32"});
  expect_parts(reshaped("lm_head.suh", "F16", {256}), {"lm_head.suh", "[256]", "[128]"});
  expect_parts(reshaped("lm_head.suh", "BF16", {128}), {"lm_head.suh", "BF16", "F16 [128]"});
  expect_parts(reshaped("lm_head.svh", "F16", {200}), {"lm_head.svh", "[200]", "[256]"});
  expect_parts(reshaped("lm_head.bias", "F16", {200}), {"lm_head.bias", "[200]", "[256]"});
  expect_parts(reshaped("lm_head.bias", "I16", {256}), {"lm_head.bias", "F16, BF16 or F32"});
  expect_parts(reshaped(kExpert + ".bias", "F16", {256}), {kExpert + ".bias", "not implemented"});
  expect_parts(reshaped("lm_head.trellis", "F16", {8, 16, 48}), {"lm_head.trellis", "I16"});
  expect_parts(reshaped("lm_head.trellis", "I16", {8, 768}), {"[8, 768]", "three dimensions"});
  expect_parts(reshaped("lm_head.trellis", "I16", {8, 16, 72}), {"[8, 16, 72]", "rate", "again"});
  expect_parts(reshaped("lm_head.trellis", "I16", {8, 16, 144}), {"[8, 16, 144]", "K = 1 to 8"});
  expect_parts(reshaped("lm_head.trellis", "I16", {16, 16, 48}),
               {"128 -> 200", "[8, 16, 48]", "config.json"});
  expect_parts(reshaped("lm_head.trellis", "I16", {8, 24, 48}), {"128 -> 200", "[8, 16, 48]"});
  expect_parts(reshaped(kExpert + ".trellis", "I16", {8, 16, 64}),
               {kExpert, "K = 4", kLayer + "mlp.experts.0.up_proj has K = 3", "one rate"});
  expect_parts(reshaped("model.language_model.embed_tokens.weight", "F16", {200, 128}),
               {"embed_tokens.weight", "F16", "BF16"});
}

TEST(Bad, HalfRatesAreLegal) {
  for (const int words : {24, 40, 56, 16, 128}) {
    CheckpointWriter writer;
    writer.add("lm_head.trellis", "I16", {8, 16, words});
    EXPECT_EQ(refusal(writer), "") << words;
  }
}

TEST(Bad, CodebooksAndMarkers) {
  expect_parts(after([](Tensors& t) {
                 t.erase("lm_head.mul1");
                 t["lm_head.mcg"] = {"I32", {}, "\xED\x1F\xAC\xCB"};
               }),
               {"lm_head: codebook mcg is not implemented", "mul1"});
  expect_parts(after([](Tensors& t) {
                 t["lm_head.mcg"] = {"I32", {}, "\xED\x1F\xAC\xCB"};
               }),
               {"lm_head", "two codebooks, mcg and mul1"});
  expect_parts(after([](Tensors& t) { t["lm_head.mul1"].bytes = "\x83\xDC\xD1\x2D"; }),
               {"lm_head.mul1", "0x2DD1DC83", "0x83DCD12D", "swapped", "download"});
  expect_parts(after([](Tensors& t) { t["lm_head.mul1"].bytes = "\x2D\xD1\xDC\x82"; }),
               {"lm_head.mul1", "0x82DCD12D", "0x83DCD12D"});
  expect_parts(after([](Tensors& t) {
                 t["lm_head.mul1"] = {"I16", {2}, "\x2D\xD1\xDC\x83"};
               }),
               {"lm_head.mul1", "I16 [2]", "one I32"});
  expect_parts(after([](Tensors& t) { t["lm_head.mul1"] = {"I32", {0}, ""}; }), {"one I32"});
  EXPECT_EQ(after([](Tensors& t) { t["lm_head.mul1"].shape = {1}; }), "");
}

TEST(Bad, NonFiniteValues) {
  const auto poisoned = [](const std::string& name, std::size_t element, std::string_view bytes) {
    CheckpointWriter writer;
    writer.tensors.at(name).bytes.replace(element * bytes.size(), bytes.size(), bytes);
    return refusal(writer);
  };
  const std::string_view nan16("\x00\x7E", 2), inf16("\x00\xFC", 2), nan_brain("\xC0\x7F", 2);
  expect_parts(poisoned("lm_head.suh", 5, nan16), {"lm_head.suh: element 5 is NaN", "finite"});
  expect_parts(poisoned("lm_head.svh", 255, inf16), {"lm_head.svh: element 255 is infinite"});
  expect_parts(poisoned(kExpert + ".svh", 0, nan16), {kExpert + ".svh: element 0 is NaN"});
  expect_parts(poisoned(kNorm, 127, nan_brain), {kNorm + ": element 127 is NaN"});
  expect_parts(poisoned(kLayer + "linear_attn.in_proj_a.weight", 383, nan16), {"element 383"});
  expect_parts(poisoned(kNgram + ".head_bias", 319, inf16), {"head_bias: element 319"});
  CheckpointWriter writer;
  const std::string a_log = kLayer + "linear_attn.A_log";
  writer.tensors[a_log] = {"F32", {3}, raw(std::vector<float>{1, 2, -INFINITY})};
  expect_parts(refusal(writer), {a_log + ": element 2 is infinite"});
  // The largest finite values are no mistake; any trellis word and any row of the table is legal.
  EXPECT_EQ(poisoned("lm_head.suh", 0, "\xFF\x7B"), "");
  EXPECT_EQ(poisoned("lm_head.trellis", 0, nan16), "");
  EXPECT_EQ(poisoned(kNgram + ".shard_0.trellis", 0, nan16), "");
}

// However large the tensor, and wherever in it.
TEST(Bad, NonFiniteValuesOfALargeTensor) {
  CheckpointWriter writer;
  writer.config.text["vocab_size"] = "13000";
  const std::int64_t rows = 13000, elements = rows * 128;
  const std::string name = "model.language_model.embed_tokens.weight";
  writer.tensors.clear();
  writer.fill(3);
  ASSERT_GT(elements * 2, 3 << 20);
  EXPECT_EQ(refusal(writer), "");
  for (const std::int64_t at :
       {std::int64_t{0}, std::int64_t{1} << 19, (std::int64_t{1} << 20) + 7, elements - 1}) {
    CheckpointWriter bad = writer;
    bad.tensors.at(name).bytes.replace(static_cast<std::size_t>(2 * at), 2, "\xC0\x7F");
    expect_parts(refusal(bad), {name + ": element " + std::to_string(at) + " is NaN", "finite"});
  }
}

TEST(Bad, Unquantised) {
  expect_parts(after([](Tensors& t) {
                 for (const char* m : {".trellis", ".suh", ".svh", ".mul1"}) t.erase(kExpert + m);
                 t[kExpert + ".weight"] = {"BF16", {256, 128}, std::string(65536, 'a')};
               }),
               {kExpert + ".weight", "unquantised", "exllamav3"});
  expect_parts(after([](Tensors& t) {
                 const std::string e = "model.language_model.embed_tokens";
                 t.erase(e + ".weight");
                 t[e + ".trellis"] = {"I16", {200, 81}, std::string(32400, 'a')};
                 t[e + ".signs"] = {"F16", {1, 256}, std::string(512, 'a')};
               }),
               {"embed_tokens.trellis", "quantised token embedding", "not implemented", "BF16"});
}

TEST(Bad, NgramTable) {
  const auto reshaped = [](const std::string& member, const std::string& dtype,
                           std::vector<std::int64_t> shape) {
    CheckpointWriter writer;
    writer.add(kNgram + member, dtype, std::move(shape));
    writer.tensors.at(kNgram + member).file = CheckpointWriter::kNgramFile;
    return refusal(writer);
  };
  expect_parts(reshaped(".shard_1.trellis", "I16", {56, 41}), {"shard_1", "rows of 41", "has 51"});
  expect_parts(reshaped(".shard_0.trellis", "I16", {56, 52}), {"shard_0", "[56, 52]", "1 + 10 K"});
  expect_parts(reshaped(".shard_0.trellis", "I16", {56, 91}), {"[56, 91]", "K = 1 to 8"});
  expect_parts(reshaped(".shard_0.trellis", "F16", {56, 51}), {"F16 [56, 51]", "I16"});
  expect_parts(reshaped(".shard_0.trellis", "I16", {0, 51}), {"[0, 51]"});
  expect_parts(reshaped(".shard_1.trellis", "I16", {57, 51}), {"shard_1", "has 57 rows", "has 56"});
  expect_parts(reshaped(".shard_3.trellis", "I16", {56, 51}), {"shard_2 is missing", "shard_3"});
  expect_parts(reshaped(".trellis", "I16", {112, 51}), {"in one piece and in shards"});
  expect_parts(reshaped(".head_bias", "F16", {2, 128}), {"head_bias", "[2, 128]", "[2, 160]"});
  expect_parts(reshaped(".head_offsets", "I64", {3}), {"head_offsets", "[3]", "[2]"});
  expect_parts(reshaped(".head_offsets", "I32", {2}), {"head_offsets", "I32", "I64"});
  expect_parts(reshaped(".layer_multipliers", "I64", {2}), {"layer_multipliers", "[3]"});
  expect_parts(reshaped(".head_vocab_sizes", "I64", {2}),
               {"head_vocab_sizes: element 0 is", "config.json derives 53"});
  expect_parts(after([](Tensors& t) {
                 t.at(kNgram + ".head_offsets").bytes = raw(std::vector<std::int64_t>{0, 54});
               }),
               {"head_offsets: element 1 is 54, but config.json derives 53"});
  expect_parts(after([](Tensors& t) {
                 const std::string alias = kLayer + "ple.ple_embedding.ngram_heads_offsets";
                 t[alias] = {"I64", {2}, raw(std::vector<std::int64_t>{0, 54})};
               }),
               {"ngram_heads_offsets: differs from"});
  CheckpointWriter seed;
  seed.config.text["seed"] = "1235";
  expect_parts(refusal(seed), {"layer_multipliers: element 0 is", "seed", "belongs"});
  for (const char* dtype : {"BF16", "F32"}) {
    CheckpointWriter plain;
    for (const char* s : {".shard_0.trellis", ".shard_1.trellis"}) plain.tensors.erase(kNgram + s);
    plain.add(kNgram + ".weight", dtype, {112, 160});
    expect_parts(refusal(plain), {kNgram + ".weight", dtype, "must be F16"});
  }
}

TEST(Bad, NgramMetadata) {
  const auto saying = [](const char* k, const char* codebook, const char* rows) {
    CheckpointWriter writer;
    writer.metadata[CheckpointWriter::kNgramFile] =
        CheckpointWriter::ngram_metadata(k, codebook, rows);
    return refusal(writer);
  };
  EXPECT_EQ(saying("5", "mul1", "112"), "");
  expect_parts(saying("4", "mul1", "112"), {"ngram_embedding.safetensors", "K = 4", "needs 5"});
  expect_parts(saying("5", "mcg", "112"), {"codebook = mcg", "needs mul1"});
  expect_parts(saying("5", "mul1", "113"), {"rows = 113", "needs 112"});
}

}  // namespace
}  // namespace flashnext::testing_checkpoint
