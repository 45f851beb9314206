// What lies between the linears of an expert: silu(gate) * up (spec/numerics.md 2). Every Isa gives
// the same bits.
#pragma once

#include "cpp/exl3/exl3.h"

#include <cstdint>

namespace flashnext::exl3 {

// gate (n) <- silu(gate) * up.
void silu_times(Isa isa, float* gate, const float* up, std::int32_t n) noexcept;

}  // namespace flashnext::exl3
