// What is asked of the scheduler, and what it tells: requests, events, completions.
#pragma once

#include "cpp/model/engine.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace flashnext {

using RequestId = std::uint64_t;  // 1, 2, .. in the order of submission

struct Request {
  std::vector<std::int32_t> prompt;
  std::int32_t max_new_tokens = 256;
  SampleParams sampling{};  // seed, temperature, top_p, top_k, min_p
  std::vector<std::int32_t> stop_ids;
  std::vector<std::string> stop_texts;  // bytes whose appearance ends the answer
  // Where the prompt's turns begin, ascending positions in 1..prompt: later prompts may part from
  // this one there, so the states are worth keeping. `shared_mark` (0: none) is the end of what
  // other conversations begin with too.
  std::vector<std::int32_t> marks;
  std::int32_t shared_mark = 0;
  // The logits of every position instead of an answer, computed cold in steps of at most `chunk`
  // rows (0: as many as fit). The answer's options have no meaning then.
  bool every_logit = false;
  std::int32_t chunk = 0;
};

enum class Finish { kStop, kLength, kCancelled, kFailed };
const char* to_string(Finish finish) noexcept;

struct Completion {
  std::vector<std::int32_t> tokens;  // without the stop id
  Finish finish = Finish::kLength;
  std::string reason;  // of kFailed
  std::int32_t prompt_tokens = 0;
  std::int32_t reused_tokens = 0;  // of the prompt, taken from a snapshot
  double queued_seconds = 0;       // from its submission to its first step
  double prefill_seconds = 0;      // from its first step to its first token
  double decode_seconds = 0;       // from its first token to its last
  std::int32_t decode_steps = 0;   // its steps after the first token
  double longest_wait = 0;         // seconds between two of its tokens
};

struct RequestEvent {
  enum class Kind { kPrefill, kToken, kLogits, kEnd };
  RequestId id = 0;
  Kind kind = Kind::kEnd;
  std::int32_t token = -1;               // kToken
  std::int32_t done = 0, total = 0;      // kPrefill: tokens of the prompt that are computed
  std::span<const StepOutput> logits;    // kLogits: of consecutive positions, until the next step
  std::optional<Completion> completion;  // kEnd
};

}  // namespace flashnext
