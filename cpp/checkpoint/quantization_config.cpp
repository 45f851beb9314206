#include "cpp/base/json.h"
#include "cpp/checkpoint/bind.h"
#include "cpp/checkpoint/safetensors.h"

namespace flashnext {
namespace {

constexpr const char* kName = "quantization_config.json";
constexpr std::uint64_t kMaxBytes = 1u << 30;

struct Disagreements {
  std::uint64_t count = 0;
  std::string first;
};

// {"shape": [a, b, 16 K], ...} of one stored tensor.
void compare_tensor(json::Reader& reader, std::string_view name, const TensorFiles& files,
                    Disagreements& found) {
  const bool trellis = name.ends_with(".trellis");
  std::string_view key;
  reader.begin_object();
  while (reader.next_key(key)) {
    if (!trellis || key != "shape") {
      reader.skip();
      continue;
    }
    std::int64_t last = 0;
    reader.begin_array();
    while (reader.next_item()) last = reader.integer();
    const Tensor* tensor = files.find(name);
    if (tensor == nullptr || tensor->shape.empty() || tensor->shape.back() == last) continue;
    if (found.count++ == 0) {
      found.first = std::string(name) + " has " + std::to_string(tensor->shape.back()) +
                    " words a tile, not " + std::to_string(last);
    }
  }
}

void compare_module(json::Reader& reader, const TensorFiles& files, Disagreements& found) {
  std::string_view key, name;
  reader.begin_object();
  while (reader.next_key(key)) {
    if (key != "stored_tensors") {
      reader.skip();
      continue;
    }
    reader.begin_object();
    while (reader.next_key(name)) compare_tensor(reader, name, files, found);
  }
}

}  // namespace

void compare_quantization_config(const std::string& path, const TensorFiles& files,
                                 std::vector<std::string>& notes) {
  Disagreements found;
  try {
    const std::string text = read_text(path, kName, kMaxBytes);
    json::Reader reader(text);
    std::string_view key, module;
    reader.begin_object();
    while (reader.next_key(key)) {
      if (key != "tensor_storage") {
        reader.skip();
        continue;
      }
      reader.begin_object();
      while (reader.next_key(module)) compare_module(reader, files, found);
    }
    reader.finish();
  } catch (const InputError& error) {
    notes.push_back(std::string(kName) + ": is not usable and not used: " + error.what());
    return;
  }
  if (found.count == 0) return;
  notes.push_back(std::string(kName) + ": disagrees with the files on " +
                  std::to_string(found.count) + " tensors (" + found.first +
                  "); the files are right");
}

}  // namespace flashnext
