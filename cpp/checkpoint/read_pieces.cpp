// Reads of large ranges of a file, past the mapping: no page faults, and errors of the disk are
// exceptions instead of signals.
#include "cpp/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sys/uio.h>

namespace flashnext {
namespace {

constexpr std::size_t kSink = 4096;  // gaps up to this are read and dropped
constexpr std::size_t kVectors = 64;

// Pieces that one call reads: neighbours, and the gaps between them.
struct Run {
  std::array<iovec, kVectors> parts;
  std::size_t n = 0;
  std::uint64_t begin = 0, end = 0;  // in the file

  void add(void* to, std::size_t bytes) {
    parts[n++] = {to, bytes};
    end += bytes;
  }
};

// Reads all of `run`, which it uses up.
void read_run(int file, const std::string& name, Run& run) {
  iovec* part = run.parts.data();
  iovec* const last = part + run.n;
  std::uint64_t at = run.begin;
  while (true) {
    while (part != last && part->iov_len == 0) ++part;
    if (part == last) return;
    const ssize_t n = ::preadv(file, part, static_cast<int>(last - part), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      throw CheckpointError(name + ": reading at byte " + std::to_string(at) + " failed (" +
                            (n < 0 ? std::strerror(errno) : "the file has become shorter") +
                            "). Check the disk, or download the file again");
    }
    at += static_cast<std::uint64_t>(n);
    auto left = static_cast<std::size_t>(n);
    for (; part != last && left >= part->iov_len; ++part) left -= part->iov_len;
    if (part != last) {
      part->iov_base = static_cast<std::byte*>(part->iov_base) + left;
      part->iov_len -= left;
    }
  }
}

}  // namespace

void MappedFile::read(std::span<const ReadPiece> pieces) const {
  std::array<std::byte, kSink> sink;
  std::size_t i = 0;
  while (i < pieces.size()) {
    Run run;
    run.begin = run.end = static_cast<std::uint64_t>(pieces[i].from - data_);
    for (; i < pieces.size() && run.n + 2 <= kVectors; ++i) {
      const auto at = static_cast<std::uint64_t>(pieces[i].from - data_);
      check(at + pieces[i].bytes <= bytes_, "checkpoint: a piece beyond the end of its file");
      if (at < run.end || at - run.end > kSink) break;
      if (at > run.end) run.add(sink.data(), at - run.end);
      run.add(pieces[i].to, pieces[i].bytes);
    }
    // All of it is asked of the disk at once, whatever its read-ahead is set to.
    advise(data_ + run.begin, run.end - run.begin, Advice::kSoon);
    read_run(file_, name_, run);
  }
}

}  // namespace flashnext
