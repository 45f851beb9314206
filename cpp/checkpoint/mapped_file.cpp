#include "cpp/checkpoint/lost_file.h"
#include "cpp/checkpoint/safetensors.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace flashnext {
namespace {

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Size of an open regular file.
std::uint64_t checked_size(const Descriptor& file, const std::string& name) {
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    throw CheckpointError(name + ": cannot be read (" + std::strerror(errno) +
                          "). Check the path and its permissions");
  }
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError(name + ": is no regular file. Remove it from the checkpoint folder");
  }
  return static_cast<std::uint64_t>(status.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::string& path, const std::string& name) : name_(name) {
  Descriptor file(path);
  bytes_ = checked_size(file, name);
  if (bytes_ == 0) return;  // an empty mapping does not exist; the header check refuses the file
  void* mapping = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapping == MAP_FAILED) {
    throw OutOfMemory("address space", bytes_,
                      name + ": cannot be mapped, " + std::to_string(bytes_) +
                          " bytes of address space (" + std::strerror(errno) +
                          "). Raise the limit (ulimit -v) or free memory");
  }
  data_ = static_cast<std::byte*>(mapping);
  range_ = remember_mapping(data_, bytes_, path);
  file_ = file.release();
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      range_(std::exchange(other.range_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedFile::~MappedFile() {
  forget_mapping(range_);
  if (data_ != nullptr) ::munmap(data_, bytes_);
  if (file_ >= 0) ::close(file_);
}

void advise(const std::byte* data, std::size_t bytes, Advice advice) noexcept {
  if (data == nullptr || bytes == 0) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  auto begin = reinterpret_cast<std::uintptr_t>(data);
  auto end = begin + bytes;
  // Random access is advised for pages that hold nothing else; soon, for every page touched.
  if (advice == Advice::kRandom) begin += page - 1;
  if (advice == Advice::kSoon) end += page - 1;
  begin -= begin % page;
  end -= end % page;
  if (begin >= end) return;
  // A hint: its failure changes nothing but speed.
  ::madvise(reinterpret_cast<void*>(begin), end - begin,
            advice == Advice::kRandom ? MADV_RANDOM : MADV_WILLNEED);
}

std::string read_text(const std::string& path, const std::string& name, std::uint64_t limit) {
  const Descriptor file(path);
  const std::uint64_t bytes = checked_size(file, name);
  if (bytes > limit) {
    throw CheckpointError(name + ": has " + std::to_string(bytes) + " bytes, more than the " +
                          std::to_string(limit) + " that such a file may have");
  }
  std::string text(bytes, '\0');
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n = ::read(file.get(), text.data() + done, bytes - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      throw CheckpointError(name + ": cannot be read (" + std::strerror(errno) + ")");
    }
    if (n == 0) break;
    done += static_cast<std::size_t>(n);
  }
  text.resize(done);
  return text;
}

bool exists(const std::string& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

}  // namespace flashnext
