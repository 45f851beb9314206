// What an op of a step cannot do without: bytes that must move at least once and products that must
// be formed, from its arguments and the step's real sizes. Divided by measured rates this is the
// bound that measurements are held against. Weights are counted once a step, however many rows
// share them.
#pragma once

#include "cpp/device/ops.h"

#include <cstdint>
#include <span>
#include <string>

namespace flashnext {

struct OpCost {
  std::uint64_t weight_bytes = 0;
  std::uint64_t other_bytes = 0;  // activations, state, cache, tables
  std::uint64_t exl3_macs = 0;    // 15-bit activation times 10-bit weight
  std::uint64_t half_macs = 0;    // products of fp16 weights, and of attention

  std::uint64_t bytes() const noexcept { return weight_bytes + other_bytes; }
  OpCost& operator+=(const OpCost& other) noexcept;
};

struct StepSizes {
  const StepHead* head;  // the device address that row counts of ops point into
  std::int32_t rows, outputs;
  std::span<const Segment> segments;
  std::int32_t experts;  // distinct experts that a routed expert op reads
};

OpCost op_cost(Op op, const void* args, const StepSizes& sizes);

// The name under which an op is reported: the op's, with the head's product told apart from the
// other products.
std::string op_family(Op op, const void* args, std::int32_t vocab);

}  // namespace flashnext
