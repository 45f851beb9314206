// config.json -> ModelShape (spec/model.md 1). A key whose absence would silently change the
// function is required; every bound below keeps later products far from overflow.
#include "cpp/base/errors.h"
#include "cpp/base/json.h"
#include "cpp/checkpoint/config_names.h"
#include "cpp/checkpoint/config_reader.h"
#include "cpp/checkpoint/model_shape.h"

#include <cmath>
#include <string>

namespace flashnext {
namespace {

constexpr std::int32_t kTile = 128;  // EXL3 rotates blocks of 128
// An int8 digit times a byte sum, summed over the inputs, must fit int32 (spec/numerics.md 1).
constexpr std::int32_t kMaxInputs = 32768;
constexpr std::int32_t kPage = 64;            // tokens of a KV page
constexpr std::int32_t kMaxNgramHeads = 64;   // what the n-gram ops hold
constexpr std::int64_t kMaxExperts = 262144;  // layers * experts
constexpr std::int32_t kNgramSize = 3;

class ConfigParser {
 public:
  ConfigParser(const ConfigReader& top, const ConfigReader& text) : top_(top), text_(text) {}

  ModelShape run() {
    check_architecture();
    read_trunk();
    read_attention();
    read_rope();
    read_delta_net();
    read_experts();
    read_ple();
    read_indexer();
    read_mtp();
    return shape_;
  }

 private:
  void check_architecture() {
    const std::string type = required_string(top_, "model_type");
    if (!names::model_type(type)) top_.wrong("model_type", names::kModelTypeRemedy);
    if (!names::model_type(text_.string("model_type").value_or(type))) {
      text_.wrong("model_type", names::kModelTypeRemedy);
    }
    const json::Value* list = top_.find("architectures");
    if (list == nullptr) top_.missing("architectures");
    if (list->type != json::Type::kArray || list->items.empty() ||
        !names::architecture(list->items[0].string)) {
      top_.wrong("architectures", names::kArchitectureRemedy);
    }
    if (const auto quantization = top_.object("quantization_config")) {
      if (quantization->string("quant_method").value_or("exl3") != "exl3") {
        quantization->wrong("quant_method", "\"exl3\": quantise the model with exllamav3");
      }
    }
  }

  static std::string required_string(const ConfigReader& reader, std::string_view key) {
    const auto value = reader.string(key);
    if (!value) reader.missing(key);
    return *value;
  }

  void read_trunk() {
    shape_.hidden = tiled(text_, "hidden_size", kMaxInputs);
    shape_.layers = text_.dim("num_hidden_layers", 4096);
    shape_.vocab = text_.dim("vocab_size", 1 << 24);
    shape_.max_positions = text_.dim("max_position_embeddings", 1 << 24);
    const double eps = text_.number("rms_norm_eps").value_or(1e-6);
    if (!(eps >= 1e-30 && eps < 1)) text_.wrong("rms_norm_eps", "a number in 1e-30 to 1");
    shape_.eps = static_cast<float>(eps);
    if (text_.string("hidden_act").value_or("silu") != "silu") {
      text_.wrong("hidden_act", "\"silu\": the engine has no other activation");
    }
    const std::string untied = "the engine reads a head of its own (lm_head)";
    top_.only("tie_word_embeddings", false, untied);
    text_.only("tie_word_embeddings", false, untied);
    shape_.streams = text_.dim_or("hc_count", 4, 16);
    shape_.rank = text_.dim_or("hc_lowrank", 320, 1 << 16);
    read_layer_kinds();
  }

  void read_layer_kinds() {
    const auto layers = static_cast<std::size_t>(shape_.layers);
    const json::Value* types = text_.find("layer_types");
    if (types == nullptr) {
      const std::int64_t interval = text_.integer_or("full_attention_interval", 4, 1, 1 << 20);
      for (std::int64_t l = 0; l < shape_.layers; ++l) {
        const bool full = (l + 1) % interval == 0;
        shape_.layer_kinds.push_back(full ? LayerKind::kAttention : LayerKind::kDeltaNet);
      }
      return;
    }
    if (types->type != json::Type::kArray || types->items.size() != layers) {
      text_.wrong("layer_types",
                  "a list of num_hidden_layers = " + std::to_string(layers) + " strings");
    }
    for (std::size_t l = 0; l < layers; ++l) {
      const json::Value& type = types->items[l];
      if (type.string == "linear_attention") {
        shape_.layer_kinds.push_back(LayerKind::kDeltaNet);
      } else if (names::attention(type.string)) {
        shape_.layer_kinds.push_back(LayerKind::kAttention);
      } else {
        text_.wrong("layer_types", std::string(names::kLayerTypesRemedy) + "; entry " +
                                       std::to_string(l) + " is " + json::to_text(type));
      }
    }
  }

  void read_attention() {
    shape_.heads = text_.dim("num_attention_heads", 1024);
    shape_.kv_heads = text_.dim("num_key_value_heads", 1024);
    shape_.head_dim = text_.dim("head_dim", 1024);
    if (shape_.heads % shape_.kv_heads != 0) {
      text_.wrong("num_attention_heads",
                  "a multiple of num_key_value_heads = " + std::to_string(shape_.kv_heads));
    }
    if (shape_.q_dim() % kTile != 0 || shape_.q_dim() > kMaxInputs) {
      text_.wrong("head_dim", "such that heads * head_dim is a multiple of 128 up to " +
                                  std::to_string(kMaxInputs) + "; it is " +
                                  std::to_string(shape_.q_dim()));
    }
    if (shape_.kv_dim() % kTile != 0) {
      text_.wrong("num_key_value_heads",
                  "such that key heads * head_dim is a multiple of 128; it is " +
                      std::to_string(shape_.kv_dim()));
    }
    text_.only("attention_bias", false, "the engine's projections have no bias");
    text_.only("attn_output_gate", true, "the engine's attention is gated");
  }

  // A key of rope_parameters, which may also stand beside it.
  double rope_number(const std::optional<ConfigReader>& rope, const char* key) {
    const auto inner = rope ? rope->number(key) : std::nullopt;
    const auto outer = text_.number(key);
    if (!inner && !outer) (rope ? *rope : text_).missing(key);
    if (inner && outer && *inner != *outer) {
      text_.wrong(key, "equal to rope_parameters." + std::string(key) + " = " +
                           json::to_text(*rope->find(key)));
    }
    return inner ? *inner : *outer;
  }

  void read_rope() {
    const auto rope = text_.object("rope_parameters");
    if (rope) {
      for (const char* key : {"rope_type", "type"}) {
        if (rope->string(key).value_or("default") != "default") {
          rope->wrong(key, "\"default\": the engine has no scaled rotary positions");
        }
      }
    }
    if (text_.find("rope_scaling") != nullptr) {
      text_.wrong("rope_scaling", "null: the engine has no scaled rotary positions");
    }
    shape_.rope_theta = rope_number(rope, "rope_theta");
    if (!(shape_.rope_theta > 1 && shape_.rope_theta < 1e15)) {
      const bool inside = rope && rope->find("rope_theta") != nullptr;
      (inside ? *rope : text_).wrong("rope_theta", "a number above 1");
    }
    const double factor = rope_number(rope, "partial_rotary_factor");
    const double dims = factor * shape_.head_dim;
    const double nearest = std::nearbyint(dims);
    if (!(factor > 0 && factor <= 1) || std::abs(dims - nearest) > 1e-6 || nearest < 2 ||
        std::fmod(nearest, 2) != 0) {
      const bool inside = rope && rope->find("partial_rotary_factor") != nullptr;
      (inside ? *rope : text_)
          .wrong("partial_rotary_factor",
                 "such that head_dim = " + std::to_string(shape_.head_dim) +
                     " times it is an even number of 2 to head_dim");
    }
    shape_.rotary = static_cast<std::int32_t>(nearest);
  }

  void read_delta_net() {
    shape_.gdn_k_heads = text_.dim("linear_num_key_heads", 256);
    shape_.gdn_v_heads = text_.dim("linear_num_value_heads", 256);
    if (shape_.gdn_v_heads % shape_.gdn_k_heads != 0) {
      text_.wrong("linear_num_value_heads",
                  "a multiple of linear_num_key_heads = " + std::to_string(shape_.gdn_k_heads));
    }
    for (const char* key : {"linear_key_head_dim", "linear_value_head_dim"}) {
      if (text_.integer_or(key, 128, 1, 4096) != 128) {
        text_.wrong(key, "128: the DeltaNet ops have no other head size");
      }
    }
    shape_.gdn_head_dim = 128;
    shape_.gdn_kernel =
        static_cast<std::int32_t>(text_.integer_or("linear_conv_kernel_dim", 4, 2, 16));
    const std::string gate = text_.string("output_gate_type").value_or("silu");
    if (gate != "silu" && gate != "sigmoid") {
      text_.wrong("output_gate_type", "\"sigmoid\" or \"silu\"");
    }
    shape_.gdn_silu_gate = gate == "silu";
  }

  void read_experts() {
    shape_.experts = text_.dim("num_experts", 1 << 16);
    shape_.top_k = text_.dim("num_experts_per_tok", 1 << 16);
    if (shape_.top_k > shape_.experts) {
      text_.wrong("num_experts_per_tok", "at most num_experts = " + std::to_string(shape_.experts));
    }
    if (static_cast<std::int64_t>(shape_.experts) * shape_.layers > kMaxExperts) {
      text_.wrong("num_experts",
                  "such that layers * experts is at most " + std::to_string(kMaxExperts));
    }
    shape_.expert_inner = tiled(text_, "moe_intermediate_size", kMaxInputs);
    shape_.shared_inner = tiled(text_, "shared_expert_intermediate_size", kMaxInputs);
    shape_.norm_topk = text_.boolean("norm_topk_prob").value_or(true);
  }

  void read_ple() {
    const json::Value* ids = text_.find("ple_layer_ids");
    if (ids != nullptr && ids->type != json::Type::kArray) {
      text_.wrong("ple_layer_ids", "a list of one-based layer numbers");
    }
    read_separator(ids != nullptr && !ids->items.empty());
    if (ids == nullptr || ids->items.empty()) return;
    if (ids->items.size() != 1) {
      text_.wrong("ple_layer_ids", "a list of at most one layer: the engine has one n-gram table");
    }
    const json::Value& id = ids->items[0];
    if (id.type != json::Type::kInt || id.integer < 1 || id.integer > shape_.layers ||
        shape_.layer_kinds[static_cast<std::size_t>(id.integer - 1)] != LayerKind::kDeltaNet) {
      text_.wrong("ple_layer_ids",
                  "the one-based number of a linear_attention layer, 1 to num_hidden_layers = " +
                      std::to_string(shape_.layers));
    }
    shape_.ple_layer = static_cast<std::int32_t>(id.integer - 1);
    shape_.ple_kernel =
        static_cast<std::int32_t>(text_.integer_or("ple_conv_kernel_size", 4, 2, 16));
    if (text_.integer_or("ngram_size", kNgramSize, 1, 1 << 20) != kNgramSize) {
      text_.wrong("ngram_size", "3: the engine hashes 2-grams and 3-grams");
    }
    shape_.ngram_size = kNgramSize;
    shape_.heads_per_ngram = text_.dim_or("heads_per_ngram", 8, kMaxNgramHeads / (kNgramSize - 1));
    shape_.ple_dim = text_.dim_or("ple_embed_dim", shape_.hidden, 1 << 20);
    if (shape_.ple_dim != shape_.ngram_heads() * shape_.ngram_width) {
      const std::string expected = std::to_string(shape_.ngram_heads()) + " heads * " +
                                   std::to_string(shape_.ngram_width) + " = " +
                                   std::to_string(shape_.ngram_heads() * shape_.ngram_width);
      if (text_.find("ple_embed_dim") == nullptr) {
        text_.fail("ple_embed_dim is absent and so equals hidden_size = " +
                   std::to_string(shape_.hidden) + ", but must be " + expected);
      }
      text_.wrong("ple_embed_dim", expected);
    }
    shape_.ngram_vocab_base =
        text_.integer_or("ngram_vocab_size_base", 20000000, 2, std::int64_t{1} << 40);
    shape_.ngram_divisor = text_.dim_or("make_ngram_vocab_size_divisible_by", 128, 1 << 20);
    shape_.ngram_seed = text_.integer_or("seed", 1234, INT64_MIN, INT64_MAX);
  }

  // eos_token_id: an id or a list of ids, of which the first counts.
  void read_separator(bool required) {
    const json::Value* eos = text_.find("eos_token_id");
    const ConfigReader* owner = &text_;
    if (eos == nullptr) {
      eos = top_.find("eos_token_id");
      owner = &top_;
    }
    if (eos == nullptr && !required) return;
    if (eos == nullptr) text_.missing("eos_token_id");
    const json::Value* first = eos;
    if (eos->type == json::Type::kArray && !eos->items.empty()) first = eos->items.data();
    if (first->type != json::Type::kInt || first->integer < 0 || first->integer >= shape_.vocab) {
      owner->wrong("eos_token_id", "a token id (or a list of them) below vocab_size = " +
                                       std::to_string(shape_.vocab));
    }
    shape_.separator = static_cast<std::int32_t>(first->integer);
  }

  void read_indexer() {
    shape_.index_heads = text_.dim("indexer_n_heads", 64);
    if (text_.dim("indexer_kv_heads", 64) != 1) {
      text_.wrong("indexer_kv_heads", "1: the engine keeps one index key a token");
    }
    shape_.index_dim = text_.dim("indexer_head_dim", 1024);
    if ((shape_.index_heads + 1) * shape_.index_dim % kTile != 0) {
      text_.wrong("indexer_head_dim",
                  "such that (indexer_n_heads + 1) * indexer_head_dim is a multiple of 128");
    }
    if (shape_.rotary > shape_.index_dim) {
      text_.wrong("indexer_head_dim",
                  "at least the rotated dims of a head, " + std::to_string(shape_.rotary));
    }
    shape_.index_block = text_.dim("indexer_compress_ratio", kPage);
    if (kPage % shape_.index_block != 0) {
      text_.wrong("indexer_compress_ratio", "a divisor of 64, the tokens of a page");
    }
    shape_.index_budget = text_.dim("indexer_budget", 1 << 24);
    if (shape_.index_budget % shape_.index_block != 0) {
      text_.wrong("indexer_budget",
                  "a multiple of indexer_compress_ratio = " + std::to_string(shape_.index_block));
    }
  }

  void read_mtp() {
    shape_.mtp_layers =
        static_cast<std::int32_t>(text_.integer_or("mtp_num_hidden_layers", 0, 0, 1 << 16));
    if (shape_.mtp_layers > 1) {
      text_.wrong("mtp_num_hidden_layers", "0 or 1: the engine drafts with one layer");
    }
    const std::string norm = text_.string("mtp_hidden_norm").value_or("stack");
    if (norm != "stack" && norm != "stream") {
      text_.wrong("mtp_hidden_norm", "\"stack\" (one norm over the streams) or \"stream\"");
    }
    shape_.mtp_per_stream = norm == "stream";
    if (shape_.mtp_layers == 0) return;
    text_.only("mtp_use_dedicated_embeddings", false,
               "the engine's draft head shares the token embedding");
    const auto mtp = text_.object("mtp");
    if (!mtp) return;
    if (mtp->integer_or("num_hidden_layers", 1, 0, 1 << 16) != shape_.mtp_layers) {
      mtp->wrong("num_hidden_layers",
                 "equal to mtp_num_hidden_layers = " + std::to_string(shape_.mtp_layers));
    }
    if (const json::Value* types = mtp->find("layer_types")) {
      const bool one = types->type == json::Type::kArray && types->items.size() == 1;
      if (!one || !names::attention(types->items[0].string)) {
        mtp->wrong("layer_types", "[\"full_attention\"]: the engine's draft layer is that");
      }
    }
    if (mtp->find("mtp_use_hidden_state_from_layer") != nullptr) {
      mtp->wrong("mtp_use_hidden_state_from_layer",
                 "null: the engine hands the last layer's streams to the draft head");
    }
    if (mtp->number("rope_theta").value_or(shape_.rope_theta) != shape_.rope_theta) {
      mtp->wrong("rope_theta", "equal to the trunk's: the engine keeps one rotary table");
    }
  }

  static std::int32_t tiled(const ConfigReader& reader, std::string_view key, std::int32_t high) {
    const std::int32_t value = reader.dim(key, high);
    if (value % kTile != 0) {
      reader.wrong(key, "a multiple of 128: the engine's EXL3 products have no other sizes");
    }
    return value;
  }

  const ConfigReader& top_;
  const ConfigReader& text_;
  ModelShape shape_;
};

}  // namespace

ModelShape parse_config(std::string_view json, const std::string& source) {
  json::Value root;
  try {
    root = json::parse(json);
  } catch (const json::JsonError& error) {
    throw CheckpointError(source + ": is not valid JSON: " + error.what() + ". Download it again");
  }
  if (root.type != json::Type::kObject) {
    throw CheckpointError(source + ": must hold an object, not " + json::describe(root.type));
  }
  const ConfigReader top(root, "", source);
  const auto text = top.object("text_config");
  return ConfigParser(top, text ? *text : top).run();
}

}  // namespace flashnext
