#include "cpp/sched/scheduler.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace flashnext {

namespace {

// A long prompt is remembered at least at these distances, so that prompts that share only a part
// find it.
constexpr std::int32_t kSnapshotTokens = 2048;
// What is left of a prompt up to here is cheaper to compute again than to remember.
constexpr std::int32_t kShortPrompt = 16;

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

void range_check(bool ok, const std::string& what, double value, const char* remedy) {
  if (!ok) throw InputError(what + " = " + std::to_string(value) + ": " + remedy);
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
    case Finish::kCallback:
      return "stop_callback";
  }
  return "unknown";
}

void Scheduler::validate(const Request& r, std::size_t index) const {
  const std::string who = "request " + std::to_string(index) + ": ";
  if (r.prompt.empty()) throw InputError(who + "the prompt is empty; give at least one token");
  for (const std::int32_t id : r.prompt) {
    if (id < 0 || id >= engine_.vocab()) {
      throw InputError(who + "token id " + std::to_string(id) +
                       " is outside the vocabulary of 0 to " + std::to_string(engine_.vocab() - 1) +
                       "; check which tokenizer made it");
    }
  }
  range_check(r.max_new_tokens >= 1, who + "max_new_tokens", r.max_new_tokens,
              "must be at least 1");
  const std::int64_t total = static_cast<std::int64_t>(r.prompt.size()) + r.max_new_tokens;
  if (total > engine_.options().window) {
    throw InputError(
        who + "prompt of " + std::to_string(r.prompt.size()) + " tokens and max_new_tokens = " +
        std::to_string(r.max_new_tokens) + " need " + std::to_string(total) +
        " positions, the window has " + std::to_string(engine_.options().window) +
        "; shorten the prompt, ask for fewer tokens or open the session with a larger window");
  }
  const SampleParams& s = r.sampling;
  range_check(s.temperature >= 0 && std::isfinite(s.temperature), who + "temperature",
              static_cast<double>(s.temperature), "must be 0 (greedy) or a positive number");
  range_check(s.top_p > 0 && s.top_p <= 1, who + "top_p", static_cast<double>(s.top_p),
              "must be above 0 and at most 1 (off)");
  range_check(s.min_p >= 0 && s.min_p <= 1, who + "min_p", static_cast<double>(s.min_p),
              "must be from 0 (off) to 1");
  range_check(s.top_k >= 0, who + "top_k", s.top_k, "must be 0 (off) or positive");
}

void Scheduler::reserve(std::int32_t lane, std::int32_t tokens) {
  while (!engine_.reserve(lane, tokens)) {
    check(prefixes_.drop_oldest(), "the page pool is smaller than the lanes' windows");
  }
}

void Scheduler::admit(std::span<const Request> requests, std::size_t index, std::int32_t lane,
                      Completion& completion) {
  const Request& r = requests[index];
  engine_.reset(lane);
  completion.prompt_tokens = static_cast<std::int32_t>(r.prompt.size());
  while (const Snapshot* found = prefixes_.find(r.prompt)) {
    if (engine_.restore(lane, *found)) break;
    check(prefixes_.drop_oldest(), "no page is free and no snapshot holds one");
  }
  completion.reused_tokens = engine_.length(lane);
  ++counters_.requests;
  counters_.prompt_tokens += r.prompt.size();
  counters_.reused_tokens += static_cast<std::uint64_t>(completion.reused_tokens);
}

// One chunk. It ends early where a snapshot is worth having: before the last token, so that the
// same prompt is found again at the price of a one-row step, and every kSnapshotTokens of a long
// prompt.
void Scheduler::prefill(const Request& r, Running& running, Completion& completion,
                        const GenerateHooks& hooks) {
  const auto total = static_cast<std::int32_t>(r.prompt.size());
  const std::int32_t at = engine_.length(running.lane);
  const bool remember = engine_.options().snapshots > 0;
  const std::int32_t last = remember && total - at > kShortPrompt ? total - 1 : total;
  // Never closer than a chunk: a snapshot must not cut steps shorter than asked for.
  const std::int32_t spacing = std::max(kSnapshotTokens, engine_.options().chunk);
  const std::int32_t mark = std::min((at / spacing + 1) * spacing, last);
  const std::int32_t end = std::min({total, mark, at + engine_.options().chunk});
  reserve(running.lane, end - at);
  LaneRows rows{
      running.lane,
      std::span(r.prompt).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(end - at)),
      end == total ? LaneRows::Logits::kLast : LaneRows::Logits::kNone, r.sampling};
  const std::vector<StepOutput>& out = engine_.step({&rows, 1}, false);
  if (hooks.on_prefill) hooks.on_prefill(running.request, end, total);
  if (end < total) {
    if (end == mark) prefixes_.keep(running.lane);
    return;
  }
  running.decoding = true;
  running.first_token = running.last_token = Clock::now();
  completion.prefill_seconds = seconds(running.first_token - running.started);
  const std::int32_t token = out.front().token;
  if (accept(r, running, completion, token, hooks)) running.lane = -1;
}

// True when the request has ended.
bool Scheduler::accept(const Request& r, Running& running, Completion& completion,
                       std::int32_t token, const GenerateHooks& hooks) {
  if (token < 0) {
    throw DeviceError("the logits of request " + std::to_string(running.request) + " at position " +
                      std::to_string(engine_.length(running.lane)) + " are not finite");
  }
  running.last_token = Clock::now();
  if (std::find(r.stop_ids.begin(), r.stop_ids.end(), token) != r.stop_ids.end()) {
    finish(running, completion, Finish::kStop);
    return true;
  }
  completion.tokens.push_back(token);
  ++counters_.new_tokens;
  const bool stop = hooks.on_token && hooks.on_token(running.request, token);
  if (stop) {
    finish(running, completion, Finish::kCallback);
  } else if (static_cast<std::int32_t>(completion.tokens.size()) >= r.max_new_tokens) {
    finish(running, completion, Finish::kLength);
  } else {
    return false;
  }
  return true;
}

void Scheduler::finish(Running& running, Completion& completion, Finish finish) {
  completion.finish = finish;
  if (running.decoding)
    completion.decode_seconds = seconds(running.last_token - running.first_token);
  counters_.prefill_seconds += completion.prefill_seconds;
  counters_.decode_seconds += completion.decode_seconds;
  prefixes_.keep(running.lane);
  engine_.reset(running.lane);
}

std::vector<Completion> Scheduler::generate(std::span<const Request> requests,
                                            const GenerateHooks& hooks) {
  for (std::size_t i = 0; i < requests.size(); ++i) validate(requests[i], i);
  cancelled_.store(false);
  std::vector<Completion> done(requests.size());
  std::vector<Running> running;
  std::vector<std::int32_t> free_lanes;
  for (std::int32_t l = engine_.options().lanes - 1; l >= 0; --l) free_lanes.push_back(l);
  std::size_t next = 0;
  std::vector<LaneRows> rows;
  std::vector<std::int32_t> fed;  // the token each lane feeds

  const auto retire = [&] {
    for (std::size_t i = running.size(); i-- > 0;) {
      if (running[i].lane >= 0) continue;
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
    }
    free_lanes.clear();
    for (std::int32_t l = engine_.options().lanes - 1; l >= 0; --l) {
      const bool busy = std::any_of(running.begin(), running.end(),
                                    [l](const Running& r) { return r.lane == l; });
      if (!busy) free_lanes.push_back(l);
    }
  };

  try {
    while (next < requests.size() || !running.empty()) {
      if (hooks.poll) hooks.poll();
      if (cancelled_.load()) {
        for (Running& r : running) finish(r, done[r.request], Finish::kCancelled);
        for (; next < requests.size(); ++next) {
          done[next].finish = Finish::kCancelled;
          done[next].prompt_tokens = static_cast<std::int32_t>(requests[next].prompt.size());
        }
        break;
      }
      while (next < requests.size() && !free_lanes.empty()) {
        const std::int32_t lane = free_lanes.back();
        free_lanes.pop_back();
        running.push_back({next, lane, Clock::now(), {}, {}, false});
        admit(requests, next, lane, done[next]);
        ++next;
      }
      const auto filling = std::find_if(running.begin(), running.end(),
                                        [](const Running& r) { return !r.decoding; });
      if (filling != running.end()) {
        prefill(requests[filling->request], *filling, done[filling->request], hooks);
        retire();
      }
      // One token of every lane that decodes, also while another lane's prompt is being read.
      rows.clear();
      fed.clear();
      for (const Running& r : running) {
        if (r.decoding) fed.push_back(done[r.request].tokens.back());
      }
      std::size_t k = 0;
      for (const Running& r : running) {
        if (!r.decoding) continue;
        reserve(r.lane, 1);
        rows.push_back(
            {r.lane, {&fed[k++], 1}, LaneRows::Logits::kLast, requests[r.request].sampling});
      }
      if (rows.empty()) continue;
      const std::vector<StepOutput>& out = engine_.step(rows, false);
      k = 0;
      for (Running& r : running) {
        if (!r.decoding) continue;
        if (accept(requests[r.request], r, done[r.request], out[k++].token, hooks)) r.lane = -1;
      }
      retire();
    }
  } catch (...) {
    for (const Running& r : running) {
      if (r.lane >= 0) engine_.reset(r.lane);
    }
    throw;
  }
  return done;
}

void Scheduler::every_logit(std::span<const std::int32_t> ids, std::int32_t chunk,
                            const std::function<void(const std::vector<StepOutput>&)>& visit) {
  if (ids.empty()) throw InputError("the token list is empty; give at least one token");
  std::int32_t most = engine_.max_outputs();
  if (chunk > 0) most = std::min(most, chunk);
  most = std::min(most, engine_.options().chunk);
  engine_.reset(0);
  try {
    for (std::size_t at = 0; at < ids.size();) {
      const std::size_t n = std::min(ids.size() - at, static_cast<std::size_t>(most));
      if (at + n <= static_cast<std::size_t>(engine_.options().window)) {
        reserve(0, static_cast<std::int32_t>(n));
      }
      const LaneRows rows{0, ids.subspan(at, n), LaneRows::Logits::kAll, {}};
      visit(engine_.step({&rows, 1}, true));
      at += n;
    }
  } catch (...) {
    engine_.reset(0);
    throw;
  }
  engine_.reset(0);
}

}  // namespace flashnext
