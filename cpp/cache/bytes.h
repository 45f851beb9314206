// Little-endian integers in the room's files.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace flashnext::cache {

template <class T>
void put(std::string& out, T value) {
  static_assert(std::is_integral_v<T>);
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));  // flashnext runs on little-endian machines alone
  out.append(bytes, sizeof(T));
}

// The caller has checked that `at + sizeof(T)` bytes are there.
template <class T>
T take(std::string_view bytes, std::size_t& at) {
  static_assert(std::is_integral_v<T>);
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  at += sizeof(T);
  return value;
}

}  // namespace flashnext::cache
