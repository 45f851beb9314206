#include "cpp/base/json.h"

#include <cstdint>
#include <gtest/gtest.h>
#include <random>
#include <string>

namespace flashnext::json {
namespace {

std::string error_of(std::string_view text) {
  try {
    parse(text);
  } catch (const JsonError& error) {
    return error.what();
  }
  return "";
}

TEST(Json, ReadsEveryKindOfValue) {
  const Value v = parse(R"( {"a": [1, -2, 3.5, true, false, null, "x"], "b": {"c": {}}} )");
  ASSERT_EQ(v.type, Type::kObject);
  const Value& a = *v.find("a");
  ASSERT_EQ(a.items.size(), 7u);
  EXPECT_EQ(a.items[0].integer, 1);
  EXPECT_EQ(a.items[1].integer, -2);
  EXPECT_EQ(a.items[1].type, Type::kInt);
  EXPECT_EQ(a.items[2].number, 3.5);
  EXPECT_EQ(a.items[2].type, Type::kDouble);
  EXPECT_TRUE(a.items[3].boolean);
  EXPECT_EQ(a.items[4].type, Type::kBool);
  EXPECT_EQ(a.items[5].type, Type::kNull);
  EXPECT_EQ(a.items[6].string, "x");
  EXPECT_EQ(v.find("b")->find("c")->type, Type::kObject);
  EXPECT_EQ(v.find("missing"), nullptr);
  EXPECT_EQ(a.find("a"), nullptr);
}

TEST(Json, IntegersAreExactAndOthersAreDoubles) {
  EXPECT_EQ(parse("9223372036854775807").integer, INT64_MAX);
  EXPECT_EQ(parse("-9223372036854775808").integer, INT64_MIN);
  EXPECT_EQ(parse("9007199254740993").integer, 9007199254740993);  // no double holds it
  EXPECT_EQ(parse("9223372036854775808").type, Type::kDouble);
  EXPECT_EQ(parse("9223372036854775808").number, 9223372036854775808.0);
  EXPECT_EQ(parse("1e3").type, Type::kDouble);
  EXPECT_EQ(parse("1E+3").number, 1000.0);
  EXPECT_EQ(parse("1e-06").number, 1e-6);
  EXPECT_EQ(parse("-0.0").number, 0.0);
  EXPECT_THROW(Reader("1.0").integer(), JsonError);
  EXPECT_EQ(Reader("7").number(), 7.0);
}

TEST(Json, UnescapesStrings) {
  EXPECT_EQ(parse(R"("a\"\\\/\b\f\n\r\tz")").string, "a\"\\/\b\f\n\r\tz");
  EXPECT_EQ(parse(R"("\u0041\u00e9\u20AC\ud83d\ude00")").string,
            "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
  EXPECT_EQ(parse("\"gr\xC3\xBC\xC3\x9F\x65 \xF0\x9F\xA6\x8A and a longer tail\"").string,
            "gr\xC3\xBC\xC3\x9F\x65 \xF0\x9F\xA6\x8A and a longer tail");
  EXPECT_EQ(parse(R"("\u0000")").string, std::string(1, '\0'));
}

TEST(Json, ReaderViewsPointIntoTheText) {
  const std::string text = R"({"plain_key_of_some_length": "value", "esc\u0061ped": 1})";
  Reader reader(text);
  std::string_view key;
  reader.begin_object();
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key.data(), text.data() + 2);
  EXPECT_EQ(reader.string(), "value");
  ASSERT_TRUE(reader.next_key(key));
  EXPECT_EQ(key, "escaped");
  reader.skip();
  EXPECT_FALSE(reader.next_key(key));
  reader.finish();
}

TEST(Json, RefusesWhatIsNotJson) {
  const char* bad[] = {
      "",
      " ",
      "{",
      "}",
      "[",
      "[1",
      "[1,",
      "[1,]",
      "[,1]",
      "[1 2]",
      "{\"a\"}",
      "{\"a\":}",
      "{a:1}",
      "{\"a\":1,}",
      "{,}",
      "{\"a\" 1}",
      "tru",
      "trux",
      "nul",
      "nan",
      "NaN",
      "Infinity",
      "-",
      "+1",
      "01",
      "-01",
      "1.",
      ".5",
      "1e",
      "1e+",
      "0x10",
      "1 2",
      "\"",
      "\"a",
      "\"\\\"",
      "\"\\x\"",
      "\"\\u12\"",
      "\"\\u12g4\"",
      "'a'",
      "[1]]",
      "\"\n\"",
      "\"\t\"",
      "// a\n1",
      "1e999",
      "\"\\ud800\"",
      "\"\\udc00\"",
      "\"\\ud800\\u0041\"",
      "{\"a\":1]",
      "[1}",
      "\xEF\xBB\xBF{}",
  };
  for (const char* text : bad) EXPECT_NE(error_of(text), "") << text;
}

TEST(Json, RefusesBrokenUtf8) {
  const char* bad[] = {"\x80",
                       "\xC3",
                       "\xC0\xAF",
                       "\xE0\x80\xAF",
                       "\xED\xA0\x80",
                       "\xF4\x90\x80\x80",
                       "\xF5\x80\x80\x80",
                       "\xE2\x82",
                       "\xFF",
                       "\xC3("};
  for (const char* bytes : bad) {
    for (const char* head : {"", "twelve bytes", "\\n"}) {
      std::string text = "\"";
      text.append(head).append(bytes).append("\"");
      EXPECT_NE(error_of(text).find("UTF-8"), std::string::npos) << text;
    }
  }
}

TEST(Json, RefusesDuplicateKeysAndDepth) {
  EXPECT_NE(error_of(R"({"a": 1, "b": 2, "a": 3})").find("\"a\" stands twice"), std::string::npos);
  EXPECT_NE(error_of(R"({"a": 1, "\u0061": 3})"), "");
  EXPECT_EQ(error_of(R"({"a": {"a": 1}})"), "");
  const std::string deep(kMaxDepth, '['), close(kMaxDepth, ']');
  EXPECT_EQ(error_of(deep + close), "");
  EXPECT_NE(error_of("[" + deep + close + "]").find("nested deeper"), std::string::npos);
  EXPECT_NE(error_of(std::string(1000000, '[')), "");
  const std::string deeper = deep + "[";
  Reader reader(deeper);
  EXPECT_THROW(reader.skip(), JsonError);
}

TEST(Json, ErrorsCarryTheOffset) {
  try {
    parse(R"({"a": 1, "b": x})");
    FAIL();
  } catch (const JsonError& error) {
    EXPECT_EQ(error.offset(), 14u);
    EXPECT_STREQ(error.what(), "expected a value, found 'x' at byte 14");
  }
}

// Every prefix and many one-byte changes of a text: a value or a JsonError, nothing else.
TEST(Json, DamagedTextNeverCrashes) {
  const std::string text =
      R"({"k\u00e9y": [1, -2.5e3, true, null, {"x": "\ud83d\ude00 y", "z": []}], "w": 18446744073709551616})";
  parse(text);
  for (std::size_t n = 0; n < text.size(); ++n) EXPECT_NE(error_of(text.substr(0, n)), "");
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    std::string damaged = text;
    damaged[random() % damaged.size()] = static_cast<char>(random());
    error_of(damaged);
  }
}

TEST(Json, MessagesAreCut) {
  EXPECT_EQ(to_text(parse(R"([1, "a", {"b": null}, true, 2.5])")),
            R"([1, "a", {"b": null}, true, 2.5])");
  const std::string cut = to_text(parse("\"" + std::string(500, 'a') + "\xC3\xA9\""));
  EXPECT_LT(cut.size(), 80u);
  EXPECT_TRUE(cut.ends_with("..."));
}

}  // namespace
}  // namespace flashnext::json
