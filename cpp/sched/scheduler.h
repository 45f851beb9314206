// Scheduler: requests -> steps. Requests come and go between steps, each with its own sampling,
// limits and end; a step holds a row of every sequence that decodes and parts of prompts, planned
// by plan_step(). Prompts reuse the longest prefix that a snapshot remembers. A request that is
// cancelled or fails leaves the other lanes and the prefix cache intact. When KV pages run out,
// snapshots go first, then the youngest sequence waits in the queue and is computed again: its
// answer is the same. Threads: one thread calls; validate() may be called from any. Nothing is
// called back.
#pragma once

#include "cpp/model/engine.h"
#include "cpp/sched/plan.h"
#include "cpp/sched/prefix_cache.h"
#include "cpp/sched/request.h"
#include "cpp/sched/sequence.h"
#include "cpp/sched/step_times.h"

#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <vector>

namespace flashnext {

struct SchedulerOptions {
  // Seconds that a decoding sequence should wait at most for its next token while prompts are read
  // beside it; parts of prompts are sized for it.
  double token_wait = 0.2;
  // A part of a prompt beside decoding sequences has at least so many rows: with experts in host
  // memory every part reads most of a layer's experts over the link, and small ones would read the
  // prompt many times slower for a wait that the link decides.
  std::int32_t least_part = 1;
  // Turns that begin closer than this to the state before are not worth a snapshot of their own,
  // since each ends a part of the prompt.
  std::int32_t turn_spacing = 16;
  std::vector<std::string> vocabulary;  // bytes of every token, for Request::stop_texts
};

class Scheduler {
 public:
  Scheduler(Engine& engine, SchedulerOptions options);

  // Throws InputError, naming what is wrong, for a request that cannot run.
  void validate(const Request& request) const;
  // Queues a request. Throws as validate().
  RequestId submit(Request request);
  // Its end comes with the next step(); nothing happens to an id that is not there.
  void cancel(RequestId id);
  void cancel_all();
  // Nothing is queued and nothing runs.
  bool idle() const noexcept { return sequences_.empty(); }

  // Sequences that have a lane.
  std::size_t running() const noexcept;
  // While held, nobody who is queued gets a lane.
  void hold(bool on) noexcept { held_ = on; }
  std::size_t vocab() const noexcept { return static_cast<std::size_t>(engine_.vocab()); }

  // One step of the engine, for whom it is due, and what came of it; events of one request come in
  // order, kEnd last. Throws what the engine throws; abandon() then ends what was running.
  std::vector<RequestEvent> step();
  // Ends every request as kFailed with this reason.
  std::vector<RequestEvent> abandon(const std::string& reason);

  // Engine::reserve() for whoever borrowed a lane, at the price of snapshots.
  void reserve(std::int32_t lane, std::int32_t tokens);
  PrefixCache& prefixes() noexcept { return prefixes_; }
  const StepTimes& step_times() const noexcept { return times_; }

  struct Counters {
    std::uint64_t requests = 0, prompt_tokens = 0, reused_tokens = 0, new_tokens = 0;
    std::uint64_t cancelled = 0, failed = 0, preempted = 0;
    double prefill_seconds = 0, decode_seconds = 0;
    double longest_wait = 0;  // seconds between two tokens of one sequence
    std::size_t queued = 0, reading = 0, decoding = 0;  // now
  };
  Counters counters() const;

 private:
  using Clock = Sequence::Clock;

  void admit();
  bool waits_for_neighbour(const Sequence& s) const;
  bool start(Sequence& s);
  void choose_marks(Sequence& s) const;
  std::vector<StepShare> plan(const std::vector<Sequence*>& running) const;
  bool make_room(const std::vector<Sequence*>& running, std::span<const StepShare> shares);
  void put_back(Sequence& s);
  std::vector<Sequence*> with_lane();
  void advance(Sequence& s, std::span<const StepOutput> outputs, std::vector<RequestEvent>& events);
  void accept(Sequence& s, std::int32_t token, std::vector<RequestEvent>& events);
  bool stops(Sequence& s, std::int32_t token) const;
  void end(Sequence& s, Finish finish, std::vector<RequestEvent>& events,
           const std::string& reason = {});
  void retire();

  Engine& engine_;
  SchedulerOptions options_;
  PrefixCache prefixes_;
  StepTimes times_;
  std::list<Sequence> sequences_;  // in the order of arrival
  RequestId last_id_ = 0;
  bool held_ = false;
  Counters counters_;
};

}  // namespace flashnext
