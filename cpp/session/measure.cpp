#include "cpp/session/measure.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace flashnext {
namespace {

using Clock = std::chrono::steady_clock;

// Runs rows in lane 0 and returns the token drawn after the last (-1: none was asked for).
std::int32_t timed_step(Engine& engine, std::span<const std::int32_t> tokens, bool draw,
                        const SampleParams& sampling, std::vector<std::int64_t>& ns) {
  const Clock::time_point start = Clock::now();
  const bool room = engine.reserve(0, static_cast<std::int32_t>(tokens.size()));
  check(room, "measure_run: the lane's pages do not suffice");
  const LaneRows rows{0, tokens, draw ? LaneRows::Logits::kLast : LaneRows::Logits::kNone,
                      sampling};
  const std::vector<StepOutput>& out = engine.step({&rows, 1}, false);
  ns.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  if (!draw) return -1;
  if (out.front().token < 0) {
    throw DeviceError("the logits at position " + std::to_string(out.front().pos) +
                      " are not finite");
  }
  return out.front().token;
}

// Graphs on or off until the end of the scope.
class GraphChoice {
 public:
  GraphChoice(Engine& engine, bool on) : engine_(engine) { engine_.use_graphs(on); }
  ~GraphChoice() { engine_.use_graphs(true); }
  GraphChoice(const GraphChoice&) = delete;
  GraphChoice& operator=(const GraphChoice&) = delete;

 private:
  Engine& engine_;
};

}  // namespace

RunTimes measure_run(Session& session, std::span<const std::int32_t> prompt,
                     const MeasureOptions& options, bool keep) {
  Engine& engine = session.engine();
  const EngineOptions& limits = engine.options();
  const auto total = static_cast<std::int64_t>(prompt.size()) + options.new_tokens;
  if (prompt.empty() || options.new_tokens < 0 || total > limits.window) {
    throw InputError("a prompt of " + std::to_string(prompt.size()) + " tokens and " +
                     std::to_string(options.new_tokens) + " new ones: must be 1 to window = " +
                     std::to_string(limits.window) + " together");
  }
  if (options.chunk < 0 || options.chunk > limits.chunk) {
    throw InputError("chunk = " + std::to_string(options.chunk) + ": the session was opened for " +
                     std::to_string(limits.chunk) + " rows");
  }
  const auto chunk = static_cast<std::size_t>(options.chunk > 0 ? options.chunk : limits.chunk);
  session.scheduler().prefixes().clear();
  for (std::int32_t l = 0; l < limits.lanes; ++l) engine.reset(l);
  const GraphChoice choice(engine, options.graphs);
  RunTimes times;
  std::int32_t token = -1;
  for (std::size_t at = 0; at < prompt.size(); at += chunk) {
    if (options.poll) options.poll();
    const std::size_t n = std::min(chunk, prompt.size() - at);
    token = timed_step(engine, prompt.subspan(at, n), at + n == prompt.size(), options.sampling,
                       times.chunk_ns);
  }
  times.tokens.push_back(token);
  for (std::int32_t i = 0; i < options.new_tokens; ++i) {
    if (options.poll) options.poll();
    token = timed_step(engine, {&token, 1}, true, options.sampling, times.decode_ns);
    times.tokens.push_back(token);
  }
  if (!keep) engine.reset(0);
  return times;
}

}  // namespace flashnext
