// Strict JSON (RFC 8259): a pull reader that copies nothing for the 100 MB headers of big
// checkpoints, and a small tree for configs. Any bytes are safe input: what is not JSON in valid
// UTF-8, or nests deeper than kMaxDepth, is a JsonError that carries the byte offset. Duplicate
// keys are refused by the tree; a caller of the reader sees every key and judges for itself.
#pragma once

#include "cpp/base/errors.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace flashnext::json {

inline constexpr int kMaxDepth = 64;

class JsonError : public InputError {
 public:
  JsonError(const std::string& message, std::size_t offset)
      : InputError(message + " at byte " + std::to_string(offset)), offset_(offset) {}
  std::size_t offset() const noexcept { return offset_; }

 private:
  std::size_t offset_;
};

enum class Type : std::uint8_t { kNull, kBool, kInt, kDouble, kString, kArray, kObject };
// With its article, for messages: "a string", "an object", ...
const char* describe(Type type) noexcept;

// Reads one value front to back. Each call consumes exactly what it names or throws JsonError.
//   reader.begin_object();
//   while (reader.next_key(key)) use(key, reader.string());
//   reader.finish();
// Views stay valid while both the text and the reader live.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Type of the value that comes next. Numbers without fraction and exponent are kInt.
  Type peek();
  void null();
  bool boolean();
  std::int64_t integer();  // JsonError when the number has a fraction or leaves int64
  double number();         // any number
  std::string_view string();
  void begin_object();
  // False, and the object is left, when no member remains. Otherwise its value comes next.
  bool next_key(std::string_view& key);
  void begin_array();
  bool next_item();
  // Checks the syntax of any value and drops it.
  void skip();
  // Only white space may remain.
  void finish();
  std::size_t offset() const noexcept { return at_; }

 private:
  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail_expected(const char* what) const;
  void skip_space() noexcept;
  void enter(char open, const char* what);
  bool next(char close);
  void literal(std::string_view word);
  std::string_view number_text(bool& is_int);
  std::string_view escaped_string(std::size_t begin);
  std::uint32_t hex4();
  void escape(std::string& out);

  std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool first_[kMaxDepth] = {};         // of each open container: no element has been read yet
  std::deque<std::string> unescaped_;  // strings that had escapes
};

// A value of a tree. Objects keep the order of the file: keys[i] names items[i].
struct Value {
  Type type = Type::kNull;
  bool boolean = false;
  std::int64_t integer = 0;  // kInt
  double number = 0;         // kInt and kDouble
  std::string string;
  std::vector<Value> items;       // kArray and kObject
  std::vector<std::string> keys;  // kObject

  // Member of an object; null when absent or when this is no object.
  const Value* find(std::string_view key) const noexcept;
};

Value parse(std::string_view text);

// The value as it would stand in a message, cut to a readable length.
std::string to_text(const Value& value);

}  // namespace flashnext::json
