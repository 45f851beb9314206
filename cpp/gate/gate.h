// THE GATE: what a device must pass before it may run a model. run_op_gates() holds every op of the
// op table against the host device, run_engine_gates() holds the promise on a whole session. The
// caller brings the devices; nothing here knows which they are. One result a case.
#pragma once

#include "cpp/device/device.h"
#include "cpp/session/session.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flashnext::gate {

struct GateResult {
  std::string gate;
  std::string op;    // of the op table; empty for gates of the engine
  std::string name;  // the case
  std::int32_t rows = 0;
  bool passed = false;
  double max_error = 0;  // normwise and relative, of the outputs that have a tolerance
  double tolerance = 0;  // 0: the same bits
  std::string detail;    // what failed
  double seconds = 0;    // since the result before
};

struct GateOptions {
  std::string gate = {};  // run this one alone; empty: all
  std::function<void(const GateResult&)> on_result = {};
  std::function<void()> poll = {};  // between cases; may throw
};

// "integer", "choice", "functions": bit for bit; "ops": the rest, bits or the tolerance of the
// case.
const std::vector<std::string>& op_gates();
// "runs", "graphs", "chunks", "rows", "prefix", "rewind": all by ==.
const std::vector<std::string>& engine_gates();

// `host` is the oracle. Every case runs whole on both, and on `other` also from a graph and, where
// its outputs allow it, row by row and in a larger bucket. A device that fails ends the gate.
std::vector<GateResult> run_op_gates(Device& host, Device& other, const GateOptions& options = {});

// On a session that nothing has used: the more lanes (up to 32), snapshots and chunk (512), the
// more is run; `name` of a result says what was. Every lane is empty afterwards.
std::vector<GateResult> run_engine_gates(Session& session, const GateOptions& options = {});

}  // namespace flashnext::gate
