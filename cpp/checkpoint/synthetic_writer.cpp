// Synthetic checkpoints on disk. Data goes from the repeating pool to the page cache in large
// gathered writes of several threads, since making pages is what takes the time; config.json comes
// last, so that a folder that was not finished does not open.
#include "cpp/base/thread_pool.h"
#include "cpp/checkpoint/synthetic.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace flashnext {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kShardBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kHoleBytes = std::uint64_t{64} << 20;  // n-gram tables above are holes
constexpr std::size_t kPieces = 512;                           // of one gathered write
constexpr std::size_t kWriteBytes = std::size_t{8} << 20;      // about as many as one write has
constexpr std::size_t kBatchBytes = std::size_t{256} << 20;    // that threads share
constexpr std::size_t kProgressBytes = std::size_t{32} << 20;
constexpr const char* kNgramFile = "ngram_embedding.safetensors";

[[noreturn]] void fail(const std::string& path, const char* what) {
  throw InputError(path + ": " + what + " failed (" + std::strerror(errno) +
                   "). Check the path, its permissions and the free space");
}

// A new file, written front to back.
class File {
 public:
  File(std::string path, ThreadPool& pool)
      : path_(std::move(path)),
        pool_(pool),
        fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {
    if (fd_ < 0) fail(path_, "creating it");
  }
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // `data` must stay until the next flush.
  void add(const std::byte* data, std::size_t bytes) {
    while (bytes > 0) {
      if (writes_.empty() || writes_.back().bytes >= kWriteBytes ||
          writes_.back().pieces.size() == kPieces) {
        writes_.push_back({size_, 0, {}});
      }
      Write& write = writes_.back();
      const std::size_t n = std::min(bytes, kWriteBytes);
      write.pieces.push_back({const_cast<std::byte*>(data), n});
      write.bytes += n;
      size_ += n;
      queued_ += n;
      data += n;
      bytes -= n;
    }
    if (queued_ >= kBatchBytes) flush();
  }
  // Leaves a hole of that size at the end.
  void hole(std::uint64_t bytes) {
    flush();
    size_ += bytes;
    if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0) fail(path_, "making room");
  }
  void close() {
    flush();
    if (::close(std::exchange(fd_, -1)) != 0) fail(path_, "closing it");
  }

 private:
  struct Write {
    std::uint64_t offset;
    std::size_t bytes;
    std::vector<iovec> pieces;
  };

  void flush() {
    std::atomic<int> error{0};
    pool_.parallel_for(static_cast<std::int64_t>(writes_.size()), 1,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t i = begin; i < end && error.load() == 0; ++i) {
                           const int code = write(writes_[static_cast<std::size_t>(i)]);
                           if (code != 0) error.store(code);
                         }
                       });
    writes_.clear();
    queued_ = 0;
    if (error.load() == 0) return;
    errno = error.load();
    fail(path_, "writing it");
  }

  // 0, or the error.
  int write(Write& w) const {
    iovec* at = w.pieces.data();
    std::size_t left = w.pieces.size();
    while (left > 0) {
      const ssize_t n = ::pwritev(fd_, at, static_cast<int>(left), static_cast<off_t>(w.offset));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 ? errno : ENOSPC;
      w.offset += static_cast<std::uint64_t>(n);
      for (auto done = static_cast<std::size_t>(n); done > 0;) {
        const std::size_t step = std::min(done, at->iov_len);
        at->iov_base = static_cast<std::byte*>(at->iov_base) + step;
        at->iov_len -= step;
        done -= step;
        if (at->iov_len > 0) continue;
        ++at;
        --left;
      }
    }
    return 0;
  }

  std::string path_;
  ThreadPool& pool_;
  int fd_;
  std::vector<Write> writes_;
  std::size_t queued_ = 0;
  std::uint64_t size_ = 0;  // with what is queued
};

std::string shape_json(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

using Tensors = std::vector<SyntheticTensor>;

// Length and JSON of a safetensors header, padded to 8 bytes.
std::string header_of(const SyntheticTensor* begin, const SyntheticTensor* end,
                      const std::string& metadata) {
  std::string json = "{\"__metadata__\":{" + metadata + "}";
  std::uint64_t at = 0;
  for (const SyntheticTensor* t = begin; t != end; ++t) {
    const std::uint64_t after = at + t->bytes();
    json += ",\"" + t->name + "\":{\"dtype\":\"" + std::string(to_string(t->dtype)) +
            "\",\"shape\":" + shape_json(t->shape) + ",\"data_offsets\":[" + std::to_string(at) +
            "," + std::to_string(after) + "]}";
    at = after;
  }
  json += "}";
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = json.size();
  std::string header(8, '\0');
  std::memcpy(header.data(), &length, sizeof length);
  return header + json;
}

bool is_table(const SyntheticTensor& t) { return t.fill.kind == Fill::Kind::kNgramRows; }

// The tensors of a checkpoint, file by file.
struct Plan {
  Tensors tensors;                                          // the n-gram table's at the end
  std::vector<std::pair<std::size_t, std::size_t>> shards;  // [begin, end) of `tensors`
  std::size_t table = 0;                                    // first tensor of the n-gram file
  std::uint64_t bytes = 0;                                  // that occupy disk
  bool table_is_hole = false;

  explicit Plan(const ModelShape& shape) {
    Tensors ngram;
    for (const TensorRule& rule : tensor_table(shape)) {
      for (SyntheticTensor& t : synthetic_tensors(shape, rule)) {
        (rule.role == Role::kNgramTable ? ngram : tensors).push_back(std::move(t));
      }
    }
    table = tensors.size();
    std::uint64_t held = 0, table_bytes = 0;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < table; ++i) {
      const std::uint64_t n = tensors[i].bytes();
      if (held > 0 && held + n > kShardBytes) {
        shards.emplace_back(begin, i);
        begin = i;
        held = 0;
      }
      held += n;
      bytes += n;
    }
    shards.emplace_back(begin, table);
    for (SyntheticTensor& t : ngram) {
      (is_table(t) ? table_bytes : bytes) += t.bytes();
      tensors.push_back(std::move(t));
    }
    table_is_hole = table_bytes > kHoleBytes;
    if (!table_is_hole) bytes += table_bytes;
  }
};

class Writer {
 public:
  Writer(fs::path folder, const ModelShape& shape, const SyntheticOptions& options,
         const Progress& progress)
      : folder_(std::move(folder)),
        shape_(shape),
        plan_(shape),
        memory_(plan_.tensors, options),
        progress_(progress) {}
  // What was not finished is removed.
  ~Writer() {
    std::error_code ignored;
    for (const fs::path& path : unfinished_) fs::remove(path, ignored);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void run() {
    std::string index =
        "{\"metadata\":{\"total_size\":" + std::to_string(plan_.bytes) + "},\"weight_map\":{";
    const std::size_t count = plan_.shards.size();
    for (std::size_t i = 0; i < count; ++i) {
      char name[64];
      std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, count);
      const auto [begin, end] = plan_.shards[i];
      write(name, begin, end, R"("format":"pt")");
      for (std::size_t t = begin; t < end; ++t) {
        if (t > 0) index += ",\n";
        index += "\"" + plan_.tensors[t].name + "\":\"" + name + "\"";
      }
    }
    if (plan_.table < plan_.tensors.size()) {
      write(kNgramFile, plan_.table, plan_.tensors.size(), ngram_metadata());
    }
    write_text("model.safetensors.index.json", index + "}}\n");
    write_text("config.json", synthetic_config(shape_));
    unfinished_.clear();
  }

 private:
  std::string ngram_metadata() const {
    std::int64_t rows = 0, shard_rows = 0, words = 0;
    for (std::size_t t = plan_.table; t < plan_.tensors.size(); ++t) {
      if (!is_table(plan_.tensors[t])) continue;
      rows += plan_.tensors[t].shape[0];
      shard_rows = std::max(shard_rows, plan_.tensors[t].shape[0]);
      words = plan_.tensors[t].shape[1];
    }
    const auto item = [](const char* key, const std::string& value) {
      return ",\"" + std::string(key) + "\":\"" + value + "\"";
    };
    return R"("format":"exl3_ngram_trellis","version":"1","codebook":"mul1")" +
           item("K", std::to_string(words * 16 / shape_.ngram_width)) +
           item("row_dim", std::to_string(shape_.ngram_width)) +
           item("rows", std::to_string(rows)) + item("shard_rows", std::to_string(shard_rows));
  }

  void write(const std::string& name, std::size_t begin, std::size_t end,
             const std::string& metadata) {
    unfinished_.push_back(folder_ / name);
    File file((folder_ / name).string(), pool_);
    const SyntheticTensor* all = plan_.tensors.data();
    const std::string header = header_of(all + begin, all + end, metadata);
    file.add(reinterpret_cast<const std::byte*>(header.data()), header.size());
    for (std::size_t t = begin; t < end; ++t) {
      const std::uint64_t bytes = all[t].bytes();
      if (plan_.table_is_hole && is_table(all[t])) {
        file.hole(bytes);
        continue;
      }
      memory_.pieces(all[t], [&](const std::byte* data, std::size_t n) { file.add(data, n); });
      done_ += bytes;
      if (progress_ && done_ - heard_ >= kProgressBytes) {
        progress_("write", done_, plan_.bytes);
        heard_ = done_;
      }
    }
    file.close();
    if (progress_) progress_("write", done_, plan_.bytes);
  }

  void write_text(const std::string& name, const std::string& text) {
    unfinished_.push_back(folder_ / name);
    File file((folder_ / name).string(), pool_);
    file.add(reinterpret_cast<const std::byte*>(text.data()), text.size());
    file.close();
  }

  fs::path folder_;
  const ModelShape& shape_;
  Plan plan_;
  SyntheticMemory memory_;
  ThreadPool pool_{0};
  const Progress& progress_;
  std::vector<fs::path> unfinished_;
  std::uint64_t done_ = 0, heard_ = 0;
};

}  // namespace

std::uint64_t synthetic_disk_bytes(const ModelShape& shape) { return Plan(shape).bytes; }

void write_synthetic(const std::string& folder, const ModelShape& shape,
                     const SyntheticOptions& options, const Progress& progress) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (!fs::is_directory(folder)) {
    throw InputError(folder + ": cannot be made a folder (" + error.message() +
                     "). Give a path whose parent can be written");
  }
  if (fs::directory_iterator(folder) != fs::directory_iterator()) {
    throw InputError(folder + ": is not empty. Give a new folder: nothing is overwritten");
  }
  const std::uint64_t needed = synthetic_disk_bytes(shape);
  const fs::space_info space = fs::space(folder, error);
  if (!error && space.available < needed) {
    throw OutOfMemory("disk", needed,
                      folder + ": the checkpoint needs " + std::to_string(needed) +
                          " bytes of disk, " + std::to_string(space.available) +
                          " are free. Take fewer layers, or another disk");
  }
  Writer(folder, shape, options, progress).run();
}

}  // namespace flashnext
