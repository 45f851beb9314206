// The gates of the ops: every planned case on the oracle and on the other device.
#include "cpp/gate/gate.h"
#include "cpp/gate/plan.h"

#include <chrono>

namespace flashnext::gate {

namespace {

// Beyond the comparison with the oracle: the device against itself. Empty when the bits are equal.
std::string against_itself(Device& device, const Case& c, const Results& whole) {
  const auto same = [&](const RunOptions& options, const char* what) -> std::string {
    const std::string found = differs(c, run(device, c, options), whole, options.first);
    return found.empty() ? found : found + ", " + what;
  };
  std::string found = same({.graph = true}, "graph against eager");
  if (!found.empty() || !c.by_row()) return found;
  const std::int32_t last = c.rows - 1;
  found = same({.first = last, .count = 1}, "the last row alone");
  if (found.empty() && c.rows >= 3) {
    found = same({.first = 1, .count = 2}, "two rows alone");
    if (found.empty()) {
      found = same({.count = 3, .max_rows = 2 * c.rows + 9}, "three rows in a larger bucket");
    }
  }
  return found;
}

}  // namespace

const std::vector<std::string>& op_gates() {
  static const std::vector<std::string> names = {"integer", "choice", "functions", "ops"};
  return names;
}

std::vector<GateResult> run_op_gates(Device& host, Device& other, const GateOptions& options) {
  std::vector<GateResult> results;
  for (const Planned& planned : op_plan()) {
    if (!options.gate.empty() && planned.gate != options.gate) continue;
    if (options.poll) options.poll();
    const auto start = std::chrono::steady_clock::now();
    const Case c = planned.make();
    GateResult r;
    r.gate = planned.gate;
    r.op = to_string(c.op);
    r.name = c.name;
    r.rows = c.rows;
    bool broken = false;
    try {
      const Results want = run(host, c);
      const Results got = run(other, c);
      const Comparison comparison = compare(c, got, want);
      r.max_error = comparison.max_error;
      r.tolerance = comparison.tolerance;
      r.detail = comparison.passed ? against_itself(other, c, got) : comparison.detail;
      r.passed = r.detail.empty();
    } catch (const Error& e) {
      r.detail = e.what();
      broken = true;
    }
    r.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options.on_result) options.on_result(r);
    results.push_back(std::move(r));
    if (broken) break;
  }
  return results;
}

}  // namespace flashnext::gate
