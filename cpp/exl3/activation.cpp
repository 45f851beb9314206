#include "cpp/exl3/activation.h"

#include "cpp/base/math.h"

namespace flashnext::exl3 {

namespace {

inline void plain(float* gate, const float* up, std::int32_t n) noexcept {
  for (std::int32_t i = 0; i < n; ++i) gate[i] = math::silu(gate[i]) * up[i];
}

#if defined(__x86_64__)
// The same operations with the fma instruction in place of the library's fma.
__attribute__((target("avx2,fma"))) void with_avx2(float* __restrict gate,
                                                   const float* __restrict up,
                                                   std::int32_t n) noexcept {
  for (std::int32_t i = 0; i < n; ++i) gate[i] = math::silu(gate[i]) * up[i];
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void
with_avx512(float* __restrict gate, const float* __restrict up, std::int32_t n) noexcept {
  for (std::int32_t i = 0; i < n; ++i) gate[i] = math::silu(gate[i]) * up[i];
}
#endif

}  // namespace

void silu_times(Isa isa, float* gate, const float* up, std::int32_t n) noexcept {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return with_avx512(gate, up, n);
  if (isa == Isa::kAvx2) return with_avx2(gate, up, n);
#endif
  static_cast<void>(isa);
  plain(gate, up, n);
}

}  // namespace flashnext::exl3
