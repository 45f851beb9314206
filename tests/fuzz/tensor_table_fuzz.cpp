// The tensor table over a damaged checkpoint. The input is a list of edits of a valid one: rename,
// retype, reshape, drop or duplicate an entry, or overwrite bytes of header or data. What still
// opens must be safe to use in full.
#include "tests/fuzz/fuzz_checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace flashnext {
namespace {

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  std::uint32_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  std::uint32_t word() { return byte() | byte() << 8; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

using fuzzing::Entry;
using Entries = std::vector<Entry>;

constexpr const char* kDtypes[] = {"F16", "BF16", "F32", "I16", "I32", "I64", "U8", "F64"};
constexpr const char* kMembers[] = {".trellis",
                                    ".suh",
                                    ".svh",
                                    ".su",
                                    ".sv",
                                    ".mul1",
                                    ".mcg",
                                    ".bias",
                                    ".weight",
                                    ".signs",
                                    ".shard_2.trellis",
                                    ".shard_0.weight"};

std::size_t width_of(const std::string& dtype) {
  return dtype == "I64" || dtype == "F64"   ? 8
         : dtype == "F32" || dtype == "I32" ? 4
         : dtype == "U8"                    ? 1
                                            : 2;
}

// Bytes that fit dtype and shape again, so that the container holds and the table must judge.
void refit(Entry& entry) {
  std::size_t bytes = width_of(entry.dtype);
  for (const std::int64_t dim : entry.shape) bytes *= static_cast<std::size_t>(dim);
  entry.bytes.resize(bytes, '\x11');
}

void edit(Entries& entries, Input& input) {
  const std::uint32_t op = input.byte() % 6;
  const std::size_t at = input.word() % entries.size();
  Entry& entry = entries[at];
  switch (op) {
    case 0:
      if (entries.size() > 1) entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      entry.dtype = kDtypes[input.byte() % 8];
      refit(entry);
      break;
    case 2: {
      const std::uint32_t how = input.byte();
      if (how % 8 == 0 && entry.shape.size() < 4) entry.shape.push_back(1);
      if (how % 8 == 1 && !entry.shape.empty()) entry.shape.pop_back();
      if (how % 8 >= 2 && !entry.shape.empty()) {
        std::int64_t& dim = entry.shape[how / 8 % entry.shape.size()];
        dim = how % 8 == 2   ? 0
              : how % 8 == 3 ? dim + 1
              : how % 8 == 4 ? dim * 2 % 4096
              : how % 8 == 5 ? dim / 2
              : how % 8 == 6 ? input.byte()
                             : dim + 8;
      }
      refit(entry);
      break;
    }
    case 3:
    case 4: {
      Entry other = entry;
      const std::size_t dot = other.name.rfind('.');
      if (dot != std::string::npos) other.name.resize(dot);
      other.name += kMembers[input.byte() % 12];
      if (op == 3) {
        entry = other;
      } else {
        entries.push_back(other);
      }
      break;
    }
    default:
      if (entry.bytes.empty()) break;
      for (int i = 0; i < 2; ++i) {
        entry.bytes[input.word() % entry.bytes.size()] = static_cast<char>(input.byte());
      }
  }
}

std::string serialise(const Entries& entries) {
  std::string header = "{", data;
  for (const Entry& e : entries) {
    if (header.size() > 1) header += ",";
    header += "\"" + e.name + "\":{\"dtype\":\"" + e.dtype + "\",\"shape\":[";
    for (std::size_t i = 0; i < e.shape.size(); ++i) {
      if (i > 0) header += ",";
      header += std::to_string(e.shape[i]);
    }
    header += "],\"data_offsets\":[" + std::to_string(data.size()) + ",";
    data += e.bytes;
    header += std::to_string(data.size()) + "]}";
  }
  header += "}";
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + header + data;
}

// Reads what the engine would read.
unsigned touch(const Checkpoint& checkpoint) {
  unsigned sum = 0;
  const auto ends = [&](const std::byte* data, std::size_t bytes) {
    if (bytes > 0) sum += static_cast<unsigned>(data[0]) + static_cast<unsigned>(data[bytes - 1]);
  };
  for (const TensorRule& rule : checkpoint.table()) {
    if (rule.role == Role::kPlain) {
      sum += static_cast<unsigned>(checkpoint.values(rule.name).size());
      ends(checkpoint.plain(rule.name).data, checkpoint.plain(rule.name).bytes);
    } else if (rule.role == Role::kExl3) {
      const Exl3Weight& w = checkpoint.linear(rule.name);
      const auto in = static_cast<std::size_t>(w.in), out = static_cast<std::size_t>(w.out);
      ends(w.trellis, in * out / 256 * static_cast<std::size_t>(w.words) * 2);
      ends(w.suh, 2 * in);
      ends(w.svh, 2 * out);
      if (w.bias != nullptr) sum += w.bias[out - 1] > 0;
    } else {
      const NgramTable& t = checkpoint.ngram();
      for (std::size_t head = 0; head < t.sizes.size(); ++head) {
        const std::int64_t row = t.offsets[head] + t.sizes[head] - 1;
        ends(t.shards.at(static_cast<std::size_t>(row / t.shard_rows)) +
                 row % t.shard_rows * t.row_bytes,
             static_cast<std::size_t>(t.row_bytes));
      }
    }
  }
  return sum;
}

}  // namespace
}  // namespace flashnext

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashnext;
  static const ModelShape shape =
      parse_config(fuzzing::join(fuzzing::tiny_config()), "config.json");
  static const Entries intact = fuzzing::tiny_tensors(shape);
  Input input(data, size);
  Entries entries = intact;
  for (std::uint32_t edits = input.byte() % 4; edits > 0 && !input.empty(); --edits) {
    edit(entries, input);
  }
  std::string file = serialise(entries);
  std::uint64_t header;
  std::memcpy(&header, file.data(), 8);
  for (std::uint32_t edits = input.byte() % 4; edits > 0 && !input.empty(); --edits) {
    file[(input.word() + (input.byte() << 16)) % (8 + header)] = static_cast<char>(input.byte());
  }
  if (input.byte() % 8 == 7) file.resize(file.size() - input.word() % file.size());
  try {
    const Checkpoint checkpoint = Checkpoint::bind(
        shape, TensorFiles::view({{"a.safetensors", reinterpret_cast<const std::byte*>(file.data()),
                                   file.size()}}));
    volatile unsigned sink = touch(checkpoint);
    static_cast<void>(sink);
  } catch (const CheckpointError&) {
  }
  return 0;
}
