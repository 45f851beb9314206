#include "cpp/device/device.h"

namespace flashnext {

const char* to_string(Space space) noexcept {
  switch (space) {
    case Space::kDevice:
      return "device";
    case Space::kPinned:
      return "pinned";
    case Space::kPageable:
      return "pageable";
  }
  return "unknown";
}

const char* to_string(Op op) noexcept {
  switch (op) {
    case Op::kEmbed:
      return "embed";
    case Op::kResidual:
      return "residual";
    case Op::kMix:
      return "mix";
    case Op::kExl3Linear:
      return "exl3_linear";
    case Op::kDense:
      return "dense";
    case Op::kGdnConv:
      return "gdn_conv";
    case Op::kGdnRecur:
      return "gdn_recur";
    case Op::kGdnGate:
      return "gdn_gate";
    case Op::kWindowPush:
      return "window_push";
    case Op::kAttnPrepare:
      return "attn_prepare";
    case Op::kIndexSelect:
      return "index_select";
    case Op::kAttention:
      return "attention";
    case Op::kRoute:
      return "route";
    case Op::kExperts:
      return "experts";
    case Op::kCombine:
      return "combine";
    case Op::kNgramHash:
      return "ngram_hash";
    case Op::kNgramGather:
      return "ngram_gather";
    case Op::kNgramDecode:
      return "ngram_decode";
    case Op::kPleGate:
      return "ple_gate";
    case Op::kPleConv:
      return "ple_conv";
    case Op::kMtpNorm:
      return "mtp_norm";
    case Op::kMtpJoin:
      return "mtp_join";
    case Op::kSample:
      return "sample";
    case Op::kResolve:
      return "resolve";
    case Op::kFetch:
      return "fetch";
    case Op::kCpuPost:
      return "cpu_post";
    case Op::kCpuJoin:
      return "cpu_join";
    case Op::kPace:
      return "pace";
    case Op::kCount:
      break;
  }
  return "unknown";
}

}  // namespace flashnext
