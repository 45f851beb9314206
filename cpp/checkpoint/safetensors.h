// Inside the room: one safetensors header, and files mapped read-only.
#pragma once

#include "cpp/checkpoint/checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashnext {

struct MappedRange;

inline constexpr std::uint64_t kMaxHeaderBytes = 100u << 20;

struct HeaderEntry {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin;  // byte range inside the data section
  std::uint64_t end;
};

struct Header {
  std::vector<HeaderEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

// Length of the JSON header, from the first 8 bytes of a file of `file_bytes`. Throws
// CheckpointError when it cannot be.
std::uint64_t header_length(const std::byte* first8, std::uint64_t file_bytes,
                            const std::string& file);

// Every container check of spec/exl3.md 6 that one file allows. `data_bytes` = bytes behind the
// header.
Header parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& file);

// "[16, 96, 80]"
std::string shape_text(const std::vector<std::int64_t>& shape);

// A whole file mapped read-only, and open for reads past the mapping. Nothing is read ahead of its
// use.
class MappedFile {
 public:
  // Throws CheckpointError when it is no readable regular file; OutOfMemory when no address space
  // is left. `path` is opened, `name` is what messages say.
  MappedFile(const std::string& path, const std::string& name);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  MappedFile& operator=(MappedFile&&) = delete;

  const std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  bool holds(const std::byte* at) const noexcept { return at >= data_ && at < data_ + bytes_; }
  // Reads the pieces, which lie in this file in ascending order, each into its place. Throws
  // CheckpointError.
  void read(std::span<const ReadPiece> pieces) const;

 private:
  std::string name_;
  int file_ = -1;
  MappedRange* range_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Kernel hints for a range of a mapping; harmless on other memory. kRandom: no read-ahead. kSoon:
// begin to read now, without waiting.
enum class Advice : std::uint8_t { kRandom, kSoon };
void advise(const std::byte* data, std::size_t bytes, Advice advice) noexcept;

// A text file of at most `limit` bytes. Throws CheckpointError when unreadable or larger.
std::string read_text(const std::string& path, const std::string& name, std::uint64_t limit);
bool exists(const std::string& path) noexcept;

}  // namespace flashnext
