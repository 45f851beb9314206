#include "cpp/checkpoint/config_reader.h"

#include "cpp/base/errors.h"

#include <limits>

namespace flashnext {

std::string ConfigReader::full(std::string_view key) const {
  return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
}

void ConfigReader::fail(const std::string& message) const {
  throw CheckpointError(source_ + ": " + message);
}

void ConfigReader::missing(std::string_view key) const {
  fail("the key " + full(key) +
       " is missing, and no default would be right. Take config.json from the checkpoint's "
       "original repository");
}

void ConfigReader::wrong(std::string_view key, const std::string& expected) const {
  const json::Value* value = find(key);
  if (value == nullptr) missing(key);
  fail(full(key) + " = " + json::to_text(*value) + " must be " + expected);
}

const json::Value* ConfigReader::find(std::string_view key) const noexcept {
  const json::Value* value = object_->find(key);
  return value == nullptr || value->type == json::Type::kNull ? nullptr : value;
}

std::optional<ConfigReader> ConfigReader::object(std::string_view key) const {
  const json::Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != json::Type::kObject) {
    wrong(key, std::string("an object, not ") + json::describe(value->type));
  }
  return ConfigReader(*value, full(key), source_);
}

std::int64_t ConfigReader::integer(std::string_view key, std::int64_t low,
                                   std::int64_t high) const {
  const json::Value* value = find(key);
  if (value == nullptr) missing(key);
  const std::string range = std::to_string(low) + " to " + std::to_string(high);
  if (value->type != json::Type::kInt) {
    wrong(key, "an integer of " + range + ", not " + json::describe(value->type));
  }
  if (value->integer < low || value->integer > high) wrong(key, "an integer of " + range);
  return value->integer;
}

std::int64_t ConfigReader::integer_or(std::string_view key, std::int64_t fallback, std::int64_t low,
                                      std::int64_t high) const {
  return find(key) == nullptr ? fallback : integer(key, low, high);
}

std::int32_t ConfigReader::dim(std::string_view key, std::int32_t high) const {
  return static_cast<std::int32_t>(integer(key, 1, high));
}

std::int32_t ConfigReader::dim_or(std::string_view key, std::int32_t fallback,
                                  std::int32_t high) const {
  return static_cast<std::int32_t>(integer_or(key, fallback, 1, high));
}

std::optional<double> ConfigReader::number(std::string_view key) const {
  const json::Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != json::Type::kInt && value->type != json::Type::kDouble) {
    wrong(key, std::string("a number, not ") + json::describe(value->type));
  }
  return value->number;
}

std::optional<bool> ConfigReader::boolean(std::string_view key) const {
  const json::Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != json::Type::kBool) {
    wrong(key, std::string("true or false, not ") + json::describe(value->type));
  }
  return value->boolean;
}

std::optional<std::string> ConfigReader::string(std::string_view key) const {
  const json::Value* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->type != json::Type::kString) {
    wrong(key, std::string("a string, not ") + json::describe(value->type));
  }
  return value->string;
}

void ConfigReader::only(std::string_view key, bool value, const std::string& why) const {
  if (boolean(key).value_or(value) != value) {
    wrong(key, (value ? std::string("true: ") : std::string("false: ")) + why);
  }
}

}  // namespace flashnext
