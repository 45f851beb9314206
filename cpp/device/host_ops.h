// The host implementations of the op table: one free function an op, the oracle of the CUDA kernel
// of that name.
#pragma once

#include "cpp/base/thread_pool.h"
#include "cpp/device/ops.h"
#include "cpp/exl3/exl3.h"

namespace flashnext::host {

struct Context {
  ThreadPool& pool;
  exl3::Isa isa;
};

void embed(const EmbedArgs& args, Context& context);
void residual(const ResidualArgs& args, Context& context);
void mix(const MixArgs& args, Context& context);
void exl3_linear(const Exl3LinearArgs& args, Context& context);
void dense(const DenseArgs& args, Context& context);
void gdn_conv(const GdnConvArgs& args, Context& context);
void gdn_recur(const GdnRecurArgs& args, Context& context);
void gdn_gate(const GdnGateArgs& args, Context& context);
void window_push(const WindowPushArgs& args, Context& context);
void attn_prepare(const AttnPrepareArgs& args, Context& context);
void index_select(const IndexSelectArgs& args, Context& context);
void attention(const AttentionArgs& args, Context& context);
void route(const RouteArgs& args, Context& context);
void experts(const ExpertsArgs& args, Context& context);
void combine(const CombineArgs& args, Context& context);
void ngram_hash(const NgramHashArgs& args, Context& context);
void ngram_gather(const NgramGatherArgs& args, Context& context);
void ngram_decode(const NgramDecodeArgs& args, Context& context);
void ple_gate(const PleGateArgs& args, Context& context);
void ple_conv(const PleConvArgs& args, Context& context);
void mtp_norm(const MtpNormArgs& args, Context& context);
void mtp_join(const MtpJoinArgs& args, Context& context);
void sample(const SampleArgs& args, Context& context);
void resolve(const ResolveArgs& args, Context& context);
void fetch(const FetchArgs& args, Context& context);
void cpu_post(const CpuPostArgs& args, Context& context);
void cpu_join(const CpuJoinArgs& args, Context& context);
void pace(const PaceArgs& args, Context& context);

// Scratch of the ops that ask for some; 0 for the others.
std::size_t workspace_bytes(const MixArgs& args, int threads);
std::size_t workspace_bytes(const Exl3LinearArgs& args, int threads);
std::size_t workspace_bytes(const DenseArgs& args, int threads);
std::size_t workspace_bytes(const GdnConvArgs& args, int threads);
std::size_t workspace_bytes(const IndexSelectArgs& args, int threads);
std::size_t workspace_bytes(const AttentionArgs& args, int threads);
std::size_t workspace_bytes(const RouteArgs& args, int threads);
std::size_t workspace_bytes(const ExpertsArgs& args, int threads);
std::size_t workspace_bytes(const SampleArgs& args, int threads);

// Runs `op` on `args`; throws LogicError for an op outside the table.
void run(Op op, const void* args, Context& context);
std::size_t workspace_bytes(Op op, const void* args, int threads);

// Rows that an op processes now.
inline std::int32_t rows_of(const RowCount& count) { return count.scale * *count.count; }

}  // namespace flashnext::host
