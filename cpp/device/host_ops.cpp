#include "cpp/device/host_ops.h"

#include "cpp/base/errors.h"

namespace flashnext::host {

namespace {
template <class Args>
const Args& as(const void* args) {
  return *static_cast<const Args*>(args);
}
}  // namespace

void run(Op op, const void* args, Context& context) {
  switch (op) {
    case Op::kEmbed:
      return embed(as<EmbedArgs>(args), context);
    case Op::kResidual:
      return residual(as<ResidualArgs>(args), context);
    case Op::kMix:
      return mix(as<MixArgs>(args), context);
    case Op::kExl3Linear:
      return exl3_linear(as<Exl3LinearArgs>(args), context);
    case Op::kDense:
      return dense(as<DenseArgs>(args), context);
    case Op::kGdnConv:
      return gdn_conv(as<GdnConvArgs>(args), context);
    case Op::kGdnRecur:
      return gdn_recur(as<GdnRecurArgs>(args), context);
    case Op::kGdnGate:
      return gdn_gate(as<GdnGateArgs>(args), context);
    case Op::kWindowPush:
      return window_push(as<WindowPushArgs>(args), context);
    case Op::kAttnPrepare:
      return attn_prepare(as<AttnPrepareArgs>(args), context);
    case Op::kIndexSelect:
      return index_select(as<IndexSelectArgs>(args), context);
    case Op::kAttention:
      return attention(as<AttentionArgs>(args), context);
    case Op::kRoute:
      return route(as<RouteArgs>(args), context);
    case Op::kExperts:
      return experts(as<ExpertsArgs>(args), context);
    case Op::kCombine:
      return combine(as<CombineArgs>(args), context);
    case Op::kNgramHash:
      return ngram_hash(as<NgramHashArgs>(args), context);
    case Op::kNgramGather:
      return ngram_gather(as<NgramGatherArgs>(args), context);
    case Op::kNgramDecode:
      return ngram_decode(as<NgramDecodeArgs>(args), context);
    case Op::kPleGate:
      return ple_gate(as<PleGateArgs>(args), context);
    case Op::kPleConv:
      return ple_conv(as<PleConvArgs>(args), context);
    case Op::kMtpNorm:
      return mtp_norm(as<MtpNormArgs>(args), context);
    case Op::kMtpJoin:
      return mtp_join(as<MtpJoinArgs>(args), context);
    case Op::kSample:
      return sample(as<SampleArgs>(args), context);
    case Op::kResolve:
      return resolve(as<ResolveArgs>(args), context);
    case Op::kFetch:
      return fetch(as<FetchArgs>(args), context);
    case Op::kCpuPost:
      return cpu_post(as<CpuPostArgs>(args), context);
    case Op::kCpuJoin:
      return cpu_join(as<CpuJoinArgs>(args), context);
    case Op::kPace:
      return pace(as<PaceArgs>(args), context);
    case Op::kCount:
      break;
  }
  throw LogicError("host device: op " + std::to_string(static_cast<int>(op)) +
                   " is not in the op table");
}

std::size_t workspace_bytes(Op op, const void* args, int threads) {
  switch (op) {
    case Op::kMix:
      return workspace_bytes(as<MixArgs>(args), threads);
    case Op::kExl3Linear:
      return workspace_bytes(as<Exl3LinearArgs>(args), threads);
    case Op::kDense:
      return workspace_bytes(as<DenseArgs>(args), threads);
    case Op::kGdnConv:
      return workspace_bytes(as<GdnConvArgs>(args), threads);
    case Op::kIndexSelect:
      return workspace_bytes(as<IndexSelectArgs>(args), threads);
    case Op::kAttention:
      return workspace_bytes(as<AttentionArgs>(args), threads);
    case Op::kRoute:
      return workspace_bytes(as<RouteArgs>(args), threads);
    case Op::kExperts:
      return workspace_bytes(as<ExpertsArgs>(args), threads);
    case Op::kSample:
      return workspace_bytes(as<SampleArgs>(args), threads);
    default:
      return 0;
  }
}

}  // namespace flashnext::host
