// The names under which releases publish this one architecture, and nothing but names: whatever
// else such a config asks for is read or refused by its own key. Still refused, since it is another
// function: scaled rotary positions (YaRN and its kind), other attentions (sliding, chunked), and
// other models that share a layer's name.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace flashnext::names {

inline constexpr std::array<std::string_view, 4> kModelTypes = {
    "qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text"};

// Class names begin with these: ...ForConditionalGeneration, ...ForCausalLM.
inline constexpr std::array<std::string_view, 2> kClasses = {"Qwen4Exp", "Qwen3_8_FlashNext"};

// Attention over the blocks that an indexer chose.
inline constexpr std::array<std::string_view, 4> kAttentions = {
    "full_attention", "indexed_attention", "qwen_sparse_attention", "deepseek_sparse_attention"};

inline constexpr const char* kModelTypeRemedy =
    "\"qwen4_exp\" or \"qwen3_8_flash_next\" (with \"_text\" inside of text_config): this engine "
    "runs no other architecture";
inline constexpr const char* kArchitectureRemedy =
    "a list that begins with \"Qwen4ExpForConditionalGeneration\" or "
    "\"Qwen3_8_FlashNextForConditionalGeneration\"";
inline constexpr const char* kLayerTypesRemedy =
    "of \"linear_attention\" and \"full_attention\" (also called indexed_attention, "
    "qwen_sparse_attention or deepseek_sparse_attention)";

inline bool model_type(std::string_view name) {
  return std::find(kModelTypes.begin(), kModelTypes.end(), name) != kModelTypes.end();
}
inline bool architecture(std::string_view name) {
  return std::any_of(kClasses.begin(), kClasses.end(),
                     [&](std::string_view c) { return name.starts_with(c); });
}
inline bool attention(std::string_view name) {
  return std::find(kAttentions.begin(), kAttentions.end(), name) != kAttentions.end();
}

}  // namespace flashnext::names
