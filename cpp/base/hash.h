// A 64-bit hash of bytes, for checksums of our own files and for telling things apart. Not for
// secrets. The value is part of file formats: it never changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace flashnext {

// FNV-1a of 64 bits; `h` continues an earlier hash.
inline constexpr std::uint64_t kFnv64Seed = 0xCBF29CE484222325u;
inline std::uint64_t fnv64(const void* data, std::size_t bytes,
                           std::uint64_t h = kFnv64Seed) noexcept {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001B3u;
  return h;
}
inline std::uint64_t fnv64_text(std::string_view text, std::uint64_t h = kFnv64Seed) noexcept {
  return fnv64(text.data(), text.size(), h);
}

}  // namespace flashnext
