// Big checkpoints as sparse files: a 32 GB n-gram table costs neither time nor memory to open, and
// 300,000 tensors open in seconds.
#include "tests/cpp/checkpoint_writer.h"

#include <chrono>
#include <fcntl.h>
#include <sys/mman.h>

namespace flashnext::testing_checkpoint {
namespace {

struct SparseTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;  // empty: a hole, which reads as zeros
};

// A safetensors file whose tensors without bytes are holes at its end. False when the file system
// cannot hold it.
bool write_sparse(const std::string& path, std::vector<SparseTensor> tensors) {
  std::stable_partition(tensors.begin(), tensors.end(),
                        [](const SparseTensor& t) { return !t.bytes.empty(); });
  std::string header = "{", data;
  std::size_t end = 0;
  for (const SparseTensor& tensor : tensors) {
    header += (header.size() > 1 ? ",\"" : "\"") + tensor.name + "\":{\"dtype\":\"" + tensor.dtype +
              "\",\"shape\":[";
    for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
      if (i > 0) header += ",";
      header += std::to_string(tensor.shape[i]);
    }
    header += "],\"data_offsets\":[" + std::to_string(end) + ",";
    end += bytes_of({tensor.dtype, tensor.shape, ""});
    header += std::to_string(end) + "]}";
    data += tensor.bytes;
  }
  header += "}";
  const std::uint64_t length = header.size();
  std::ofstream out(path, std::ios::binary);
  out << std::string(reinterpret_cast<const char*>(&length), 8) << header << data;
  out.close();
  return ::truncate(path.c_str(), static_cast<off_t>(8 + length + end)) == 0;
}

std::vector<SparseTensor> sparse_linear(const std::string& prefix, std::int64_t out,
                                        std::int64_t in) {
  out = (out + 127) / 128 * 128;
  return {{prefix + ".trellis", "I16", {in / 16, out / 16, 16}, ""},
          {prefix + ".suh", "F16", {in}, ""},
          {prefix + ".svh", "F16", {out}, ""},
          {prefix + ".mul1", "I32", {}, "\x2D\xD1\xDC\x83"}};
}

std::vector<SparseTensor> sparse_checkpoint(const ModelShape& shape, std::int64_t shards) {
  std::vector<SparseTensor> tensors;
  for (const TensorRule& rule : tensor_table(shape)) {
    if (rule.role == Role::kExl3) {
      for (auto& member : sparse_linear(rule.name, rule.shape[0], rule.shape[1])) {
        tensors.push_back(std::move(member));
      }
    } else if (rule.role == Role::kPlain) {
      tensors.push_back({rule.name, "BF16", rule.shape, ""});
    } else {
      const NgramHash hash = derive_ngram_hash(shape);
      const std::int64_t heads = shape.ngram_heads();
      const std::string& p = rule.name;
      for (std::int64_t s = 0; s < shards; ++s) {
        tensors.push_back(
            {p + ".shard_" + std::to_string(s) + ".trellis", "I16", {hash.rows / shards, 51}, ""});
      }
      tensors.push_back({p + ".head_bias", "F16", {heads, 160}, ""});
      tensors.push_back({p + ".head_offsets", "I64", {heads}, raw(hash.offsets)});
      tensors.push_back({p + ".head_vocab_sizes", "I64", {heads}, raw(hash.sizes)});
      tensors.push_back({p + ".layer_multipliers", "I64", {3}, raw(hash.multipliers)});
    }
  }
  return tensors;
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// Pages of a range that the page cache holds.
std::size_t cached_pages(const std::byte* data, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::size_t pages = (bytes - page) / page;
  std::vector<unsigned char> in_core(pages);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), pages * page, in_core.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(in_core.begin(), in_core.end(), [](unsigned char c) { return (c & 1) != 0; }));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(Size, A32GigabyteTableIsNeverTouched) {
  Config config = Config::tiny();
  config.text["heads_per_ngram"] = "8";
  config.text["ple_embed_dim"] = "2560";
  config.text["ngram_vocab_size_base"] = "20000000";
  config.text["make_ngram_vocab_size_divisible_by"] = "128";
  const ModelShape shape = parse_config(config.nested(), "config.json");
  const TempFolder folder;
  folder.write("config.json", config.nested());
  if (!write_sparse(folder.path() + "/model.safetensors", sparse_checkpoint(shape, 128))) {
    GTEST_SKIP() << "no sparse file of 32 GB in " << folder.path();
  }
  const std::size_t before = resident_bytes();
  const auto begin = std::chrono::steady_clock::now();
  const Checkpoint c = Checkpoint::open(folder.path());
  const double seconds = seconds_since(begin);
  const std::size_t grown = resident_bytes() - std::min(before, resident_bytes());
  RecordProperty("seconds", std::to_string(seconds));
  RecordProperty("resident_bytes", std::to_string(grown));
  const NgramTable& table = c.ngram();
  EXPECT_EQ(table.rows, 320001536);
  ASSERT_EQ(table.shards.size(), 128u);
  EXPECT_EQ(c.bytes_by_family().at("ngram"),
            std::uint64_t{320001536} * 102 + 16 * (160 * 2 + 16) + 24);
  EXPECT_LT(seconds, 5);
  EXPECT_LT(grown, std::size_t{64} << 20);
  const std::size_t shard_bytes = static_cast<std::size_t>(table.shard_rows * table.row_bytes);
  for (const std::size_t s : {std::size_t{1}, std::size_t{64}, std::size_t{126}}) {
    EXPECT_EQ(cached_pages(table.shards[s], shard_bytes), 0u) << s;
  }
  // (The outer shards may share read-ahead with their neighbours in the file.)
  // A row is readable all the same, and brings no read-ahead with it.
  EXPECT_EQ(table.shards[64][shard_bytes / 2], std::byte{0});
  EXPECT_LE(cached_pages(table.shards[64], shard_bytes), 1u);
}

TEST(Size, ThreeHundredThousandTensorsOpenInSeconds) {
  Config config = Config::tiny();
  config.text["num_hidden_layers"] = "48";
  config.text.erase("layer_types");
  config.text["num_experts"] = "512";
  config.text["num_experts_per_tok"] = "10";
  config.text["moe_intermediate_size"] = "128";
  const ModelShape shape = parse_config(config.nested(), "config.json");
  std::vector<SparseTensor> tensors = sparse_checkpoint(shape, 1);
  EXPECT_GT(tensors.size(), 300000u);
  const TempFolder folder;
  folder.write("config.json", config.nested());
  std::string index;
  const std::size_t files = 6;
  for (std::size_t f = 0; f < files; ++f) {
    const std::string name = "model-" + std::to_string(f) + ".safetensors";
    std::vector<SparseTensor> part(
        tensors.begin() + static_cast<std::ptrdiff_t>(tensors.size() * f / files),
        tensors.begin() + static_cast<std::ptrdiff_t>(tensors.size() * (f + 1) / files));
    for (const SparseTensor& tensor : part) {
      index += (index.empty() ? "\"" : ",\n\"") + tensor.name + "\": \"" + name + "\"";
    }
    ASSERT_TRUE(write_sparse(folder.path() + "/" + name, std::move(part)));
  }
  folder.write("model.safetensors.index.json", "{\"weight_map\": {" + index + "}}");
  const auto begin = std::chrono::steady_clock::now();
  const Checkpoint c = Checkpoint::open(folder.path());
  const double seconds = seconds_since(begin);
  RecordProperty("seconds", std::to_string(seconds));
  EXPECT_EQ(c.files().tensors().size(), tensors.size());
  EXPECT_TRUE(c.notes().empty());
  EXPECT_LT(seconds, 15);  // about one; the rest is for sanitizers and busy machines
  EXPECT_EQ(c.linear("model.language_model.layers.47.mlp.experts.511.down_proj").words, 16);
}

}  // namespace
}  // namespace flashnext::testing_checkpoint
