// How requests come in: what may run at all, who gets a lane, and what is known of its prompt.
#include "cpp/sched/scheduler.h"

#include <algorithm>
#include <cmath>

namespace flashnext {

namespace {

// A long prompt is remembered at least at these distances, so that prompts that share only a part
// find it.
constexpr std::int32_t kSnapshotTokens = 2048;
// What is left of a prompt up to here is cheaper to compute again than to remember.
constexpr std::int32_t kShortPrompt = 16;
constexpr int kTurnMarks = 3;  // of the turns that a prompt adds, the last so many

void range_check(bool ok, const char* what, double value, const char* remedy) {
  if (!ok) throw InputError(what + (" = " + std::to_string(value)) + ": " + remedy);
}

void check_window(std::int64_t prompt, std::int64_t more, std::int32_t window) {
  if (prompt + more <= window) return;
  throw InputError("prompt of " + std::to_string(prompt) + " tokens and max_new_tokens = " +
                   std::to_string(more) + " need " + std::to_string(prompt + more) +
                   " positions, the window has " + std::to_string(window) +
                   "; shorten the prompt, ask for fewer tokens or open the session with a larger "
                   "window");
}

}  // namespace

const char* to_string(Finish finish) noexcept {
  switch (finish) {
    case Finish::kStop:
      return "stop";
    case Finish::kLength:
      return "length";
    case Finish::kCancelled:
      return "cancelled";
    case Finish::kFailed:
      return "failed";
  }
  return "unknown";
}

void Scheduler::validate(const Request& r) const {
  if (r.prompt.empty()) throw InputError("the prompt is empty; give at least one token");
  for (const std::int32_t id : r.prompt) {
    if (id < 0 || id >= engine_.vocab()) {
      throw InputError("token id " + std::to_string(id) + " is outside the vocabulary of 0 to " +
                       std::to_string(engine_.vocab() - 1) + "; check which tokenizer made it");
    }
  }
  const auto length = static_cast<std::int32_t>(r.prompt.size());
  if (r.every_logit) {
    if (length > engine_.options().window) {
      throw InputError(std::to_string(length) + " tokens are more than the window of " +
                       std::to_string(engine_.options().window) +
                       "; open the session with a larger window");
    }
    range_check(r.chunk >= 0, "chunk", r.chunk, "must be at least 1 row, or 0 for as many as fit");
    return;
  }
  range_check(r.max_new_tokens >= 1, "max_new_tokens", r.max_new_tokens, "must be at least 1");
  check_window(length, r.max_new_tokens, engine_.options().window);
  const SampleParams& s = r.sampling;
  range_check(s.temperature >= 0 && std::isfinite(s.temperature), "temperature",
              static_cast<double>(s.temperature), "must be 0 (greedy) or a positive number");
  range_check(s.top_p > 0 && s.top_p <= 1, "top_p", static_cast<double>(s.top_p),
              "must be above 0 and at most 1 (off)");
  range_check(s.min_p >= 0 && s.min_p <= 1, "min_p", static_cast<double>(s.min_p),
              "must be from 0 (off) to 1");
  range_check(s.top_k >= 0, "top_k", s.top_k, "must be 0 (off) or positive");
  for (const std::string& text : r.stop_texts) {
    if (text.empty())
      throw InputError("a stop text is empty, which would end every answer at once");
  }
  check(r.stop_texts.empty() || !options_.vocabulary.empty(),
        "stop texts need the vocabulary's bytes");
  const auto& marks = r.marks;
  check(std::is_sorted(marks.begin(), marks.end()) &&
            (marks.empty() || (marks.front() >= 1 && marks.back() <= length)) &&
            r.shared_mark >= 0 && r.shared_mark <= length,
        "marks must ascend within the prompt");
}

void Scheduler::admit() {
  if (held_) return;
  for (Sequence& s : sequences_) {
    if (s.state != Sequence::State::kQueued) continue;
    if (engine_.free_lanes() == 0) return;
    if (waits_for_neighbour(s)) continue;
    if (!start(s)) return;
  }
}

// Whether a neighbour is about to reach a mark that this prompt shares: what both begin with is
// read once.
bool Scheduler::waits_for_neighbour(const Sequence& s) const {
  if (s.request.every_logit || engine_.options().snapshots == 0) return false;
  std::int32_t known = -1;
  for (const Sequence& other : sequences_) {
    if (!other.lane || other.marks.empty()) continue;
    const std::int32_t at = engine_.length(other.lane->lane());
    for (auto m = other.marks.rbegin(); m != other.marks.rend() && *m > at; ++m) {
      const auto n = static_cast<std::size_t>(*m);
      if (n >= s.ids.size() || !std::equal(s.ids.begin(), s.ids.begin() + *m, other.ids.begin())) {
        continue;
      }
      if (known < 0) known = prefixes_.length_of(s.ids);
      if (*m > known + kShortPrompt) return true;
      break;
    }
  }
  return false;
}

// Gives the sequence a lane with the longest prefix that is remembered; false when there are no
// pages for it now.
bool Scheduler::start(Sequence& s) {
  const bool again = s.started != Clock::time_point{};
  const auto length = static_cast<std::int32_t>(s.ids.size());
  // One that was put back for want of pages comes back when there are enough to its end.
  const std::int32_t more =
      again ? s.request.max_new_tokens - static_cast<std::int32_t>(s.completion.tokens.size()) : 1;
  if (!engine_.could_hold(length + more)) return false;
  std::optional<LaneLease> lease = engine_.borrow();
  const std::int32_t lane = lease->lane();
  if (!s.request.every_logit) {
    while (const Snapshot* found = prefixes_.find(s.ids)) {
      if (engine_.restore(lane, *found)) break;
      check(prefixes_.drop_oldest(), "no page is free and no snapshot holds one");
    }
  }
  const std::int32_t reused = engine_.length(lane);
  while (!engine_.reserve(lane, length - reused)) {
    if (!prefixes_.drop_oldest()) return false;
  }
  s.lane.emplace(std::move(*lease));
  s.state = Sequence::State::kReading;
  if (!again) {
    s.started = Clock::now();
    s.completion.queued_seconds = std::chrono::duration<double>(s.started - s.submitted).count();
    s.completion.reused_tokens = reused;
    counters_.reused_tokens += static_cast<std::uint64_t>(reused);
  }
  choose_marks(s);
  return true;
}

// Where the prompt's states are kept: where it may part from later ones (its turns; what others
// share with it), every kSnapshotTokens of a long one, and near its end, so that the same prompt is
// found again at the price of a step of few rows.
void Scheduler::choose_marks(Sequence& s) const {
  s.marks.clear();
  const Request& r = s.request;
  if (r.every_logit || engine_.options().snapshots == 0) return;
  const std::int32_t reused = engine_.length(s.lane->lane());
  const auto total = static_cast<std::int32_t>(r.prompt.size());
  const auto keep = [&](std::int32_t mark) {
    if (mark > reused && mark < total) s.marks.push_back(mark);
  };
  keep(r.shared_mark);
  // The answer's opening is near the end: what comes before it is always worth keeping.
  std::int32_t next = total;
  int turns = 0;
  for (auto m = r.marks.rbegin(); m != r.marks.rend() && turns < kTurnMarks; ++m) {
    if (*m >= total || *m < reused + kShortPrompt) continue;
    if (turns > 0 && next - *m < options_.turn_spacing) continue;
    keep(*m);
    next = *m;
    ++turns;
  }
  if (turns == 0 || total - *std::max_element(s.marks.begin(), s.marks.end()) > kShortPrompt) {
    if (total - reused > kShortPrompt) keep(total - 1);
  }
  // Never closer than a chunk: such a snapshot must not cut steps shorter than asked for.
  const std::int32_t spacing = std::max(kSnapshotTokens, engine_.options().chunk);
  for (std::int32_t m = (reused / spacing + 1) * spacing; m < total; m += spacing) keep(m);
  std::sort(s.marks.begin(), s.marks.end());
  s.marks.erase(std::unique(s.marks.begin(), s.marks.end()), s.marks.end());
}

}  // namespace flashnext
