#include "cpp/cache/profile.h"

#include "cpp/base/errors.h"
#include "cpp/base/hash.h"
#include "cpp/cache/bytes.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sstream>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

namespace flashnext::cache {

namespace {

constexpr std::string_view kMagic = "FNPROFIL";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeadBytes = 8 + 4 * 4 + 8;
constexpr std::size_t kMaxBytes = std::size_t{1} << 30;

std::string system_error() { return std::strerror(errno); }

std::string shape_text(std::int32_t layers, std::int32_t experts) {
  return std::to_string(layers) + " layers of " + std::to_string(experts) + " experts";
}

// The file's bytes, or why not in `reason`. A file that is not there gives neither.
std::string read_file(const std::string& path, std::string& reason) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno != ENOENT) reason = system_error();
    return {};
  }
  if (!S_ISREG(info.st_mode)) reason = "it is not a file";
  if (static_cast<std::uint64_t>(info.st_size) > kMaxBytes) reason = "it is far too large";
  if (!reason.empty()) return {};
  std::ifstream in(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();
  if (!in) reason = info.st_size == 0 ? "it is empty" : system_error();
  return std::move(bytes).str();
}

// What is wrong with the file, in words; else fills `out`.
std::string parse(std::string_view bytes, std::uint64_t fingerprint, std::int32_t layers,
                  std::int32_t experts, Profile& out) {
  if (bytes.size() < kHeadBytes || !bytes.starts_with(kMagic)) return "it is not a profile";
  std::size_t at = kMagic.size();
  const auto version = take<std::uint32_t>(bytes, at);
  if (version != kVersion) {
    return "its version is " + std::to_string(version) + ", this program reads " +
           std::to_string(kVersion);
  }
  const auto file_layers = take<std::int32_t>(bytes, at);
  const auto file_experts = take<std::int32_t>(bytes, at);
  at += 4;
  const auto file_fingerprint = take<std::uint64_t>(bytes, at);
  if (file_layers < layers || file_experts != experts) {
    return "it is for " + shape_text(file_layers, file_experts) + ", and this model has " +
           shape_text(layers, experts);
  }
  const auto a_layer = static_cast<std::size_t>(experts);
  const std::size_t count = static_cast<std::size_t>(file_layers) * a_layer;
  if (bytes.size() != kHeadBytes + 8 * count + 8) {
    return "it has " + std::to_string(bytes.size()) + " bytes instead of " +
           std::to_string(kHeadBytes + 8 * count + 8);
  }
  std::size_t end = bytes.size() - 8;
  if (take<std::uint64_t>(bytes, end) != fnv64_text(bytes.substr(0, bytes.size() - 8))) {
    return "its checksum does not match";
  }
  if (file_fingerprint != fingerprint) return "it belongs to another checkpoint";
  out.uses.resize(static_cast<std::size_t>(layers) * a_layer);
  for (std::uint64_t& n : out.uses) n = take<std::uint64_t>(bytes, at);
  out.rest.resize(count - out.uses.size());
  for (std::uint64_t& n : out.rest) n = take<std::uint64_t>(bytes, at);
  return {};
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace

Profile load_profile(const std::string& path, std::uint64_t fingerprint, std::int32_t layers,
                     std::int32_t experts) {
  Profile out;
  std::string reason;
  const std::string bytes = read_file(path, reason);
  if (bytes.empty() && reason.empty()) {
    if (::access(path.c_str(), F_OK) != 0) return out;
    reason = "it is empty";
  }
  if (reason.empty()) reason = parse(bytes, fingerprint, layers, experts, out);
  if (!reason.empty()) {
    out.note =
        "profile " + path + " is not used: " + reason + "; delete the file or name another one";
  }
  return out;
}

std::string save_profile(const std::string& path, std::uint64_t fingerprint, std::int32_t layers,
                         std::int32_t experts, std::span<const std::uint64_t> uses) {
  check(uses.size() == static_cast<std::size_t>(layers) * static_cast<std::size_t>(experts),
        "profile: uses of another shape");
  std::string bytes(kMagic);
  put(bytes, kVersion);
  put(bytes, layers);
  put(bytes, experts);
  put(bytes, std::uint32_t{0});
  put(bytes, fingerprint);
  for (const std::uint64_t n : uses) put(bytes, n);
  put(bytes, fnv64_text(bytes));

  std::string temporary = path + ".XXXXXX";
  const int file = ::mkstemp(temporary.data());
  const auto failed = [&](const char* what) {
    return "profile " + path + " was not written: cannot " + what + ": " + system_error();
  };
  if (file < 0) return failed("create a file beside it");
  std::string problem;
  if (!write_all(file, bytes) || ::fsync(file) != 0) problem = failed("write");
  // mkstemp makes a file for this user alone; a profile is no secret.
  if (problem.empty() && ::fchmod(file, 0644) != 0) problem = failed("set its mode");
  if (::close(file) != 0 && problem.empty()) problem = failed("close");
  if (problem.empty() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    problem = failed("put it into place");
  }
  if (!problem.empty()) ::unlink(temporary.c_str());
  return problem;
}

}  // namespace flashnext::cache
