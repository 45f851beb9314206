// Inside the room: typed, bounded access to the keys of a config.json. Every refusal names the
// file, the key, its value and what is expected.
#pragma once

#include "cpp/base/json.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace flashnext {

class ConfigReader {
 public:
  // `object` must outlive the reader; `path` is how messages name it ("" for the top level).
  ConfigReader(const json::Value& object, std::string path, std::string source)
      : object_(&object), path_(std::move(path)), source_(std::move(source)) {}

  // Null when absent or null.
  const json::Value* find(std::string_view key) const noexcept;
  // The member object `key`, or nothing when absent or null.
  std::optional<ConfigReader> object(std::string_view key) const;

  std::int64_t integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  std::int64_t integer_or(std::string_view key, std::int64_t fallback, std::int64_t low,
                          std::int64_t high) const;
  std::int32_t dim(std::string_view key, std::int32_t high) const;  // 1..high, required
  std::int32_t dim_or(std::string_view key, std::int32_t fallback, std::int32_t high) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> string(std::string_view key) const;
  // Absent or exactly this value, else refused.
  void only(std::string_view key, bool value, const std::string& why) const;

  [[noreturn]] void missing(std::string_view key) const;
  [[noreturn]] void wrong(std::string_view key, const std::string& expected) const;
  [[noreturn]] void fail(const std::string& message) const;

 private:
  std::string full(std::string_view key) const;

  const json::Value* object_;
  std::string path_;
  std::string source_;
};

}  // namespace flashnext
