// config.json -> ModelShape: what the keys mean, what their absence means, what is refused.
#include "tests/cpp/checkpoint_writer.h"

namespace flashnext::testing_checkpoint {
namespace {

std::string refusal_of(const std::string& json) {
  try {
    parse_config(json, "config.json");
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

std::string with(const std::string& key, const std::string& value) {
  Config config = Config::tiny();
  config.text[key] = value;
  return refusal_of(config.nested());
}

ModelShape shape_without(const std::string& key) {
  Config config = Config::tiny();
  EXPECT_EQ(config.text.erase(key), 1u) << key;
  return parse_config(config.nested(), "config.json");
}

TEST(Config, ReadsTheDemoModel) {
  const ModelShape s = parse_config(read_file(demo_model() + "/config.json"), "config.json");
  EXPECT_EQ(s.hidden, 256);
  EXPECT_EQ(s.layers, 8);
  EXPECT_EQ(s.vocab, 1536);
  for (std::size_t l = 0; l < 8; ++l) {
    EXPECT_EQ(s.layer_kinds[l], l % 4 == 3 ? LayerKind::kAttention : LayerKind::kDeltaNet);
  }
  EXPECT_EQ(s.eps, 1e-6f);
  EXPECT_EQ(s.max_positions, 4096);
  EXPECT_EQ(s.heads, 4);
  EXPECT_EQ(s.kv_heads, 2);
  EXPECT_EQ(s.head_dim, 256);
  EXPECT_EQ(s.rotary, 64);
  EXPECT_EQ(s.rope_theta, 1e7);
  EXPECT_EQ(s.gdn_k_heads, 2);
  EXPECT_EQ(s.gdn_v_heads, 6);
  EXPECT_EQ(s.gdn_channels(), 1280);
  EXPECT_EQ(s.gdn_kernel, 4);
  EXPECT_FALSE(s.gdn_silu_gate);
  EXPECT_EQ(s.experts, 32);
  EXPECT_EQ(s.top_k, 4);
  EXPECT_EQ(s.expert_inner, 128);
  EXPECT_EQ(s.shared_inner, 128);
  EXPECT_TRUE(s.norm_topk);
  EXPECT_EQ(s.streams, 4);
  EXPECT_EQ(s.rank, 128);
  EXPECT_EQ(s.ple_layer, 1);
  EXPECT_EQ(s.ple_dim, 1280);
  EXPECT_EQ(s.ngram_heads(), 8);
  EXPECT_EQ(s.ngram_vocab_base, 2000);
  EXPECT_EQ(s.separator, 1493);
  EXPECT_EQ(s.index_heads, 4);
  EXPECT_EQ(s.index_dim, 128);
  EXPECT_EQ(s.max_blocks(), 16);
  EXPECT_EQ(s.mtp_layers, 1);
  EXPECT_TRUE(s.mtp_per_stream);
}

TEST(Config, FlatEqualsNestedAndAliasesHold) {
  Config config = Config::tiny();
  config.top["model_type"] = R"("qwen4_exp_text")";
  config.text["layer_types"] = R"(["linear_attention", "indexed_attention"])";
  config.text["rope_parameters"] = R"({"rope_type": "default"})";
  config.text["rope_theta"] = "5e6";
  config.text["partial_rotary_factor"] = "0.5";
  config.text["eos_token_id"] = "7";
  for (const std::string& json : {config.flat(), config.nested()}) {
    const ModelShape s = parse_config(json, "config.json");
    EXPECT_EQ(s.layer_kinds[1], LayerKind::kAttention);
    EXPECT_EQ(s.rope_theta, 5e6);
    EXPECT_EQ(s.rotary, 64);
    EXPECT_EQ(s.separator, 7);
  }
  config.text.erase("rope_parameters");
  EXPECT_EQ(parse_config(config.flat(), "config.json").rotary, 64);
}

TEST(Config, AbsentKeysMeanWhatTheTableSays) {
  EXPECT_EQ(shape_without("rms_norm_eps").eps, 1e-6f);
  EXPECT_TRUE(shape_without("output_gate_type").gdn_silu_gate);  // falls back to hidden_act
  EXPECT_EQ(shape_without("hc_count").streams, 4);
  EXPECT_EQ(shape_without("hc_lowrank").rank, 320);
  EXPECT_EQ(shape_without("ple_layer_ids").ple_layer, -1);
  EXPECT_EQ(shape_without("mtp_num_hidden_layers").mtp_layers, 0);
  EXPECT_FALSE(shape_without("mtp_hidden_norm").mtp_per_stream);
  EXPECT_EQ(shape_without("ngram_vocab_size_base").ngram_vocab_base, 20000000);
  EXPECT_EQ(shape_without("make_ngram_vocab_size_divisible_by").ngram_divisor, 128);
  const ModelShape tiny = parse_config(Config::tiny().nested(), "config.json");
  EXPECT_EQ(tiny.ngram_seed, 1234);
  EXPECT_EQ(tiny.gdn_kernel, 4);
  EXPECT_EQ(tiny.ple_kernel, 4);
  EXPECT_EQ(tiny.ngram_size, 3);
  EXPECT_TRUE(tiny.norm_topk);
  Config config = Config::tiny();
  config.text.erase("layer_types");
  config.text["num_hidden_layers"] = "6";
  const ModelShape s = parse_config(config.nested(), "config.json");
  for (std::size_t l = 0; l < 6; ++l) {
    EXPECT_EQ(s.layer_kinds[l], l == 3 ? LayerKind::kAttention : LayerKind::kDeltaNet) << l;
  }
}

TEST(Config, RequiredKeysAreNamed) {
  for (const char* key :
       {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings", "linear_num_key_heads",
        "linear_num_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size", "indexer_n_heads", "indexer_kv_heads",
        "indexer_head_dim", "indexer_budget", "indexer_compress_ratio", "eos_token_id"}) {
    for (const bool null : {false, true}) {
      Config config = Config::tiny();
      config.text.erase(key);
      if (null) config.text[key] = "null";
      expect_parts(
          refusal_of(config.nested()),
          {"config.json", "text_config." + std::string(key) + " is missing", "repository"});
    }
  }
  for (const char* key : {"architectures", "model_type"}) {
    Config config = Config::tiny();
    config.top.erase(key);
    expect_parts(refusal_of(config.nested()), {key, "missing"});
  }
  expect_parts(with("rope_parameters", R"({"rope_theta": 1e7})"),
               {"rope_parameters.partial_rotary_factor is missing"});
  expect_parts(with("rope_parameters", R"({"partial_rotary_factor": 0.25})"),
               {"rope_parameters.rope_theta is missing"});
}

TEST(Config, WrongTypesAreNamed) {
  const Config tiny = Config::tiny();
  for (const auto& [key, value] : tiny.text) {
    for (const char* wrong : {"{\"a\": 1}", "\"8\"", "[[]]", "true", "1.5", "-3"}) {
      const bool string = value.front() == '"';
      const bool object = value.front() == '{';
      if ((string && *wrong == '"') || key == "rms_norm_eps") continue;
      if (object && *wrong == '{') continue;
      const std::string message = with(key, wrong);
      expect_parts(message, {"config.json", key, "must be"});
    }
  }
  expect_parts(with("num_experts", "\"512\""),
               {"text_config.num_experts = \"512\" must be an integer of 1 to", "not a string"});
  expect_parts(with("rms_norm_eps", "\"1e-6\""), {"rms_norm_eps", "a number, not a string"});
  expect_parts(refusal_of("[1]"), {"must hold an object, not a list"});
  expect_parts(refusal_of("{\"a\": 1"), {"config.json", "not valid JSON", "byte 7"});
  expect_parts(refusal_of("{\"text_config\": 3}"), {"text_config = 3 must be an object"});
}

TEST(Config, ValuesOutsideTheEngineAreNamed) {
  const struct {
    const char* key;
    const char* value;
    const char* expected;
  } cases[] = {
      {"hidden_size", "0", "1 to 32768"},
      {"hidden_size", "9223372036854775807", "1 to 32768"},
      {"hidden_size", "18446744073709551616", "must be an integer"},
      {"hidden_size", "192", "a multiple of 128"},
      {"moe_intermediate_size", "200", "a multiple of 128"},
      {"shared_expert_intermediate_size", "64", "a multiple of 128"},
      {"num_hidden_layers", "3", "list of num_hidden_layers = 3"},
      {"layer_types", R"(["linear_attention", "sliding_attention"])", "entry 1 is"},
      {"head_dim", "100", "a multiple of 128"},
      {"attention_bias", "true", "no bias"},
      {"attn_output_gate", "false", "gated"},
      {"hidden_act", "\"gelu\"", "\"silu\""},
      {"output_gate_type", "\"tanh\"", "\"sigmoid\" or \"silu\""},
      {"tie_word_embeddings", "true", "lm_head"},
      {"rms_norm_eps", "0", "1e-30 to 1"},
      {"rope_parameters", R"({"rope_type": "yarn", "rope_theta": 1e7})", "\"default\""},
      {"rope_parameters", R"({"rope_theta": 1e7, "partial_rotary_factor": 2})", "even number"},
      {"rope_parameters", R"({"rope_theta": 1e7, "partial_rotary_factor": 0.0078125})", "even"},
      {"rope_parameters", R"({"rope_theta": 1e7, "partial_rotary_factor": 0.3})", "even number"},
      {"rope_parameters", R"({"rope_theta": 0, "partial_rotary_factor": 0.25})", "above 1"},
      {"rope_theta", "10000", "equal to rope_parameters.rope_theta"},
      {"rope_scaling", R"({"type": "linear"})", "null"},
      {"linear_key_head_dim", "64", "128"},
      {"linear_value_head_dim", "256", "128"},
      {"linear_num_key_heads", "2", "a multiple of linear_num_key_heads = 2"},
      {"linear_conv_kernel_dim", "1", "2 to 16"},
      {"num_experts_per_tok", "4", "at most num_experts = 3"},
      {"num_experts", "1000000", "1 to 65536"},
      {"ple_layer_ids", "[2]", "linear_attention layer"},
      {"ple_layer_ids", "[0]", "one-based"},
      {"ple_layer_ids", "[1, 1]", "at most one"},
      {"ple_layer_ids", "1", "a list"},
      {"ple_embed_dim", "160", "2 heads * 160 = 320"},
      {"ngram_size", "4", "2-grams and 3-grams"},
      {"heads_per_ngram", "33", "1 to 32"},
      {"eos_token_id", "200", "below vocab_size = 200"},
      {"eos_token_id", "[]", "below vocab_size"},
      {"indexer_kv_heads", "2", "one index key"},
      {"indexer_head_dim", "96", "a multiple of 128"},
      {"indexer_compress_ratio", "3", "a divisor of 64"},
      {"indexer_budget", "30", "a multiple of indexer_compress_ratio = 4"},
      {"mtp_num_hidden_layers", "2", "0 or 1"},
      {"mtp_hidden_norm", "\"token\"", "\"stack\""},
      {"mtp_use_dedicated_embeddings", "true", "shares the token embedding"},
      {"mtp", R"({"rope_theta": 10000})", "equal to the trunk's"},
      {"mtp", R"({"layer_types": ["linear_attention"]})", "full_attention"},
      {"mtp", R"({"num_hidden_layers": 2})", "mtp_num_hidden_layers = 1"},
      {"mtp", R"({"mtp_use_hidden_state_from_layer": 3})", "null"},
  };
  for (const auto& c : cases) {
    expect_parts(with(c.key, c.value), {"config.json", c.key, c.expected});
  }
}

TEST(Config, HeadsMustDivide) {
  Config config = Config::tiny();
  config.text["num_key_value_heads"] = "3";
  expect_parts(refusal_of(config.nested()),
               {"num_attention_heads = 2", "a multiple of num_key_value_heads = 3"});
}

TEST(Config, AbsentPleWidthIsTheHiddenSize) {
  Config config = Config::tiny();
  config.text.erase("ple_embed_dim");
  expect_parts(refusal_of(config.nested()),
               {"ple_embed_dim is absent", "hidden_size = 128", "2 heads * 160 = 320"});
  config.text["hidden_size"] = "1280";
  config.text["heads_per_ngram"] = "4";
  EXPECT_EQ(parse_config(config.nested(), "config.json").ple_dim, 1280);
}

TEST(Config, OtherModelsAreRefusedByName) {
  Config config = Config::tiny();
  config.top["model_type"] = R"("qwen3_next")";
  expect_parts(refusal_of(config.nested()), {"model_type = \"qwen3_next\"", "qwen4_exp"});
  config = Config::tiny();
  config.top["architectures"] = R"(["LlamaForCausalLM"])";
  expect_parts(refusal_of(config.nested()), {"architectures", "Qwen4Exp"});
  config = Config::tiny();
  config.top["quantization_config"] = R"({"quant_method": "awq"})";
  expect_parts(refusal_of(config.nested()), {"quantization_config.quant_method = \"awq\"", "exl3"});
  config = Config::tiny();
  config.top["tie_word_embeddings"] = "true";
  expect_parts(refusal_of(config.nested()), {"tie_word_embeddings = true", "lm_head"});
}

TEST(Config, OneArchitectureUnderItsLaterNames) {
  const ModelShape usual = parse_config(Config::tiny().nested(), "config.json");
  for (const char* attention : {"qwen_sparse_attention", "deepseek_sparse_attention"}) {
    for (const char* ending : {"ForConditionalGeneration", "ForCausalLM"}) {
      Config config = Config::tiny();
      config.top["model_type"] = R"("qwen3_8_flash_next")";
      config.top["architectures"] = R"(["Qwen3_8_FlashNext)" + std::string(ending) + R"("])";
      config.text["model_type"] = R"("qwen3_8_flash_next_text")";
      config.text["layer_types"] = R"(["linear_attention", ")" + std::string(attention) + R"("])";
      config.text["mtp"] = R"({"layer_types": [")" + std::string(attention) + R"("]})";
      const ModelShape s = parse_config(config.nested(), "config.json");
      EXPECT_EQ(s.layer_kinds, usual.layer_kinds);
      EXPECT_EQ(s.hidden, usual.hidden);
    }
  }
}

// A known name excuses nothing else.
TEST(Config, LaterNamesDoNotOpenOtherDoors) {
  Config config = Config::tiny();
  config.top["model_type"] = R"("qwen3_8_flash_next")";
  config.top["architectures"] = R"(["Qwen3_8_FlashNextForConditionalGeneration"])";
  config.text["model_type"] = R"("qwen3_8_flash_next_text")";
  ASSERT_EQ(refusal_of(config.nested()), "");
  Config scaled = config;
  scaled.text["rope_parameters"] =
      R"({"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "factor": 4.0})";
  expect_parts(refusal_of(scaled.nested()), {"rope_parameters.rope_type = \"yarn\"", "scaled"});
  scaled = config;
  scaled.text["rope_scaling"] = R"({"type": "yarn", "factor": 4.0})";
  expect_parts(refusal_of(scaled.nested()), {"rope_scaling", "scaled rotary positions"});
  for (const char* type : {"sliding_attention", "chunked_attention", "sparse_attention", ""}) {
    Config other = config;
    other.text["layer_types"] = R"(["linear_attention", ")" + std::string(type) + R"("])";
    expect_parts(refusal_of(other.nested()), {"layer_types", "entry 1", "qwen_sparse_attention"});
  }
  for (const char* type : {"deepseek_v32", "qwen3_next", "qwen3_8_flash", "qwen3_8_flash_next2"}) {
    Config other = config;
    other.top["model_type"] = '"' + std::string(type) + '"';
    expect_parts(refusal_of(other.nested()), {"model_type", type, "qwen3_8_flash_next"});
    other = config;
    other.text["model_type"] = '"' + std::string(type) + '"';
    expect_parts(refusal_of(other.nested()), {"model_type", type, "qwen3_8_flash_next"});
  }
  Config other = config;
  other.top["architectures"] = R"(["Qwen3NextForCausalLM"])";
  expect_parts(refusal_of(other.nested()), {"architectures", "Qwen3_8_FlashNext"});
}

TEST(Config, DuplicateKeysAreRefused) {
  const std::string json = Config::tiny().nested();
  const std::string twice = "{\"model_type\": \"qwen4_exp\", " + json.substr(1);
  expect_parts(refusal_of(twice), {"\"model_type\" stands twice"});
}

}  // namespace
}  // namespace flashnext::testing_checkpoint
