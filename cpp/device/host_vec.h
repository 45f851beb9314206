// Vector helpers of the host kernels. A kernel file X.inc is compiled three times, for 4, 8 and 16
// lanes, by a .cpp that includes it between host_vec_begin_N.inc and host_vec_end.inc; pick() takes
// the version the context asks for. All versions give the same bits: per element the operations and
// their order are the same, and sums over elements run in 16 fixed partials (host_vec_lanes.inc).
#pragma once

#include "cpp/base/half.h"
#include "cpp/base/math.h"
#include "cpp/exl3/exl3.h"

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flashnext::host {

// The version for `isa`, as far as the processor has what that version needs.
template <class Fn>
Fn* pick(exl3::Isa isa, Fn* lanes4, Fn* lanes8, Fn* lanes16) noexcept {
#if defined(__x86_64__)
  // F16C is older than AVX2, and every processor with AVX2 has it.
  const bool avx2 =
      isa != exl3::Isa::kScalar && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && isa == exl3::Isa::kAvx512 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512) return lanes16;
  if (avx2) return lanes8;
#else
  (void)isa, (void)lanes8, (void)lanes16;
#endif
  return lanes4;
}

}  // namespace flashnext::host
