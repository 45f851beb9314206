// One request on its way through the scheduler.
#pragma once

#include "cpp/sched/request.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace flashnext {

struct Sequence {
  using Clock = std::chrono::steady_clock;
  enum class State {
    kQueued,    // no lane: new, or put back when pages ran out
    kReading,   // its prompt, or what it had computed before it was put back
    kDecoding,  // a token a step
    kEnded,
  };

  RequestId id = 0;
  Request request;
  State state = State::kQueued;
  bool cancelled = false;
  std::optional<LaneLease> lane;    // while reading or decoding
  std::vector<std::int32_t> ids;    // the prompt and the tokens drawn so far
  std::vector<std::int32_t> marks;  // of the prompt, worth a snapshot, ascending
  std::string tail;                 // bytes of the answer's end that a stop text may begin in
  Completion completion;
  Clock::time_point submitted{}, started{}, first_token{}, last_token{};
};

}  // namespace flashnext
