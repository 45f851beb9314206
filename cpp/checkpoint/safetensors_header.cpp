#include "cpp/base/json.h"
#include "cpp/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace flashnext {
namespace {

constexpr std::size_t kMaxRank = 8;

struct DtypeName {
  std::string_view name;
  Dtype dtype;
};
constexpr DtypeName kDtypes[] = {
    {"F16", Dtype::kF16},    {"BF16", Dtype::kBF16},  {"F32", Dtype::kF32},
    {"F64", Dtype::kF64},    {"I8", Dtype::kI8},      {"U8", Dtype::kU8},
    {"I16", Dtype::kI16},    {"U16", Dtype::kU16},    {"I32", Dtype::kI32},
    {"U32", Dtype::kU32},    {"I64", Dtype::kI64},    {"BOOL", Dtype::kBool},
    {"F8_E4M3", Dtype::kF8}, {"F8_E5M2", Dtype::kF8}, {"F8_E8M0", Dtype::kF8},
};

class HeaderParser {
 public:
  HeaderParser(std::string_view text, std::uint64_t data_bytes, const std::string& file)
      : reader_(text), data_bytes_(data_bytes), file_(file) {}

  Header run() {
    std::string_view key;
    bool has_metadata = false;
    reader_.begin_object();
    while (reader_.next_key(key)) {
      if (key == "__metadata__") {
        if (has_metadata) fail("__metadata__", "stands twice in the header");
        has_metadata = true;
        read_metadata();
      } else {
        read_entry(key);
      }
    }
    reader_.finish();
    refuse_overlaps();
    return std::move(header_);
  }

 private:
  [[noreturn]] void fail(std::string_view tensor, const std::string& what) const {
    throw CheckpointError(file_ + ": " + std::string(tensor.substr(0, 200)) + " " + what +
                          ". The file is damaged or not safetensors: download it again");
  }

  void read_metadata() {
    std::string_view key;
    reader_.begin_object();
    while (reader_.next_key(key)) {
      std::string name(key);
      std::string value(reader_.string());
      if (!header_.metadata.emplace(name, std::move(value)).second) {
        fail("__metadata__ key " + name, "stands twice");
      }
    }
  }

  void read_entry(std::string_view name) {
    if (name.empty()) fail("a tensor", "has an empty name");
    HeaderEntry entry{std::string(name), Dtype::kU8, {}, 0, 0};
    bool has_dtype = false, has_shape = false, has_offsets = false;
    std::string_view key;
    reader_.begin_object();
    while (reader_.next_key(key)) {
      bool& seen = key == "dtype" ? has_dtype : key == "shape" ? has_shape : has_offsets;
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        fail(name, "has the unknown header key " + std::string(key.substr(0, 60)));
      }
      if (seen) fail(name, "has the header key " + std::string(key) + " twice");
      seen = true;
      if (key == "dtype") {
        entry.dtype = read_dtype(name);
      } else if (key == "shape") {
        read_shape(entry);
      } else {
        read_offsets(entry);
      }
    }
    const char* missing = !has_dtype     ? "dtype"
                          : !has_shape   ? "shape"
                          : !has_offsets ? "data_offsets"
                                         : nullptr;
    if (missing != nullptr) fail(name, std::string("has no header key ") + missing);
    check_size(entry);
    header_.entries.push_back(std::move(entry));
  }

  Dtype read_dtype(std::string_view name) {
    const std::string_view text = reader_.string();
    for (const DtypeName& known : kDtypes) {
      if (known.name == text) return known.dtype;
    }
    fail(name, "has the unknown dtype " + std::string(text.substr(0, 60)));
  }

  void read_shape(HeaderEntry& entry) {
    reader_.begin_array();
    while (reader_.next_item()) {
      const std::int64_t size = reader_.integer();
      if (size < 0) fail(entry.name, "has the negative dimension " + std::to_string(size));
      if (entry.shape.size() == kMaxRank) {
        fail(entry.name, "has more than " + std::to_string(kMaxRank) + " dimensions");
      }
      entry.shape.push_back(size);
    }
  }

  void read_offsets(HeaderEntry& entry) {
    std::int64_t offsets[2] = {0, 0};
    std::size_t n = 0;
    reader_.begin_array();
    while (reader_.next_item()) {
      const std::int64_t offset = reader_.integer();
      if (n < 2) offsets[n] = offset;
      ++n;
    }
    if (n != 2) fail(entry.name, "has " + std::to_string(n) + " data_offsets instead of 2");
    if (offsets[0] < 0 || offsets[0] > offsets[1]) {
      fail(entry.name, "has data_offsets [" + std::to_string(offsets[0]) + ", " +
                           std::to_string(offsets[1]) + "], which are no byte range");
    }
    entry.begin = static_cast<std::uint64_t>(offsets[0]);
    entry.end = static_cast<std::uint64_t>(offsets[1]);
  }

  void check_size(const HeaderEntry& entry) const {
    std::uint64_t bytes = item_bytes(entry.dtype);
    const bool empty = std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end();
    for (const std::int64_t size : entry.shape) {
      if (empty) break;
      if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) {
        fail(entry.name, "has the shape " + shape_text(entry.shape) + ", whose size overflows");
      }
    }
    if (empty) bytes = 0;
    if (entry.end - entry.begin != bytes) {
      fail(entry.name, "spans " + std::to_string(entry.end - entry.begin) + " bytes, but " +
                           std::string(to_string(entry.dtype)) + " " + shape_text(entry.shape) +
                           " needs " + std::to_string(bytes));
    }
    if (entry.end > data_bytes_) {
      throw CheckpointError(file_ + ": " + entry.name + " ends at byte " +
                            std::to_string(entry.end) + " of the data, of which the file has " +
                            std::to_string(data_bytes_) +
                            ". The file is truncated: download it again");
    }
  }

  void refuse_overlaps() {
    auto& entries = header_.entries;
    std::stable_sort(entries.begin(), entries.end(),
                     [](const HeaderEntry& a, const HeaderEntry& b) { return a.begin < b.begin; });
    const HeaderEntry* last = nullptr;  // of those before, the one that reaches farthest
    for (const HeaderEntry& entry : entries) {
      if (entry.begin == entry.end) continue;
      if (last != nullptr && entry.begin < last->end) {
        if (entry.name == last->name) fail(entry.name, "stands twice in the header");
        fail(entry.name, "begins at byte " + std::to_string(entry.begin) + " of the data, inside " +
                             last->name + ", which ends at " + std::to_string(last->end));
      }
      last = &entry;
    }
  }

  json::Reader reader_;
  std::uint64_t data_bytes_;
  const std::string& file_;
  Header header_;
};

}  // namespace

std::size_t item_bytes(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kF64:
    case Dtype::kI64:
      return 8;
    case Dtype::kF32:
    case Dtype::kI32:
    case Dtype::kU32:
      return 4;
    case Dtype::kF16:
    case Dtype::kBF16:
    case Dtype::kI16:
    case Dtype::kU16:
      return 2;
    case Dtype::kI8:
    case Dtype::kU8:
    case Dtype::kBool:
    case Dtype::kF8:
      return 1;
  }
  return 1;
}

std::string_view to_string(Dtype dtype) noexcept {
  if (dtype == Dtype::kF8) return "F8";
  for (const DtypeName& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  return "?";
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::uint64_t header_length(const std::byte* first8, std::uint64_t file_bytes,
                            const std::string& file) {
  if (file_bytes < 8) {
    throw CheckpointError(file + ": has " + std::to_string(file_bytes) +
                          " bytes, fewer than the 8 of a safetensors header length. The file is "
                          "truncated: download it again");
  }
  std::uint64_t length;
  std::memcpy(&length, first8, sizeof length);
  if (length < 1 || length > kMaxHeaderBytes) {
    throw CheckpointError(file + ": its first 8 bytes say that the header has " +
                          std::to_string(length) + " bytes; 1 to " +
                          std::to_string(kMaxHeaderBytes) +
                          " are possible. The file is damaged or not safetensors (a Git LFS "
                          "pointer, a web page?): download it again");
  }
  if (length > file_bytes - 8) {
    throw CheckpointError(file + ": its header should have " + std::to_string(length) +
                          " bytes, but the file has only " + std::to_string(file_bytes - 8) +
                          " behind the length. The file is truncated: download it again");
  }
  return length;
}

Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& file) {
  try {
    return HeaderParser(json, data_bytes, file).run();
  } catch (const json::JsonError& error) {
    throw CheckpointError(file + ": the header is not valid: " + error.what() +
                          " of the header. The file is damaged or not safetensors: download it "
                          "again");
  }
}

}  // namespace flashnext
