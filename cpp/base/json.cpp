#include "cpp/base/json.h"

#include <charconv>
#include <cstring>
#include <system_error>

namespace flashnext::json {
namespace {

bool is_digit(char c) noexcept { return c >= '0' && c <= '9'; }

// Bytes of one well-formed UTF-8 sequence of two to four bytes at the front of s; 0 when it is not.
// Overlong forms, surrogates and values above U+10FFFF are not well-formed.
std::size_t utf8_sequence(std::string_view s) noexcept {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
  const auto continues = [&](std::size_t i) { return i < s.size() && (byte(i) & 0xC0u) == 0x80u; };
  const unsigned lead = byte(0);
  if (lead >= 0xC2 && lead <= 0xDF) return continues(1) ? 2 : 0;
  if (lead >= 0xE0 && lead <= 0xEF) {
    if (!continues(1) || !continues(2)) return 0;
    if (lead == 0xE0 && byte(1) < 0xA0) return 0;
    if (lead == 0xED && byte(1) > 0x9F) return 0;
    return 3;
  }
  if (lead >= 0xF0 && lead <= 0xF4) {
    if (!continues(1) || !continues(2) || !continues(3)) return 0;
    if (lead == 0xF0 && byte(1) < 0x90) return 0;
    if (lead == 0xF4 && byte(1) > 0x8F) return 0;
    return 4;
  }
  return 0;
}

void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | (code >> 6));
    put(0x80 | (code & 63));
  } else if (code < 0x10000) {
    put(0xE0 | (code >> 12));
    put(0x80 | ((code >> 6) & 63));
    put(0x80 | (code & 63));
  } else {
    put(0xF0 | (code >> 18));
    put(0x80 | ((code >> 12) & 63));
    put(0x80 | ((code >> 6) & 63));
    put(0x80 | (code & 63));
  }
}

// High bit set in some byte of w iff that byte ends a run of plain characters: quote, backslash,
// control or non-ASCII. May also flag a byte above such a one (borrows), never misses one.
std::uint64_t special_bytes(std::uint64_t w) noexcept {
  constexpr std::uint64_t ones = 0x0101010101010101u;
  constexpr std::uint64_t high = 0x8080808080808080u;
  const std::uint64_t quote = w ^ (ones * '"');
  const std::uint64_t backslash = w ^ (ones * '\\');
  return ((quote - ones) | (backslash - ones) | (w - ones * 0x20) | w) & high;
}

}  // namespace

const char* describe(Type type) noexcept {
  switch (type) {
    case Type::kNull:
      return "null";
    case Type::kBool:
      return "a boolean";
    case Type::kInt:
      return "an integer";
    case Type::kDouble:
      return "a number";
    case Type::kString:
      return "a string";
    case Type::kArray:
      return "a list";
    case Type::kObject:
      return "an object";
  }
  return "a value";
}

void Reader::fail(const std::string& what) const { throw JsonError(what, at_); }

void Reader::fail_expected(const char* what) const {
  if (at_ >= text_.size()) fail(std::string("the text ends where ") + what + " is expected");
  const auto c = static_cast<unsigned char>(text_[at_]);
  constexpr char digits[] = "0123456789abcdef";
  const std::string found = c > 0x20 && c < 0x7F
                                ? std::string("'") + static_cast<char>(c) + "'"
                                : std::string("byte 0x") + digits[c >> 4] + digits[c & 15];
  fail(std::string("expected ") + what + ", found " + found);
}

void Reader::skip_space() noexcept {
  while (at_ < text_.size() &&
         (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\r' || text_[at_] == '\t')) {
    ++at_;
  }
}

Type Reader::peek() {
  skip_space();
  if (at_ >= text_.size()) fail_expected("a value");
  const char c = text_[at_];
  if (c == '{') return Type::kObject;
  if (c == '[') return Type::kArray;
  if (c == '"') return Type::kString;
  if (c == 't' || c == 'f') return Type::kBool;
  if (c == 'n') return Type::kNull;
  if (c != '-' && !is_digit(c)) fail_expected("a value");
  const std::size_t begin = at_;
  bool is_int = false;
  number_text(is_int);
  at_ = begin;
  return is_int ? Type::kInt : Type::kDouble;
}

void Reader::literal(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) fail_expected("true, false or null");
  at_ += word.size();
}

void Reader::null() {
  skip_space();
  if (at_ >= text_.size() || text_[at_] != 'n') fail_expected("null");
  literal("null");
}

bool Reader::boolean() {
  skip_space();
  if (at_ < text_.size() && text_[at_] == 't') {
    literal("true");
    return true;
  }
  if (at_ >= text_.size() || text_[at_] != 'f') fail_expected("a boolean");
  literal("false");
  return false;
}

// One number; is_int: it has no fraction, no exponent, and fits int64.
std::string_view Reader::number_text(bool& is_int) {
  skip_space();
  const std::size_t begin = at_;
  const auto digit_here = [&] { return at_ < text_.size() && is_digit(text_[at_]); };
  if (at_ < text_.size() && text_[at_] == '-') ++at_;
  if (!digit_here()) fail_expected("a number");
  if (text_[at_] == '0') {
    ++at_;
    if (digit_here()) fail("a number may not begin with 0");
  }
  while (digit_here()) ++at_;
  is_int = true;
  if (at_ < text_.size() && text_[at_] == '.') {
    is_int = false;
    ++at_;
    if (!digit_here()) fail_expected("a digit");
    while (digit_here()) ++at_;
  }
  if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
    is_int = false;
    ++at_;
    if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    if (!digit_here()) fail_expected("a digit");
    while (digit_here()) ++at_;
  }
  const std::string_view digits = text_.substr(begin, at_ - begin);
  if (is_int && digits.size() > 18) {
    std::int64_t value = 0;
    is_int = std::from_chars(digits.data(), digits.data() + digits.size(), value).ec == std::errc();
  }
  return digits;
}

std::int64_t Reader::integer() {
  skip_space();
  const std::size_t begin = at_;
  bool is_int = false;
  const std::string_view digits = number_text(is_int);
  if (!is_int) {
    at_ = begin;
    fail("expected a 64-bit integer, found " + std::string(digits.substr(0, 40)));
  }
  std::int64_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return value;
}

double Reader::number() {
  skip_space();
  const std::size_t begin = at_;
  bool is_int = false;
  const std::string_view digits = number_text(is_int);
  double value = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc()) {
    at_ = begin;
    fail("the number " + std::string(digits.substr(0, 40)) + " does not fit a double");
  }
  return value;
}

std::string_view Reader::string() {
  skip_space();
  if (at_ >= text_.size() || text_[at_] != '"') fail_expected("a string");
  const std::size_t begin = ++at_;
  for (;;) {
    while (at_ + 8 <= text_.size()) {
      std::uint64_t w;
      std::memcpy(&w, text_.data() + at_, sizeof w);
      if (special_bytes(w) != 0) break;
      at_ += 8;
    }
    if (at_ >= text_.size()) fail("the text ends inside a string");
    const auto c = static_cast<unsigned char>(text_[at_]);
    if (c == '"') {
      const std::string_view found = text_.substr(begin, at_ - begin);
      ++at_;
      return found;
    }
    if (c == '\\') return escaped_string(begin);
    if (c < 0x20) fail("a string holds a raw control character");
    if (c < 0x80) {
      ++at_;
      continue;
    }
    const std::size_t length = utf8_sequence(text_.substr(at_));
    if (length == 0) fail("a string is not valid UTF-8");
    at_ += length;
  }
}

// The rest of a string from its first backslash on; text_[begin, at_) is plain and checked.
std::string_view Reader::escaped_string(std::size_t begin) {
  std::string out(text_.substr(begin, at_ - begin));
  for (;;) {
    if (at_ >= text_.size()) fail("the text ends inside a string");
    const auto c = static_cast<unsigned char>(text_[at_]);
    if (c == '"') break;
    if (c == '\\') {
      escape(out);
    } else if (c < 0x20) {
      fail("a string holds a raw control character");
    } else {
      const std::size_t length = c < 0x80 ? 1 : utf8_sequence(text_.substr(at_));
      if (length == 0) fail("a string is not valid UTF-8");
      out.append(text_.substr(at_, length));
      at_ += length;
    }
  }
  ++at_;
  unescaped_.push_back(std::move(out));
  return unescaped_.back();
}

std::uint32_t Reader::hex4() {
  std::uint32_t code = 0;
  for (int i = 0; i < 4; ++i, ++at_) {
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    std::uint32_t digit = 0;
    if (is_digit(c)) {
      digit = static_cast<std::uint32_t>(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      digit = static_cast<std::uint32_t>(c - 'a' + 10);
    } else if (c >= 'A' && c <= 'F') {
      digit = static_cast<std::uint32_t>(c - 'A' + 10);
    } else {
      fail_expected("a hexadecimal digit");
    }
    code = code * 16 + digit;
  }
  return code;
}

void Reader::escape(std::string& out) {
  ++at_;  // the backslash
  if (at_ >= text_.size()) fail("the text ends inside a string");
  const char c = text_[at_];
  constexpr std::string_view from = "\"\\/bfnrt";
  constexpr std::string_view to = "\"\\/\b\f\n\r\t";
  const std::size_t simple = from.find(c);
  if (simple != std::string_view::npos) {
    out.push_back(to[simple]);
    ++at_;
    return;
  }
  if (c != 'u') fail_expected("an escape character");
  ++at_;
  std::uint32_t code = hex4();
  if (code >= 0xDC00 && code <= 0xDFFF) fail("a \\u escape is half of a surrogate pair");
  if (code >= 0xD800 && code <= 0xDBFF) {
    if (text_.substr(at_, 2) != "\\u") fail("a \\u escape is half of a surrogate pair");
    at_ += 2;
    const std::uint32_t low = hex4();
    if (low < 0xDC00 || low > 0xDFFF) fail("a \\u escape is half of a surrogate pair");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  }
  append_utf8(out, code);
}

void Reader::enter(char open, const char* what) {
  skip_space();
  if (at_ >= text_.size() || text_[at_] != open) fail_expected(what);
  if (depth_ == kMaxDepth) fail("nested deeper than " + std::to_string(kMaxDepth));
  first_[depth_++] = true;
  ++at_;
}

void Reader::begin_object() { enter('{', "an object"); }
void Reader::begin_array() { enter('[', "a list"); }

// Moves to the next element of the innermost container, or out of it.
bool Reader::next(char close) {
  skip_space();
  if (at_ < text_.size() && text_[at_] == close) {
    ++at_;
    --depth_;
    return false;
  }
  bool& first = first_[depth_ - 1];
  if (!first) {
    if (at_ >= text_.size() || text_[at_] != ',') {
      fail_expected(close == '}' ? "',' or '}'" : "',' or ']'");
    }
    ++at_;
  }
  first = false;
  return true;
}

bool Reader::next_key(std::string_view& key) {
  check(depth_ > 0, "json: next_key outside an object");
  if (!next('}')) return false;
  key = string();
  skip_space();
  if (at_ >= text_.size() || text_[at_] != ':') fail_expected("':'");
  ++at_;
  return true;
}

bool Reader::next_item() {
  check(depth_ > 0, "json: next_item outside a list");
  return next(']');
}

void Reader::skip() {
  bool is_int = false;
  skip_space();
  switch (at_ < text_.size() ? text_[at_] : '\0') {
    case '{': {
      std::string_view key;
      begin_object();
      while (next_key(key)) skip();
      return;
    }
    case '[':
      begin_array();
      while (next_item()) skip();
      return;
    case '"':
      string();
      return;
    case 't':
    case 'f':
      boolean();
      return;
    case 'n':
      null();
      return;
    default:
      peek();  // throws unless a number comes
      number_text(is_int);
  }
}

void Reader::finish() {
  skip_space();
  if (at_ != text_.size()) fail("something follows the value");
}

}  // namespace flashnext::json
