#include "cpp/sched/scheduler.h"

#include <algorithm>
#include <utility>

namespace flashnext {

namespace {

constexpr double kAim = 0.85;  // of the wait that is allowed: no step takes just what was expected
constexpr std::int32_t kFirstPart = 64;  // rows beside a decoding neighbour while no time is known

double seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

std::int32_t size_of(const std::vector<std::int32_t>& v) {
  return static_cast<std::int32_t>(v.size());
}

}  // namespace

Scheduler::Scheduler(Engine& engine, SchedulerOptions options)
    : engine_(engine), options_(std::move(options)), prefixes_(engine) {}

RequestId Scheduler::submit(Request request) {
  validate(request);
  Sequence& s = sequences_.emplace_back();
  s.id = ++last_id_;
  s.request = std::move(request);
  s.ids = s.request.prompt;
  s.completion.prompt_tokens = size_of(s.ids);
  s.submitted = Clock::now();
  ++counters_.requests;
  if (!s.request.every_logit) counters_.prompt_tokens += s.ids.size();
  return s.id;
}

void Scheduler::cancel(RequestId id) {
  for (Sequence& s : sequences_) s.cancelled = s.cancelled || s.id == id;
}

void Scheduler::cancel_all() {
  for (Sequence& s : sequences_) s.cancelled = true;
}

std::size_t Scheduler::running() const noexcept {
  return static_cast<std::size_t>(std::count_if(
      sequences_.begin(), sequences_.end(), [](const Sequence& s) { return s.lane.has_value(); }));
}

std::vector<Sequence*> Scheduler::with_lane() {
  std::vector<Sequence*> all;
  for (Sequence& s : sequences_) {
    if (s.lane) all.push_back(&s);
  }
  return all;
}

void Scheduler::retire() {
  std::erase_if(sequences_, [](const Sequence& s) { return s.state == Sequence::State::kEnded; });
}

std::vector<RequestEvent> Scheduler::step() {
  std::vector<RequestEvent> events;
  for (Sequence& s : sequences_) {
    if (s.cancelled) end(s, Finish::kCancelled, events);
  }
  retire();
  admit();
  std::vector<Sequence*> active = with_lane();
  std::vector<StepShare> shares = plan(active);
  while (!make_room(active, shares)) {
    active = with_lane();
    shares = plan(active);
  }
  if (shares.empty()) return events;

  std::vector<LaneRows> rows;
  bool fetch = false;
  std::int32_t total = 0;
  for (const StepShare& share : shares) {
    const Sequence& s = *active[share.sequence];
    const std::int32_t lane = s.lane->lane(), at = engine_.length(lane);
    const bool last = at + share.rows == size_of(s.ids);
    const auto logits = s.request.every_logit ? LaneRows::Logits::kAll
                        : last                ? LaneRows::Logits::kLast
                                              : LaneRows::Logits::kNone;
    rows.push_back({lane,
                    std::span(s.ids).subspan(static_cast<std::size_t>(at),
                                             static_cast<std::size_t>(share.rows)),
                    logits, s.request.sampling});
    fetch = fetch || s.request.every_logit;
    total += share.rows;
  }
  const Clock::time_point before = Clock::now();
  const std::vector<StepOutput>& outputs = engine_.step(rows, fetch);
  times_.add(total, seconds(Clock::now() - before));

  std::size_t at = 0;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    const std::size_t n = rows[i].logits == LaneRows::Logits::kAll    ? rows[i].tokens.size()
                          : rows[i].logits == LaneRows::Logits::kLast ? 1
                                                                      : 0;
    advance(*active[shares[i].sequence], std::span(outputs).subspan(at, n), events);
    at += n;
  }
  retire();
  return events;
}

std::vector<StepShare> Scheduler::plan(const std::vector<Sequence*>& running) const {
  std::vector<Waiting> waiting;
  for (const Sequence* s : running) {
    const std::int32_t at = engine_.length(s->lane->lane());
    Waiting w;
    w.decoding = s->state == Sequence::State::kDecoding;
    w.left = size_of(s->ids) - at;
    w.until_mark = w.left;
    for (const std::int32_t mark : s->marks) {
      if (mark > at) {
        w.until_mark = std::min(w.left, mark - at);
        break;
      }
    }
    w.every_logit = s->request.every_logit;
    if (s->request.chunk > 0) w.until_mark = std::min(w.until_mark, s->request.chunk);
    waiting.push_back(w);
  }
  const EngineOptions& o = engine_.options();
  StepBudget budget;
  budget.rows = std::max(o.chunk, o.lanes);
  budget.outputs = engine_.max_outputs();
  const std::int32_t within =
      times_.rows_within(kAim * options_.token_wait, budget.rows, kFirstPart);
  budget.prompt_rows = std::max(within, options_.least_part);
  return plan_step(waiting, budget);
}

// Pages for the rows of a step. False when a sequence was put back for them: then the step must be
// planned again.
bool Scheduler::make_room(const std::vector<Sequence*>& running,
                          std::span<const StepShare> shares) {
  for (const StepShare& share : shares) {
    while (!engine_.reserve(running[share.sequence]->lane->lane(), share.rows)) {
      if (prefixes_.drop_oldest()) continue;
      check(running.size() > 1, "the page pool is smaller than a window");
      put_back(*running.back());
      return false;
    }
  }
  return true;
}

void Scheduler::reserve(std::int32_t lane, std::int32_t tokens) {
  while (!engine_.reserve(lane, tokens)) {
    check(prefixes_.drop_oldest(), "the page pool is smaller than a window");
  }
}

// Back into the queue without its state. What it has drawn stays drawn, and is read like a prompt.
void Scheduler::put_back(Sequence& s) {
  s.lane.reset();
  s.state = Sequence::State::kQueued;
  ++counters_.preempted;
}

void Scheduler::advance(Sequence& s, std::span<const StepOutput> outputs,
                        std::vector<RequestEvent>& events) {
  const std::int32_t at = engine_.length(s.lane->lane());
  const bool first = s.ids.size() == s.request.prompt.size();  // nothing is drawn yet
  if (s.state == Sequence::State::kReading && first) {
    RequestEvent e;
    e.id = s.id;
    e.kind = RequestEvent::Kind::kPrefill;
    e.done = at;
    e.total = size_of(s.ids);
    events.push_back(e);
  }
  if (s.request.every_logit) {
    RequestEvent e;
    e.id = s.id;
    e.kind = RequestEvent::Kind::kLogits;
    e.logits = outputs;
    events.push_back(e);
    if (at == size_of(s.ids)) end(s, Finish::kStop, events);
    return;
  }
  if (!outputs.empty()) return accept(s, outputs.front().token, events);
  if (std::binary_search(s.marks.begin(), s.marks.end(), at)) {
    prefixes_.keep(s.lane->lane(), at == s.request.shared_mark);
  }
}

void Scheduler::accept(Sequence& s, std::int32_t token, std::vector<RequestEvent>& events) {
  Completion& c = s.completion;
  const Clock::time_point now = Clock::now();
  if (token < 0) {
    // Its states are no better than its logits.
    prefixes_.forget(s.ids);
    return end(s, Finish::kFailed, events,
               "the logits at position " + std::to_string(s.ids.size() - 1) + " are not finite");
  }
  if (s.first_token == Clock::time_point{}) {
    s.first_token = now;
    c.prefill_seconds = seconds(now - s.started);
  } else {
    ++c.decode_steps;
    c.longest_wait = std::max(c.longest_wait, seconds(now - s.last_token));
    counters_.longest_wait = std::max(counters_.longest_wait, c.longest_wait);
  }
  s.last_token = now;
  s.state = Sequence::State::kDecoding;
  const std::vector<std::int32_t>& stop = s.request.stop_ids;
  if (std::find(stop.begin(), stop.end(), token) != stop.end()) {
    return end(s, Finish::kStop, events);
  }
  c.tokens.push_back(token);
  s.ids.push_back(token);
  ++counters_.new_tokens;
  RequestEvent e;
  e.id = s.id;
  e.kind = RequestEvent::Kind::kToken;
  e.token = token;
  events.push_back(e);
  if (stops(s, token)) {
    end(s, Finish::kStop, events);
  } else if (size_of(c.tokens) >= s.request.max_new_tokens) {
    end(s, Finish::kLength, events);
  }
}

// Whether the token completes one of the request's stop texts.
bool Scheduler::stops(Sequence& s, std::int32_t token) const {
  if (s.request.stop_texts.empty()) return false;
  const auto i = static_cast<std::size_t>(token);
  if (i < options_.vocabulary.size()) s.tail += options_.vocabulary[i];
  std::size_t longest = 0;
  for (const std::string& text : s.request.stop_texts) {
    if (s.tail.find(text) != std::string::npos) return true;
    longest = std::max(longest, text.size());
  }
  if (s.tail.size() >= longest) s.tail.erase(0, s.tail.size() - longest + 1);
  return false;
}

void Scheduler::end(Sequence& s, Finish finish, std::vector<RequestEvent>& events,
                    const std::string& reason) {
  Completion& c = s.completion;
  c.finish = finish;
  c.reason = reason;
  if (s.first_token != Clock::time_point{})
    c.decode_seconds = seconds(s.last_token - s.first_token);
  counters_.prefill_seconds += c.prefill_seconds;
  counters_.decode_seconds += c.decode_seconds;
  if (finish == Finish::kCancelled) ++counters_.cancelled;
  if (finish == Finish::kFailed) ++counters_.failed;
  if (s.lane && finish != Finish::kFailed && !s.request.every_logit) {
    prefixes_.keep(s.lane->lane());
  }
  s.lane.reset();
  s.state = Sequence::State::kEnded;
  RequestEvent e;
  e.id = s.id;
  e.kind = RequestEvent::Kind::kEnd;
  e.completion = std::move(c);
  events.push_back(std::move(e));
}

std::vector<RequestEvent> Scheduler::abandon(const std::string& reason) {
  std::vector<RequestEvent> events;
  for (Sequence& s : sequences_) end(s, Finish::kFailed, events, reason);
  retire();
  return events;
}

Scheduler::Counters Scheduler::counters() const {
  Counters c = counters_;
  for (const Sequence& s : sequences_) {
    c.queued += s.state == Sequence::State::kQueued ? 1 : 0;
    c.reading += s.state == Sequence::State::kReading ? 1 : 0;
    c.decoding += s.state == Sequence::State::kDecoding ? 1 : 0;
  }
  return c;
}

}  // namespace flashnext
