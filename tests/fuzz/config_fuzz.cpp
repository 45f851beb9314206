// Any bytes as config.json: a shape whose derived sizes are sane, or a CheckpointError. Inputs that
// begin with '+' replace one key of a valid config: "+key value".
#include "cpp/checkpoint/checkpoint.h"
#include "cpp/checkpoint/ngram_hash.h"
#include "tests/fuzz/fuzz_checkpoint.h"

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flashnext;
  std::string text(reinterpret_cast<const char*>(data), size);
  if (!text.empty() && text[0] == '+') {
    const std::size_t space = text.find(' ');
    if (space == std::string::npos) return 0;
    auto members = fuzzing::tiny_config();
    members[text.substr(1, space - 1)] = text.substr(space + 1);
    text = fuzzing::join(members);
  }
  try {
    const ModelShape s = parse_config(text, "config.json");
    const bool sane = s.hidden > 0 && s.hidden % 128 == 0 && s.q_dim() > 0 && s.kv_dim() > 0 &&
                      s.gdn_channels() > 0 && s.stack() > 0 && s.max_blocks() > 0 &&
                      s.rotary >= 2 && s.rotary <= s.head_dim && s.top_k <= s.experts &&
                      s.layer_kinds.size() == static_cast<std::size_t>(s.layers);
    if (!sane) __builtin_trap();
    if (s.ple_layer >= 0 && derive_ngram_hash(s).rows <= 0) __builtin_trap();
    // The table is bounded too; building the largest on every input would only cost time.
    if (std::int64_t{s.layers} * s.experts < 1000 && tensor_table(s).empty()) __builtin_trap();
  } catch (const CheckpointError&) {
  }
  return 0;
}
