// For tests: small valid checkpoints that can be spoilt one thing at a time.
#pragma once

#include "cpp/checkpoint/checkpoint.h"
#include "cpp/checkpoint/ngram_hash.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

namespace flashnext::testing_checkpoint {

inline std::string demo_model() {
  return std::string(FN_SOURCE_DIR) + "/python/flashnext/demo/tiny-3.05bpw-h5-ng5";
}
// The second small model; it exists beside the repository only.
inline std::string sidecar_model() {
  return std::string(FN_SOURCE_DIR) + "/../shared/models/tiny-2.05bpw-h4-ng4";
}

// A folder that is gone at the end of the test.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> count{0};
    path_ = std::filesystem::temp_directory_path() /
            ("flashnext_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string path() const { return path_.string(); }
  void write(const std::string& name, std::string_view bytes) const {
    std::filesystem::remove(path_ / name);
    std::ofstream(path_ / name, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  }
  // Every file of another checkpoint as a symbolic link.
  void link_all(const std::string& folder) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::filesystem::create_symlink(std::filesystem::absolute(entry.path()),
                                      path_ / entry.path().filename());
    }
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// config.json as key -> JSON text, so that one key can be dropped or replaced.
struct Config {
  std::map<std::string, std::string> top = {
      {"architectures", R"(["Qwen4ExpForConditionalGeneration"])"},
      {"model_type", R"("qwen4_exp")"},
      {"tie_word_embeddings", "false"},
  };
  std::map<std::string, std::string> text;

  static std::string join(const std::map<std::string, std::string>& members) {
    std::string out;
    for (const auto& [key, value] : members) {
      out += (out.empty() ? "\"" : ",\n\"") + key + "\": " + value;
    }
    return out;
  }
  std::string nested() const {
    std::string out = "{";
    return out.append(join(top)).append(",\n\"text_config\": {").append(join(text)).append("}}");
  }
  std::string flat() const {
    std::string out = "{";
    return out.append(join(top)).append(",\n").append(join(text)).append("}");
  }

  // Two layers, every part of the architecture once, each dimension its own size where it may be.
  static Config tiny() {
    Config config;
    config.text = {
        {"vocab_size", "200"},
        {"hidden_size", "128"},
        {"num_hidden_layers", "2"},
        {"layer_types", R"(["linear_attention", "full_attention"])"},
        {"num_attention_heads", "2"},
        {"num_key_value_heads", "1"},
        {"head_dim", "128"},
        {"hidden_act", R"("silu")"},
        {"max_position_embeddings", "512"},
        {"rms_norm_eps", "1e-06"},
        {"linear_num_key_heads", "1"},
        {"linear_num_value_heads", "3"},
        {"output_gate_type", R"("sigmoid")"},
        {"num_experts", "3"},
        {"num_experts_per_tok", "2"},
        {"moe_intermediate_size", "256"},
        {"shared_expert_intermediate_size", "384"},
        {"hc_count", "2"},
        {"hc_lowrank", "8"},
        {"ple_layer_ids", "[1]"},
        {"ple_embed_dim", "320"},
        {"heads_per_ngram", "1"},
        {"ngram_vocab_size_base", "50"},
        {"make_ngram_vocab_size_divisible_by", "16"},
        {"indexer_n_heads", "1"},
        {"indexer_kv_heads", "1"},
        {"indexer_head_dim", "128"},
        {"indexer_budget", "32"},
        {"indexer_compress_ratio", "4"},
        {"rope_parameters",
         R"({"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25})"},
        {"eos_token_id", "[7, 9]"},
        {"mtp_num_hidden_layers", "1"},
        {"mtp_hidden_norm", R"("stream")"},
    };
    return config;
  }
};

struct StoredTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
  std::string file = "model.safetensors";
};

inline std::size_t width_of(const std::string& dtype) {
  return dtype == "I64" || dtype == "F64" ? 8 : dtype == "F32" || dtype == "I32" ? 4 : 2;
}

inline std::size_t bytes_of(const StoredTensor& tensor) {
  std::size_t n = width_of(tensor.dtype);
  for (const std::int64_t d : tensor.shape) n *= static_cast<std::size_t>(d);
  return n;
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// One safetensors file. `pad` bytes of spaces end the header, so that any alignment can be had.
inline std::string safetensors(const std::map<std::string, StoredTensor>& tensors,
                               const std::string& file, const std::string& metadata = "",
                               std::size_t pad = 0) {
  std::string header = "{" + metadata, data;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.file != file) continue;
    if (header.size() > 1) header += ",";
    header += "\"" + name + "\":{\"dtype\":\"" + tensor.dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      if (i > 0) header += ",";
      header += std::to_string(tensor.shape[i]);
    }
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
    data += tensor.bytes;
    header += std::to_string(data.size()) + "]}";
  }
  header += "}" + std::string(pad, ' ');
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// A checkpoint in memory: change `config`, `tensors` or `metadata`, then write() or bytes().
struct CheckpointWriter {
  Config config = Config::tiny();
  std::map<std::string, StoredTensor> tensors;
  std::map<std::string, std::string> metadata;  // by file: members that begin the header
  std::map<std::string, std::string> extra;     // other files of the folder

  static constexpr const char* kNgramFile = "ngram_embedding.safetensors";

  CheckpointWriter() { fill(3); }

  // Deterministic bytes that are finite as fp16, bf16 and fp32.
  static std::string noise(const std::string& name, std::size_t bytes) {
    std::string out(bytes, '\0');
    std::uint32_t state = 2166136261u;
    for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 16777619u;
    for (char& c : out) {
      state = state * 1664525u + 1013904223u;
      c = static_cast<char>(state >> 26);  // below 64: no exponent is full
    }
    return out;
  }
  void add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape) {
    StoredTensor tensor{dtype, std::move(shape), ""};
    tensor.bytes = noise(name, bytes_of(tensor));
    tensors[name] = std::move(tensor);
  }
  void add_linear(const std::string& prefix, std::int64_t out, std::int64_t in, int words) {
    out = (out + 127) / 128 * 128;
    in = (in + 127) / 128 * 128;
    add(prefix + ".trellis", "I16", {in / 16, out / 16, words});
    add(prefix + ".suh", "F16", {in});
    add(prefix + ".svh", "F16", {out});
    tensors[prefix + ".mul1"] = {"I32", {}, "\x2D\xD1\xDC\x83"};
  }
  void fill(int bits) {
    const ModelShape shape = parse_config(config.nested(), "config.json");
    for (const TensorRule& rule : tensor_table(shape)) {
      if (rule.role == Role::kExl3) {
        add_linear(rule.name, rule.shape[0], rule.shape[1], 16 * bits);
      } else if (rule.role == Role::kPlain) {
        const bool half = rule.name.find("norm") == std::string::npos;
        const bool embedding = rule.family == "embedding";
        add(rule.name, embedding || !half ? "BF16" : "F16", rule.shape);
      } else {
        fill_ngram(rule, shape);
      }
    }
  }
  void fill_ngram(const TensorRule& rule, const ModelShape& shape) {
    const NgramHash hash = derive_ngram_hash(shape);
    const std::int64_t half = (hash.rows + 1) / 2;
    add(rule.name + ".shard_0.trellis", "I16", {half, 51});
    add(rule.name + ".shard_1.trellis", "I16", {hash.rows - half, 51});
    add(rule.name + ".head_bias", "F16", {shape.ngram_heads(), 160});
    tensors[rule.name + ".head_offsets"] = {"I64", {shape.ngram_heads()}, raw(hash.offsets)};
    tensors[rule.name + ".head_vocab_sizes"] = {"I64", {shape.ngram_heads()}, raw(hash.sizes)};
    tensors[rule.name + ".layer_multipliers"] = {"I64", {3}, raw(hash.multipliers)};
    for (auto& [name, tensor] : tensors) {
      if (name.starts_with(rule.name)) tensor.file = kNgramFile;
    }
    metadata[kNgramFile] = ngram_metadata("5", "mul1", std::to_string(hash.rows));
  }
  static std::string ngram_metadata(const std::string& k, const std::string& codebook,
                                    const std::string& rows) {
    return R"("__metadata__":{"format":"exl3_ngram_trellis","version":"1","K":")" + k +
           R"(","codebook":")" + codebook + R"(","row_dim":"160","rows":")" + rows + R"("})";
  }

  std::map<std::string, std::string> files() const {
    std::map<std::string, std::string> out;
    for (const auto& [name, tensor] : tensors) out[tensor.file];
    for (auto& [file, bytes] : out) {
      const auto found = metadata.find(file);
      // An odd data section: unaligned data is legal.
      bytes = safetensors(tensors, file, found == metadata.end() ? "" : found->second, 1);
      if (bytes.size() % 2 == 0)
        bytes = safetensors(tensors, file, found == metadata.end() ? "" : found->second, 0);
    }
    return out;
  }
  void write(const TempFolder& folder) const {
    for (const auto& [file, bytes] : files()) folder.write(file, bytes);
    for (const auto& [file, bytes] : extra) folder.write(file, bytes);
    folder.write("config.json", config.nested());
  }
};

// What open() says about this checkpoint; "" when it opens.
inline std::string refusal(const std::string& folder) {
  try {
    Checkpoint::open(folder);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}
inline std::string refusal(const CheckpointWriter& writer) {
  const TempFolder folder;
  writer.write(folder);
  return refusal(folder.path());
}

// Asserts that every part stands in the message.
inline void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  EXPECT_FALSE(message.empty()) << "the checkpoint was not refused";
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no \"" << part << "\" in: " << message;
  }
}

}  // namespace flashnext::testing_checkpoint
