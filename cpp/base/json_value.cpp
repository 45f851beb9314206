// The tree of json.h, built with its reader.
#include "cpp/base/json.h"

#include <algorithm>
#include <cstdio>

namespace flashnext::json {
namespace {

constexpr std::size_t kLongestText = 60;

void refuse_duplicates(const std::vector<std::string>& names, std::size_t offset) {
  std::vector<std::string_view> keys(names.begin(), names.end());
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) {
    throw JsonError("key \"" + std::string(*twice) + "\" stands twice in the object that ends",
                    offset);
  }
}

Value read(Reader& reader) {
  Value value;
  value.type = reader.peek();
  switch (value.type) {
    case Type::kNull:
      reader.null();
      break;
    case Type::kBool:
      value.boolean = reader.boolean();
      break;
    case Type::kInt:
      value.integer = reader.integer();
      value.number = static_cast<double>(value.integer);
      break;
    case Type::kDouble:
      value.number = reader.number();
      break;
    case Type::kString:
      value.string = reader.string();
      break;
    case Type::kArray:
      reader.begin_array();
      while (reader.next_item()) value.items.push_back(read(reader));
      break;
    case Type::kObject: {
      std::string_view key;
      reader.begin_object();
      while (reader.next_key(key)) {
        value.keys.emplace_back(key);
        value.items.push_back(read(reader));
      }
      refuse_duplicates(value.keys, reader.offset());
      break;
    }
  }
  return value;
}

void append_text(const Value& value, std::string& out) {
  if (out.size() > kLongestText) return;
  switch (value.type) {
    case Type::kNull:
      out += "null";
      break;
    case Type::kBool:
      out += value.boolean ? "true" : "false";
      break;
    case Type::kInt:
      out += std::to_string(value.integer);
      break;
    case Type::kDouble: {
      char buffer[32];
      std::snprintf(buffer, sizeof buffer, "%.9g", value.number);
      out += buffer;
      break;
    }
    case Type::kString:
      out += '"' + value.string + '"';
      break;
    case Type::kArray: {
      out += '[';
      const char* comma = "";
      for (const Value& item : value.items) {
        out += comma;
        append_text(item, out);
        if (out.size() > kLongestText) return;
        comma = ", ";
      }
      out += ']';
      break;
    }
    case Type::kObject: {
      out += '{';
      const char* comma = "";
      for (std::size_t i = 0; i < value.keys.size(); ++i) {
        out += comma;
        out += '"' + value.keys[i] + "\": ";
        append_text(value.items[i], out);
        if (out.size() > kLongestText) return;
        comma = ", ";
      }
      out += '}';
      break;
    }
  }
}

}  // namespace

const Value* Value::find(std::string_view key) const noexcept {
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == key) return &items[i];
  }
  return nullptr;
}

Value parse(std::string_view text) {
  Reader reader(text);
  Value value = read(reader);
  reader.finish();
  return value;
}

std::string to_text(const Value& value) {
  std::string out;
  append_text(value, out);
  if (out.size() > kLongestText) {
    std::size_t cut = kLongestText;
    while (cut > 0 && (static_cast<unsigned char>(out[cut]) & 0xC0u) == 0x80u) --cut;
    out.resize(cut);
    out += "...";
  }
  return out;
}

}  // namespace flashnext::json
