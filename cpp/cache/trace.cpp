#include "cpp/cache/trace.h"

#include "cpp/base/errors.h"
#include "cpp/base/hash.h"
#include "cpp/cache/bytes.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace flashnext::cache {

namespace {

constexpr std::string_view kMagic = "FNROUTES";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeadBytes = 8 + 4 * 4 + 8 + 8 + 8;
constexpr std::size_t kRecordHead = 6 * 4;
constexpr std::size_t kBuffer = std::size_t{1} << 20;
constexpr std::int32_t kMaxExperts = 65536;
constexpr std::int32_t kMaxCount = 1 << 24;  // of layers, rows, slots: beyond is no trace of ours

std::size_t size(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

bool sound(const TraceHead& h) {
  return h.layers >= 1 && h.layers <= kMaxCount && h.experts >= 1 && h.experts <= kMaxExperts &&
         h.top_k >= 1 && h.top_k <= h.experts && h.line_bytes >= 0;
}

// A file, mapped for as long as this lives.
class Mapped {
 public:
  explicit Mapped(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    if (file < 0 || ::fstat(file, &info) != 0) {
      const std::string why = std::strerror(errno);
      if (file >= 0) ::close(file);
      throw InputError("trace " + path + ": " + why);
    }
    bytes_ = S_ISREG(info.st_mode) ? static_cast<std::size_t>(info.st_size) : 0;
    if (bytes_ > 0) data_ = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0);
    ::close(file);
    if (data_ == MAP_FAILED) throw InputError("trace " + path + ": " + std::strerror(errno));
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    if (bytes_ > 0) ::munmap(data_, bytes_);
  }
  std::string_view text() const noexcept { return {static_cast<const char*>(data_), bytes_}; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class TraceParser {
 public:
  TraceParser(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  Trace run() {
    read_head();
    while (at_ < text_.size()) read_record();
    return std::move(trace_);
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw InputError("trace " + path_ + ": " + problem);
  }

  // In a record.
  [[noreturn]] void bad(std::size_t begin, const std::string& problem) const {
    const std::size_t n = trace_.records.size();
    fail("record " + std::to_string(n) + " at byte " + std::to_string(begin) + " " + problem +
         "; " + std::to_string(n) + " whole records stand before it. Record the trace again");
  }

  void read_head() {
    if (!text_.starts_with(kMagic)) {
      fail("it is not a routing trace. `flashnext bench --trace FILE` records one");
    }
    if (text_.size() < kHeadBytes) fail("it ends within its head. Record the trace again");
    at_ = kMagic.size();
    const auto version = take<std::uint32_t>(text_, at_);
    if (version != kVersion) {
      fail("its version is " + std::to_string(version) + ", this program reads " +
           std::to_string(kVersion) + ". Record the trace again");
    }
    TraceHead& h = trace_.head;
    h.layers = take<std::int32_t>(text_, at_);
    h.experts = take<std::int32_t>(text_, at_);
    h.top_k = take<std::int32_t>(text_, at_);
    h.line_bytes = take<std::int64_t>(text_, at_);
    h.fingerprint = take<std::uint64_t>(text_, at_);
    const std::uint64_t sum = fnv64_text(text_.substr(0, at_));
    if (take<std::uint64_t>(text_, at_) != sum || !sound(h)) {
      fail("its head is damaged. Record the trace again");
    }
  }

  void read_record() {
    const TraceHead& h = trace_.head;
    const std::size_t begin = at_;
    const std::size_t left = text_.size() - begin;
    if (left < kRecordHead) bad(begin, "is cut off");
    TraceRecord r{};
    r.sequence = take<std::int32_t>(text_, at_);
    r.rows = take<std::int32_t>(text_, at_);
    r.first = take<std::int32_t>(text_, at_);
    r.layers = take<std::int32_t>(text_, at_);
    const auto kind = take<std::uint32_t>(text_, at_);
    const auto zero = take<std::uint32_t>(text_, at_);
    r.kind = static_cast<TraceKind>(kind);
    const std::int32_t least = r.kind == TraceKind::kStep ? 1 : 0;
    if (kind > 1 || zero != 0 || r.sequence < least || r.rows < 1 || r.rows > kMaxCount ||
        r.first < 0 || r.layers < 1 || r.layers > h.layers || r.first > h.layers - r.layers) {
      bad(begin, "is damaged");
    }
    const std::size_t count = size(r.layers) * size(r.rows) * size(h.top_k);
    if (left < kRecordHead + 2 * count + 8) bad(begin, "is cut off");
    const std::uint64_t sum = fnv64_text(text_.substr(begin, kRecordHead + 2 * count));
    r.at = trace_.ids.size();
    trace_.ids.resize(r.at + count);
    std::memcpy(trace_.ids.data() + r.at, text_.data() + at_, 2 * count);
    at_ += 2 * count;
    if (take<std::uint64_t>(text_, at_) != sum) bad(begin, "is damaged: its checksum is wrong");
    for (std::size_t i = r.at; i < trace_.ids.size(); ++i) {
      if (trace_.ids[i] >= h.experts) bad(begin, "names an expert that does not exist");
    }
    if (r.sequence < last_) bad(begin, "goes back in time");
    last_ = r.sequence;
    trace_.records.push_back(r);
  }

  const std::string& path_;
  std::string_view text_;
  std::size_t at_ = 0;
  std::int32_t last_ = 0;
  Trace trace_;
};

}  // namespace

std::span<const std::uint16_t> Trace::choices(const TraceRecord& record, std::int32_t i) const {
  const std::size_t width = size(record.rows) * size(head.top_k);
  return std::span(ids).subspan(record.at + size(i) * width, width);
}

void Trace::add(TraceKind kind, std::int32_t sequence, std::int32_t rows, std::int32_t first,
                std::int32_t layer_count, std::span<const std::uint16_t> chosen) {
  check(chosen.size() == size(layer_count) * size(rows) * size(head.top_k),
        "trace: ids of another shape");
  records.push_back({kind, sequence, rows, first, layer_count, ids.size()});
  ids.insert(ids.end(), chosen.begin(), chosen.end());
}

TraceWriter::TraceWriter(std::string path, const TraceHead& head)
    : path_(std::move(path)), head_(head) {
  if (!sound(head)) throw InputError("trace " + path_ + ": a model of this shape has no traces");
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) throw InputError("trace " + path_ + ": " + std::strerror(errno));
  buffer_ = kMagic;
  put(buffer_, kVersion);
  put(buffer_, head.layers);
  put(buffer_, head.experts);
  put(buffer_, head.top_k);
  put(buffer_, head.line_bytes);
  put(buffer_, head.fingerprint);
  put(buffer_, fnv64_text(buffer_));
  flush();
}

TraceWriter::~TraceWriter() {
  flush();
  ::close(file_);
}

void TraceWriter::flush() noexcept {
  std::string_view left = buffer_;
  while (!left.empty() && error_.empty()) {
    const ssize_t n = ::write(file_, left.data(), left.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      error_ = "trace " + path_ + ": writing stopped: " + std::strerror(errno);
      break;
    }
    left.remove_prefix(static_cast<std::size_t>(n));
  }
  buffer_.clear();
}

template <class T>
void TraceWriter::append_ids(TraceKind kind, std::int32_t sequence, std::int32_t rows,
                             std::int32_t first, std::int32_t layers, std::span<const T> ids) {
  check(rows >= 1 && layers >= 1 && first >= 0 && first + layers <= head_.layers &&
            ids.size() == size(layers) * size(rows) * size(head_.top_k),
        "trace: ids of another shape");
  if (!error_.empty()) return;
  const std::size_t begin = buffer_.size();
  put(buffer_, sequence);
  put(buffer_, rows);
  put(buffer_, first);
  put(buffer_, layers);
  put(buffer_, static_cast<std::uint32_t>(kind));
  put(buffer_, std::uint32_t{0});
  for (const T id : ids) put(buffer_, static_cast<std::uint16_t>(id));
  put(buffer_, fnv64_text(std::string_view(buffer_).substr(begin)));
  ++records_;
  if (buffer_.size() >= kBuffer) flush();
}

void TraceWriter::append(TraceKind kind, std::int32_t sequence, std::int32_t rows,
                         std::int32_t first, std::int32_t layers,
                         std::span<const std::int32_t> ids) {
  append_ids(kind, sequence, rows, first, layers, ids);
}

void TraceWriter::append(TraceKind kind, std::int32_t sequence, std::int32_t rows,
                         std::int32_t first, std::int32_t layers,
                         std::span<const std::uint16_t> ids) {
  append_ids(kind, sequence, rows, first, layers, ids);
}

Trace read_trace(const std::string& path) {
  const Mapped file(path);
  return TraceParser(path, file.text()).run();
}

void write_trace(const std::string& path, const Trace& trace) {
  TraceWriter writer(path, trace.head);
  for (const TraceRecord& r : trace.records) {
    const std::size_t count = size(r.layers) * size(r.rows) * size(trace.head.top_k);
    writer.append(r.kind, r.sequence, r.rows, r.first, r.layers,
                  std::span(trace.ids).subspan(r.at, count));
  }
  writer.flush();
  if (!writer.error().empty()) throw InputError(writer.error());
}

}  // namespace flashnext::cache
