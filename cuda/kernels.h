// The kernels: one launcher an op of cpp/device/ops.h, free functions on plain arguments. A
// launcher enqueues work on the stream and returns: no allocation, no synchronisation, nothing that
// a capture would refuse. It throws LogicError on arguments that its kernels cannot take, and
// DeviceError when a CUDA call of its own fails; launch errors are picked up by the caller.
#pragma once

#include "cpp/device/ops.h"

#include <cuda_runtime_api.h>

namespace flashnext::cuda {

// stream_mix.cu
void embed(cudaStream_t stream, const EmbedArgs& args);
void residual(cudaStream_t stream, const ResidualArgs& args);
void mix(cudaStream_t stream, const MixArgs& args);
// exl3_*.cu
void exl3_linear(cudaStream_t stream, const Exl3LinearArgs& args);
void experts(cudaStream_t stream, const ExpertsArgs& args);
// dense.cu
void dense(cudaStream_t stream, const DenseArgs& args);
// gdn*.cu
void gdn_conv(cudaStream_t stream, const GdnConvArgs& args);
void gdn_recur(cudaStream_t stream, const GdnRecurArgs& args);
void gdn_gate(cudaStream_t stream, const GdnGateArgs& args);
// window.cu
void window_push(cudaStream_t stream, const WindowPushArgs& args);
// attention*.cu
void attn_prepare(cudaStream_t stream, const AttnPrepareArgs& args);
void index_select(cudaStream_t stream, const IndexSelectArgs& args);
void attention(cudaStream_t stream, const AttentionArgs& args);
// moe_route*.cu
void route(cudaStream_t stream, const RouteArgs& args);
void combine(cudaStream_t stream, const CombineArgs& args);
// ngram.cu
void ngram_hash(cudaStream_t stream, const NgramHashArgs& args);
void ngram_gather(cudaStream_t stream, const NgramGatherArgs& args);
void ngram_decode(cudaStream_t stream, const NgramDecodeArgs& args);
// ple.cu
void ple_gate(cudaStream_t stream, const PleGateArgs& args);
void ple_conv(cudaStream_t stream, const PleConvArgs& args);
// mtp.cu
void mtp_norm(cudaStream_t stream, const MtpNormArgs& args);
void mtp_join(cudaStream_t stream, const MtpJoinArgs& args);
// sample.cu
void sample(cudaStream_t stream, const SampleArgs& args);
// offload_*.cu
void resolve(cudaStream_t stream, const ResolveArgs& args);
void fetch(cudaStream_t stream, const FetchArgs& args);
void cpu_post(cudaStream_t stream, const CpuPostArgs& args);
void cpu_join(cudaStream_t stream, const CpuJoinArgs& args);
void pace(cudaStream_t stream, const PaceArgs& args);

// Scratch in device memory for the maximum of rows, defined beside each launcher.
std::size_t workspace_bytes(const MixArgs& args);
std::size_t workspace_bytes(const Exl3LinearArgs& args);
std::size_t workspace_bytes(const DenseArgs& args);
std::size_t workspace_bytes(const GdnConvArgs& args);
std::size_t workspace_bytes(const IndexSelectArgs& args);
std::size_t workspace_bytes(const AttentionArgs& args);
std::size_t workspace_bytes(const RouteArgs& args);
std::size_t workspace_bytes(const ExpertsArgs& args);
std::size_t workspace_bytes(const SampleArgs& args);

// launch.cu: by op number. LogicError for an op outside the table or an argument struct of another
// size.
void launch(cudaStream_t stream, Op op, const void* args, std::size_t args_bytes);
std::size_t workspace_bytes(Op op, const void* args);

}  // namespace flashnext::cuda
