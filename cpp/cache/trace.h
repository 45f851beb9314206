// Routing traces: which experts the rows of every step chose, in a file, so that policies can be
// compared on the host with what a run really asked for.
//
// All integers little-endian. Head: "FNROUTES", u32 version, i32 layers, i32 experts, i32 top_k,
// i64 bytes of a line, u64 fingerprint of the checkpoint, u64 FNV-1a of all before. Then records:
// i32 sequence, i32 rows, i32 first layer, i32 layers, u32 kind, u32 0, u16 ids (layers, rows,
// top_k), u64 FNV-1a of the record so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace flashnext::cache {

struct TraceHead {
  std::int32_t layers = 0, experts = 0, top_k = 0;
  std::int64_t line_bytes = 0;
  std::uint64_t fingerprint = 0;
  bool operator==(const TraceHead&) const = default;
};

enum class TraceKind : std::uint32_t {
  kStep,    // of a decode step: its misses were resolved, `sequence` is its number (1, 2, ..)
  kPrompt,  // of a prompt: counted, but the lines stay; `sequence` steps had run before it
};

struct TraceRecord {
  TraceKind kind;
  std::int32_t sequence;
  std::int32_t rows;
  std::int32_t first, layers;  // of the model: a step of the MTP head has its layer alone
  std::size_t at;              // of its ids in Trace::ids
};

struct Trace {
  TraceHead head;
  std::vector<TraceRecord> records;
  std::vector<std::uint16_t> ids;
  // (rows, top_k) of layer first + i of a record.
  std::span<const std::uint16_t> choices(const TraceRecord& record, std::int32_t i) const;
  void add(TraceKind kind, std::int32_t sequence, std::int32_t rows, std::int32_t first,
           std::int32_t layer_count, std::span<const std::uint16_t> ids);
};

// Writes whole records only, so that a run that ends early, by Ctrl-C too, leaves a sound file. A
// failure to write ends the recording, not the run: error() tells. Threads: one at a time.
class TraceWriter {
 public:
  // Replaces the file. Throws InputError when it cannot be written.
  TraceWriter(std::string path, const TraceHead& head);
  ~TraceWriter();
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // ids (layers, rows, top_k) of layers [first, first + layers).
  void append(TraceKind kind, std::int32_t sequence, std::int32_t rows, std::int32_t first,
              std::int32_t layers, std::span<const std::int32_t> ids);
  void append(TraceKind kind, std::int32_t sequence, std::int32_t rows, std::int32_t first,
              std::int32_t layers, std::span<const std::uint16_t> ids);
  // Writes what is buffered.
  void flush() noexcept;
  std::uint64_t records() const noexcept { return records_; }
  const std::string& error() const noexcept { return error_; }  // empty: none

 private:
  template <class T>
  void append_ids(TraceKind kind, std::int32_t sequence, std::int32_t rows, std::int32_t first,
                  std::int32_t layers, std::span<const T> ids);

  std::string path_;
  TraceHead head_;
  int file_ = -1;
  std::string buffer_;
  std::uint64_t records_ = 0;
  std::string error_;
};

// Throws InputError naming the file, the record, the byte and what to do.
Trace read_trace(const std::string& path);
void write_trace(const std::string& path, const Trace& trace);

}  // namespace flashnext::cache
