// The gates of the engine: the promise with == on the logits of a session. Every way of computing
// a sequence is held against one token a step.
#include "cpp/gate/gate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <span>

namespace flashnext::gate {

namespace {

using Ids = std::vector<std::int32_t>;
using Bits = std::vector<std::uint64_t>;  // of the logits at a position; 0: not asked for

// Every bucket of decode steps, full and as empty as it gets.
constexpr std::int32_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 31, 32};

// Ids that every expert and both kinds of n-gram context may see, a separator now and then.
Ids random_ids(std::size_t n, std::uint32_t seed, const ModelShape& shape) {
  const auto limit = static_cast<std::uint32_t>(shape.vocab - shape.vocab / 32);
  Ids ids;
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (std::size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    ids.push_back(i % 37 == 19 ? shape.separator : static_cast<std::int32_t>((state >> 8) % limit));
  }
  return ids;
}

class EngineGates {
 public:
  EngineGates(Session& session, const GateOptions& options)
      : options_(options),
        engine_(session.engine()),
        lanes_(std::min(engine_.options().lanes, kDecodeRows)),
        most_rows_(std::min(decode_rows(engine_.options().lanes), engine_.options().chunk)),
        ids_(random_ids(
            std::min<std::size_t>(530, static_cast<std::size_t>(engine_.options().window)), 1,
            session.shape())) {
    for (std::uint32_t l = 0; l < static_cast<std::uint32_t>(lanes_); ++l) {
      others_.push_back(random_ids(24, 10 + l, session.shape()));
    }
    junk_ = random_ids(kDecodeRows, 99, session.shape());
  }

  std::vector<GateResult> run() {
    reset();
    want_ = cold(ids_, 1);
    if (wants("runs")) runs();
    if (wants("graphs")) graphs();
    if (wants("chunks")) chunks();
    if (wants("rows")) rows();
    if (wants("prefix")) prefix();
    if (wants("rewind")) rewind();
    reset();
    return std::move(results_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool wants(const char* gate) const { return options_.gate.empty() || options_.gate == gate; }

  void reset() {
    for (std::int32_t l = 0; l < engine_.options().lanes; ++l) engine_.reset(l);
  }

  std::uint64_t hash(const float* logits) {
    std::uint64_t h = 0xCBF29CE484222325ull;
    for (std::int32_t i = 0; i < engine_.vocab(); ++i) {
      if (!std::isfinite(logits[i])) throw DeviceError("a logit is not a finite number");
      std::uint32_t bits;
      std::memcpy(&bits, logits + i, 4);
      h = (h ^ bits) * 0x100000001B3ull;
    }
    return h | 1u;
  }

  // One step; the bits of its outputs land in `bits`.
  void step(std::span<const LaneRows> rows, std::vector<Bits*> bits) {
    if (options_.poll) options_.poll();
    for (const LaneRows& r : rows) {
      check(engine_.reserve(r.lane, static_cast<std::int32_t>(r.tokens.size())),
            "the gate's session has too few pages");
    }
    for (const StepOutput& out : engine_.step(rows, true)) {
      for (std::size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].lane != out.lane) continue;
        Bits& to = *bits[i];
        to.resize(std::max(to.size(), static_cast<std::size_t>(out.pos) + 1));
        to[static_cast<std::size_t>(out.pos)] = hash(out.logits);
      }
    }
  }

  // Continues a lane with ids [its length, end) in steps of `chunk` rows, the last logits of each.
  void feed(std::int32_t lane, std::span<const std::int32_t> ids, std::int32_t chunk, Bits& bits) {
    for (auto at = static_cast<std::size_t>(engine_.length(lane)); at < ids.size();) {
      const std::size_t n = std::min(static_cast<std::size_t>(chunk), ids.size() - at);
      const LaneRows rows{lane, ids.subspan(at, n), LaneRows::Logits::kLast, {}};
      step({&rows, 1}, {&bits});
      at += n;
    }
  }

  Bits cold(std::span<const std::int32_t> ids, std::int32_t chunk) {
    Bits bits;
    engine_.reset(0);
    feed(0, ids, chunk, bits);
    return bits;
  }

  void report(const char* gate, const std::string& name, std::int32_t rows, const Bits& got,
              const Bits& want) {
    GateResult r;
    r.gate = gate;
    r.name = name;
    r.rows = rows;
    std::size_t compared = 0;
    for (std::size_t p = 0; p < got.size() && r.detail.empty(); ++p) {
      if (got[p] == 0) continue;
      ++compared;
      if (p >= want.size() || got[p] != want[p]) {
        r.detail = "the logits at position " + std::to_string(p) + " differ";
      }
    }
    if (compared == 0) r.detail = "nothing was compared";
    r.passed = r.detail.empty();
    const auto now = Clock::now();
    r.seconds = std::chrono::duration<double>(now - before_).count();
    before_ = now;
    if (options_.on_result) options_.on_result(r);
    results_.push_back(std::move(r));
  }

  void runs() { report("runs", "the same sequence again", 1, cold(ids_, 1), want_); }

  void graphs() {
    if (engine_.counters().graphs == 0) return;
    engine_.use_graphs(false);
    try {
      for (const std::int32_t chunk : {1, 5, 64}) {
        const auto part = std::span(ids_).first(std::min<std::size_t>(ids_.size(), 150));
        report("graphs", "eager, " + std::to_string(chunk) + " rows a step", chunk,
               cold(part, chunk), want_);
      }
    } catch (...) {
      engine_.use_graphs(true);
      throw;
    }
    engine_.use_graphs(true);
  }

  void chunks() {
    for (const std::int32_t chunk : {7, 64, 512}) {
      if (chunk > engine_.options().chunk) continue;
      // The last tokens come one by one, from the state that the chunks left.
      const auto body = std::span(ids_).first(ids_.size() - 6);
      Bits bits = cold(body, chunk);
      feed(0, ids_, 1, bits);
      report("chunks", "chunks of " + std::to_string(chunk), chunk, bits, want_);
    }
  }

  void rows() {
    // Rows of one sequence.
    const auto part = std::span(ids_).first(std::min<std::size_t>(ids_.size(), 100));
    for (const std::int32_t n : kRowCounts) {
      if (n > most_rows_) break;
      Bits bits;
      engine_.reset(0);
      for (std::size_t at = 0; at < part.size();) {
        const std::size_t count = std::min(static_cast<std::size_t>(n), part.size() - at);
        const LaneRows rows{0, part.subspan(at, count), LaneRows::Logits::kAll, {}};
        step({&rows, 1}, {&bits});
        at += count;
      }
      report("rows", std::to_string(n) + " rows of one sequence", n, bits, want_);
    }
    // Rows of several.
    std::vector<Bits> alone;
    for (const Ids& ids : others_) alone.push_back(cold(ids, 1));
    for (const std::int32_t n : kRowCounts) {
      if (n > lanes_) break;
      reset();
      std::vector<Bits> bits(static_cast<std::size_t>(n));
      for (std::size_t at = 0; at < others_[0].size(); ++at) {
        std::vector<LaneRows> rows;
        std::vector<Bits*> to;
        for (std::int32_t l = 0; l < n; ++l) {
          const auto i = static_cast<std::size_t>(l);
          rows.push_back({l, std::span(others_[i]).subspan(at, 1), LaneRows::Logits::kLast, {}});
          to.push_back(&bits[i]);
        }
        step(rows, to);
      }
      for (std::size_t i = 0; i < bits.size(); ++i) {
        report("rows", std::to_string(n) + " sequences, number " + std::to_string(i), n, bits[i],
               alone[i]);
      }
    }
    reset();
  }

  void prefix() {
    if (engine_.free_snapshots() == 0) return;
    const std::size_t end = std::min<std::size_t>(ids_.size(), 200);
    const std::int32_t lane = lanes_ - 1;
    for (const std::size_t at : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{65},
                                 std::size_t{130}, std::size_t{131}}) {
      if (at + 1 >= end) continue;
      Bits ignored, bits;
      engine_.reset(0);
      feed(0, std::span(ids_).first(at), 64, ignored);
      Snapshot kept = engine_.snapshot(0);
      engine_.reset(0);
      const bool restored = engine_.restore(lane, kept);
      if (restored) feed(lane, std::span(ids_).first(end), 64, bits);
      engine_.reset(lane);
      engine_.release(kept);
      report("prefix", "prefix of " + std::to_string(at) + " reused", 64, bits, want_);
    }
  }

  void rewind() {
    const std::size_t start = 70;
    if (ids_.size() < start + 2 * kDecodeRows) return;
    for (const std::int32_t n : kRowCounts) {
      if (n < 2) continue;
      if (n > most_rows_) break;
      for (std::int32_t keep = 0; keep < n; ++keep) {
        // Of a whole window every count, of others one.
        if (n != kWindowRows && keep != n / 2) continue;
        Bits ignored, bits;
        engine_.reset(0);
        feed(0, std::span(ids_).first(start), 64, ignored);
        // The kept rows are the sequence's, the rest are drafts that turn out wrong.
        Ids rows(ids_.begin() + static_cast<std::ptrdiff_t>(start),
                 ids_.begin() + static_cast<std::ptrdiff_t>(start + static_cast<std::size_t>(n)));
        for (std::int32_t i = keep; i < n; ++i) {
          rows[static_cast<std::size_t>(i)] = junk_[static_cast<std::size_t>(i)];
        }
        const LaneRows drafted{0, rows, LaneRows::Logits::kAll, {}};
        step({&drafted, 1}, {&ignored});
        engine_.rewind(0, keep);
        feed(0, std::span(ids_).first(start + 2 * kDecodeRows), 1, bits);
        report("rewind", "keep " + std::to_string(keep) + " of " + std::to_string(n), n, bits,
               want_);
      }
    }
  }

  const GateOptions& options_;
  Engine& engine_;
  std::int32_t lanes_, most_rows_;
  Ids ids_;
  std::vector<Ids> others_;  // of lanes
  Ids junk_;
  Clock::time_point before_ = Clock::now();
  Bits want_;  // of ids_, one token a step
  std::vector<GateResult> results_;
};

}  // namespace

const std::vector<std::string>& engine_gates() {
  static const std::vector<std::string> names = {"runs", "graphs", "chunks",
                                                 "rows", "prefix", "rewind"};
  return names;
}

std::vector<GateResult> run_engine_gates(Session& session, const GateOptions& options) {
  return EngineGates(session, options).run();
}

}  // namespace flashnext::gate
