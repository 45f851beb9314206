#include "cpp/bank/host_ram.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string>

namespace flashnext {
namespace {

std::string read_all(const std::string& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

// The number at the head of `text`, after blanks.
std::optional<std::uint64_t> number(std::string_view text) {
  const std::size_t at = text.find_first_not_of(" \t");
  if (at == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  return value;
}

// What a control group (v2) leaves: its limit less what it holds, where pages of files that may go
// count as free. Nothing without a limit.
std::optional<std::uint64_t> group_room(const std::string& folder) {
  const auto limit = number(read_all(folder + "/memory.max"));  // "max" is none
  const auto held = number(read_all(folder + "/memory.current"));
  if (!limit || !held) return std::nullopt;
  std::uint64_t pages = 0;
  const std::string stat = read_all(folder + "/memory.stat");
  for (const char* key : {"\nactive_file ", "\ninactive_file "}) {
    const std::size_t at = stat.find(key);
    if (at != std::string::npos) {
      pages += number(std::string_view(stat).substr(stat.find(' ', at))).value_or(0);
    }
  }
  const std::uint64_t kept = *held - std::min(pages, *held);
  return *limit - std::min(kept, *limit);
}

// Of this process's control group and of all above it.
std::uint64_t groups_room() {
  const std::string root = "/sys/fs/cgroup";
  std::uint64_t room = group_room(root).value_or(std::numeric_limits<std::uint64_t>::max());
  const std::string groups = read_all("/proc/self/cgroup");
  const std::size_t at = groups.find("0::/");
  if (at == std::string::npos) return room;
  std::string path = groups.substr(at + 3, groups.find('\n', at) - at - 3);
  while (path.size() > 1) {
    room = std::min(room, group_room(root + path).value_or(room));
    path.resize(path.rfind('/'));
  }
  return room;
}

}  // namespace

std::uint64_t meminfo_bytes(std::string_view text, std::string_view key) {
  for (std::size_t at = 0; (at = text.find(key, at)) != std::string_view::npos; at += key.size()) {
    const std::string_view rest = text.substr(at + key.size());
    if ((at == 0 || text[at - 1] == '\n') && rest.starts_with(":")) {
      return number(rest.substr(1)).value_or(0) * 1024;
    }
  }
  return 0;
}

std::uint64_t free_ram() {
  return std::min(meminfo_bytes(read_all("/proc/meminfo"), "MemAvailable"), groups_room());
}

std::uint64_t ram_reserve() {
  const std::uint64_t all = meminfo_bytes(read_all("/proc/meminfo"), "MemTotal");
  return std::max(std::uint64_t{2} << 30, all / 20);
}

}  // namespace flashnext
