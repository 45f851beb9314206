// Bytes of the argument struct of every op, so that a device can check and copy a launch.
#pragma once

#include "cpp/device/ops.h"

#include <array>
#include <type_traits>

namespace flashnext {

namespace detail {
template <class Args>
constexpr void put_size(std::array<std::size_t, kNumOps>& sizes) {
  static_assert(std::is_trivially_copyable_v<Args>, "op arguments are copied as bytes");
  sizes[static_cast<std::size_t>(Args::kOp)] = sizeof(Args);
}

template <class... Args>
constexpr std::array<std::size_t, kNumOps> make_sizes() {
  static_assert(sizeof...(Args) == kNumOps, "one struct an op");
  std::array<std::size_t, kNumOps> sizes{};
  (put_size<Args>(sizes), ...);
  return sizes;
}
}  // namespace detail

inline constexpr std::array<std::size_t, kNumOps> kArgsBytes =
    detail::make_sizes<EmbedArgs, ResidualArgs, MixArgs, Exl3LinearArgs, DenseArgs, GdnConvArgs,
                       GdnRecurArgs, GdnGateArgs, WindowPushArgs, AttnPrepareArgs, IndexSelectArgs,
                       AttentionArgs, RouteArgs, ExpertsArgs, CombineArgs, NgramHashArgs,
                       NgramGatherArgs, NgramDecodeArgs, PleGateArgs, PleConvArgs, MtpNormArgs,
                       MtpJoinArgs, SampleArgs, ResolveArgs, FetchArgs, CpuPostArgs, CpuJoinArgs,
                       PaceArgs>();

// 0 for an op outside the table.
constexpr std::size_t args_bytes_of(Op op) noexcept {
  const auto i = static_cast<std::size_t>(op);
  return i < kArgsBytes.size() ? kArgsBytes[i] : 0;
}

}  // namespace flashnext
