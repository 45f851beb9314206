// Any bytes through the JSON reader and tree: a value or a JsonError.
#include "cpp/base/json.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashnext::json;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  bool tree = false, skipped = false, duplicate = false;
  try {
    to_text(parse(text));
    tree = true;
  } catch (const JsonError& error) {
    if (error.offset() > size) __builtin_trap();
    duplicate = std::string_view(error.what()).find("stands twice") != std::string_view::npos ||
                std::string_view(error.what()).find("fit a double") != std::string_view::npos;
  }
  try {
    Reader reader(text);
    reader.skip();
    reader.finish();
    skipped = true;
  } catch (const JsonError& error) {
    if (error.offset() > size) __builtin_trap();
  }
  // Both walks accept the same texts, but for what only the tree judges.
  if (tree != skipped && !duplicate) __builtin_trap();
  return 0;
}
