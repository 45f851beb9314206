// Internal: steps 1 to 4, 6 and 7 with AVX2, for the table in avx2_sums.cpp.
#pragma once

#include "cpp/exl3/exl3.h"

namespace flashnext::exl3::internal {

void avx2_prepare_row(const Exl3Weight& w, const float* x, std::int32_t levels, std::int32_t row,
                      const Prepared& p) noexcept;
void avx2_finish(const Exl3Weight& w, std::int32_t block, float q, std::int64_t total,
                 const std::int64_t* sums, float* y) noexcept;

}  // namespace flashnext::exl3::internal
