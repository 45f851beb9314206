// The container: headers, files of a folder, the index.
#include "cpp/checkpoint/safetensors.h"
#include "tests/cpp/checkpoint_writer.h"

#include <random>

namespace flashnext::testing_checkpoint {
namespace {

constexpr const char* kFile = "model.safetensors";

std::string file_with(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header +
         std::string(data_bytes, '\1');
}

TensorFiles view(const std::string& file) {
  return TensorFiles::view({{kFile, reinterpret_cast<const std::byte*>(file.data()), file.size()}});
}

std::string refusal_of_file(const std::string& file) {
  try {
    view(file);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

std::string refusal_of_header(const std::string& header, std::size_t data_bytes = 64) {
  return refusal_of_file(file_with(header, data_bytes));
}

TEST(TensorFiles, ReadsAHeader) {
  const std::string file = file_with(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F16","shape":[2,3],"data_offsets":[8,20]},)"
      R"("a":{"data_offsets":[0,8],"shape":[],"dtype":"I64"},)"
      R"("\u0065mpty":{"dtype":"F32","shape":[4,0],"data_offsets":[20,20]}}  )",
      20);
  const TensorFiles files = view(file);
  ASSERT_EQ(files.tensors().size(), 3u);
  EXPECT_EQ(files.tensors()[0].name, "a");
  EXPECT_EQ(files.tensors()[1].name, "b");
  EXPECT_EQ(files.files()[0].metadata.at("format"), "pt");
  const Tensor* b = files.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, Dtype::kF16);
  EXPECT_EQ(b->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(b->bytes, 12u);
  EXPECT_EQ(reinterpret_cast<const char*>(b->data), file.data() + file.size() - 12);
  EXPECT_EQ(files.find("empty")->bytes, 0u);
  EXPECT_EQ(files.find("c"), nullptr);
  const auto [first, last] = files.with_prefix("e");
  EXPECT_EQ(last - first, 1);
}

TEST(TensorFiles, RefusesWrongLengths) {
  expect_parts(refusal_of_file("1234567"), {kFile, "has 7 bytes", "truncated", "download"});
  expect_parts(refusal_of_file(std::string(8, '\0')), {"header has 0 bytes", "damaged"});
  expect_parts(refusal_of_file("version https://git-lfs.github.com/spec/v1\n"),
               {"the header has", "Git LFS"});
  std::string huge(16, '\0');
  huge[3] = 7;  // 117440512 bytes
  expect_parts(refusal_of_file(huge), {"117440512", "1 to 104857600"});
  std::string file = file_with("{}", 0);
  file[0] = 3;
  expect_parts(refusal_of_file(file), {"should have 3 bytes", "has only 2", "truncated"});
}

TEST(TensorFiles, RefusesLyingHeaders) {
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return refusal_of_header("{\"w\":{\"dtype\":" + dtype + ",\"shape\":" + shape +
                             ",\"data_offsets\":" + offsets + "}}");
  };
  EXPECT_EQ(entry("\"F16\"", "[4,8]", "[0,64]"), "");
  expect_parts(entry("\"F4\"", "[4,8]", "[0,64]"), {kFile, "w has the unknown dtype F4"});
  expect_parts(entry("3", "[4,8]", "[0,64]"), {"expected a string", "byte"});
  expect_parts(entry("\"F16\"", "[4,8]", "[0,66]"), {"spans 66 bytes", "F16 [4, 8] needs 64"});
  expect_parts(entry("\"F16\"", "[4,8]", "[0,62]"), {"spans 62 bytes", "needs 64"});
  expect_parts(entry("\"F16\"", "[4,8]", "[2,66]"),
               {"w ends at byte 66", "the file has 64", "truncated", "download"});
  expect_parts(entry("\"F16\"", "[4,8]", "[64,0]"), {"[64, 0]", "no byte range"});
  expect_parts(entry("\"F16\"", "[4,8]", "[-2,62]"), {"[-2, 62]", "no byte range"});
  expect_parts(entry("\"F16\"", "[4,8]", "[0]"), {"1 data_offsets instead of 2"});
  expect_parts(entry("\"F16\"", "[4,8]", "[0,64,64]"), {"3 data_offsets instead of 2"});
  expect_parts(entry("\"F16\"", "[-4,-8]", "[0,64]"), {"negative dimension -4"});
  expect_parts(entry("\"F16\"", "[4294967296,4294967296]", "[0,0]"), {"overflows"});
  expect_parts(entry("\"F16\"", "[9223372036854775807,4]", "[0,64]"), {"overflows"});
  expect_parts(entry("\"F16\"", "[9223372036854775808]", "[0,64]"), {"64-bit integer"});
  expect_parts(entry("\"F16\"", "[4.0,8]", "[0,64]"), {"64-bit integer"});
  expect_parts(entry("\"F16\"", "[1,1,1,1,1,1,1,1,32]", "[0,64]"), {"more than 8 dimensions"});
  EXPECT_EQ(entry("\"F16\"", "[0,9223372036854775807,4]", "[0,0]"), "");
}

TEST(TensorFiles, RefusesBrokenHeaders) {
  const std::string w = R"("w":{"dtype":"F16","shape":[4],"data_offsets":[0,8]})";
  EXPECT_EQ(refusal_of_header("{" + w + "}"), "");
  expect_parts(refusal_of_header("[" + w + "]"), {kFile, "expected an object"});
  expect_parts(refusal_of_header("{" + w + ","), {"the header is not valid", "ends"});
  expect_parts(
      refusal_of_header("{" + w + R"(,"w":{"dtype":"F16","shape":[4],"data_offsets":[8,16]}})"),
      {"w: stands twice", "both times in"});
  expect_parts(refusal_of_header("{" + w + "," + w + "}"), {"w stands twice in the header"});
  expect_parts(
      refusal_of_header("{" + w + R"(,"v":{"dtype":"F16","shape":[4],"data_offsets":[6,14]}})"),
      {"v begins at byte 6", "inside w", "ends at 8"});
  expect_parts(refusal_of_header(R"({"w":{"dtype":"F16","shape":[4]}})"),
               {"w has no header key data_offsets"});
  expect_parts(refusal_of_header(R"({"w":{"dtype":"F16","data_offsets":[0,8]}})"),
               {"w has no header key shape"});
  expect_parts(refusal_of_header(R"({"w":{"shape":[4],"data_offsets":[0,8]}})"),
               {"w has no header key dtype"});
  expect_parts(
      refusal_of_header(R"({"w":{"dtype":"F16","dtype":"F16","shape":[4],"data_offsets":[0,8]}})"),
      {"w has the header key dtype twice"});
  expect_parts(
      refusal_of_header(R"({"w":{"dtype":"F16","stride":[1],"shape":[4],"data_offsets":[0,8]}})"),
      {"w has the unknown header key stride"});
  expect_parts(refusal_of_header(R"({"":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}})"),
               {"empty name"});
  expect_parts(refusal_of_header(R"({"__metadata__":{"a":1}})"), {"expected a string"});
  expect_parts(refusal_of_header(R"({"__metadata__":{"a":"1","a":"1"}})"), {"a stands twice"});
  expect_parts(refusal_of_header(R"({"__metadata__":{},"__metadata__":{}})"), {"twice"});
  expect_parts(refusal_of_header("{\"\xFF\":{}}"), {"UTF-8"});
}

TEST(TensorFiles, FolderErrorsNameThePath) {
  const TempFolder folder;
  expect_parts(refusal(folder.path()), {folder.path(), "no *.safetensors", "EXL3"});
  expect_parts(refusal(folder.path() + "/nowhere"), {"/nowhere", "No such file"});
  folder.write("a.txt", "x");
  expect_parts(refusal(folder.path() + "/a.txt"), {"/a.txt", "is a file", "folder"});
  std::filesystem::create_directory(folder.path() + "/x.safetensors");
  expect_parts(refusal(folder.path()), {"x.safetensors", "no regular file"});
  std::filesystem::remove(folder.path() + "/x.safetensors");
  std::filesystem::create_symlink("gone", folder.path() + "/y.safetensors");
  expect_parts(refusal(folder.path()), {"y.safetensors", "cannot be read"});
}

TEST(TensorFiles, MissingConfigIsNamed) {
  const TempFolder folder;
  CheckpointWriter().write(folder);
  std::filesystem::remove(folder.path() + "/config.json");
  expect_parts(refusal(folder.path()), {"config.json", "cannot be read", "No such file"});
}

TEST(TensorFiles, SameTensorInTwoFiles) {
  const TempFolder folder;
  CheckpointWriter writer;
  writer.write(folder);
  const auto& lm_head = writer.tensors.at("lm_head.suh");
  folder.write("z.safetensors", safetensors({{"lm_head.suh", lm_head}}, lm_head.file, "", 0));
  expect_parts(refusal(folder.path()), {"lm_head.suh: stands twice",
                                        "in model.safetensors and in z.safetensors", "Remove"});
}

TEST(TensorFiles, IndexMustAgree) {
  const auto with_index = [](const std::string& map) {
    CheckpointWriter writer;
    writer.extra["model.safetensors.index.json"] = map;
    return refusal(writer);
  };
  EXPECT_EQ(with_index(R"({"metadata":{},"weight_map":{"lm_head.suh":"model.safetensors"}})"), "");
  expect_parts(with_index(R"({"weight_map":{"lm_head.suh":"model-00002.safetensors"}})"),
               {"lm_head.suh", "model-00002.safetensors", "not in the folder", "Download"});
  expect_parts(with_index(R"({"weight_map":{"lm_head.suu":"model.safetensors"}})"),
               {"lm_head.suu in model.safetensors", "no file has it"});
  expect_parts(with_index(R"({"weight_map":{"lm_head.suh":"ngram_embedding.safetensors"}})"),
               {"lm_head.suh in ngram_embedding.safetensors", "it is in model.safetensors"});
  expect_parts(with_index(R"({"weight_map":{"lm_head.suh":3}})"), {"index.json", "not valid"});
  expect_parts(with_index(R"({"metadata":{}})"), {"no weight_map"});
  expect_parts(with_index("{"), {"index.json", "not valid"});
}

// One bit of the header wrong, anywhere: refused as an input error, or harmless; never a crash.
TEST(TensorFiles, BitFlipsInTheHeader) {
  const CheckpointWriter writer;
  const ModelShape shape = parse_config(writer.config.nested(), "config.json");
  std::mt19937 random(3);
  int refused = 0, opened = 0;
  const std::map<std::string, std::string> intact = writer.files();
  for (const auto& [name, bytes] : intact) {
    std::uint64_t length;
    std::memcpy(&length, bytes.data(), 8);
    const std::size_t header_bits = 8 * (8 + length);
    for (int i = 0; i < 400; ++i) {
      std::map<std::string, std::string> files = intact;
      const std::size_t bit = i < 64 ? static_cast<std::size_t>(i) : random() % header_bits;
      files[name][bit / 8] = static_cast<char>(files[name][bit / 8] ^ (1 << (bit % 8)));
      std::vector<TensorFiles::Buffer> buffers;
      for (const auto& [n, b] : files) {
        buffers.push_back({n, reinterpret_cast<const std::byte*>(b.data()), b.size()});
      }
      try {
        Checkpoint::bind(shape, TensorFiles::view(buffers));
        ++opened;
      } catch (const CheckpointError& error) {
        EXPECT_NE(std::string(error.what()), "");
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 700);
  EXPECT_GT(opened, 0);  // e.g. in an informational string of the metadata, or spaces
}

}  // namespace
}  // namespace flashnext::testing_checkpoint
