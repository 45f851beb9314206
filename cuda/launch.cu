// Dispatch from the op number to the launcher.
#include "cpp/base/errors.h"
#include "cuda/kernels.h"

#include <string>

namespace flashnext::cuda {

namespace {

template <class Args>
void call(void (*launcher)(cudaStream_t, const Args&), cudaStream_t stream, const void* args,
          std::size_t bytes) {
  if (bytes != sizeof(Args)) {
    throw LogicError(std::string("launch of ") + to_string(Args::kOp) + " with " +
                     std::to_string(bytes) + " bytes of arguments, expected " +
                     std::to_string(sizeof(Args)));
  }
  launcher(stream, *static_cast<const Args*>(args));
}

[[noreturn]] void throw_unknown(Op op) {
  throw LogicError("op " + std::to_string(static_cast<int>(op)) + " is not in the op table");
}

}  // namespace

void launch(cudaStream_t stream, Op op, const void* args, std::size_t args_bytes) {
  switch (op) {
    case Op::kEmbed:
      return call(embed, stream, args, args_bytes);
    case Op::kResidual:
      return call(residual, stream, args, args_bytes);
    case Op::kMix:
      return call(mix, stream, args, args_bytes);
    case Op::kExl3Linear:
      return call(exl3_linear, stream, args, args_bytes);
    case Op::kDense:
      return call(dense, stream, args, args_bytes);
    case Op::kGdnConv:
      return call(gdn_conv, stream, args, args_bytes);
    case Op::kGdnRecur:
      return call(gdn_recur, stream, args, args_bytes);
    case Op::kGdnGate:
      return call(gdn_gate, stream, args, args_bytes);
    case Op::kWindowPush:
      return call(window_push, stream, args, args_bytes);
    case Op::kAttnPrepare:
      return call(attn_prepare, stream, args, args_bytes);
    case Op::kIndexSelect:
      return call(index_select, stream, args, args_bytes);
    case Op::kAttention:
      return call(attention, stream, args, args_bytes);
    case Op::kRoute:
      return call(route, stream, args, args_bytes);
    case Op::kExperts:
      return call(experts, stream, args, args_bytes);
    case Op::kCombine:
      return call(combine, stream, args, args_bytes);
    case Op::kNgramHash:
      return call(ngram_hash, stream, args, args_bytes);
    case Op::kNgramGather:
      return call(ngram_gather, stream, args, args_bytes);
    case Op::kNgramDecode:
      return call(ngram_decode, stream, args, args_bytes);
    case Op::kPleGate:
      return call(ple_gate, stream, args, args_bytes);
    case Op::kPleConv:
      return call(ple_conv, stream, args, args_bytes);
    case Op::kMtpNorm:
      return call(mtp_norm, stream, args, args_bytes);
    case Op::kMtpJoin:
      return call(mtp_join, stream, args, args_bytes);
    case Op::kSample:
      return call(sample, stream, args, args_bytes);
    case Op::kResolve:
      return call(resolve, stream, args, args_bytes);
    case Op::kFetch:
      return call(fetch, stream, args, args_bytes);
    case Op::kCpuPost:
      return call(cpu_post, stream, args, args_bytes);
    case Op::kCpuJoin:
      return call(cpu_join, stream, args, args_bytes);
    case Op::kPace:
      return call(pace, stream, args, args_bytes);
    case Op::kCount:
      break;
  }
  throw_unknown(op);
}

std::size_t workspace_bytes(Op op, const void* args) {
  switch (op) {
    case Op::kMix:
      return workspace_bytes(*static_cast<const MixArgs*>(args));
    case Op::kExl3Linear:
      return workspace_bytes(*static_cast<const Exl3LinearArgs*>(args));
    case Op::kDense:
      return workspace_bytes(*static_cast<const DenseArgs*>(args));
    case Op::kGdnConv:
      return workspace_bytes(*static_cast<const GdnConvArgs*>(args));
    case Op::kIndexSelect:
      return workspace_bytes(*static_cast<const IndexSelectArgs*>(args));
    case Op::kAttention:
      return workspace_bytes(*static_cast<const AttentionArgs*>(args));
    case Op::kRoute:
      return workspace_bytes(*static_cast<const RouteArgs*>(args));
    case Op::kExperts:
      return workspace_bytes(*static_cast<const ExpertsArgs*>(args));
    case Op::kSample:
      return workspace_bytes(*static_cast<const SampleArgs*>(args));
    default:
      break;
  }
  if (op >= Op::kCount) throw_unknown(op);
  return 0;
}

}  // namespace flashnext::cuda
