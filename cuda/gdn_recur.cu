// The delta rule, token by token, M in registers.
//
// A block owns 16 value columns of every value head of one key head (so q and k are staged once
// for the group) for one segment. A warp owns 4 columns over all 128 keys: lane bit 0 picks two of
// the columns, the other bits 8 keys. The sums over keys travel through the warp along lane bits
// 16, 8, 4, 2 in that order, whatever else shares the exchange: M^T k of a token at once, for the
// next token waits for it; M^T q, which nobody waits for, of eight tokens together. So a token is
// computed the same way whether it comes alone or in a prompt.
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/dependent.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/gdn.cuh"
#include "cuda/kernels.h"

#include <algorithm>

namespace flashnext::cuda {
namespace {

using gdn::kHead;

constexpr int kColumns = 16;                         // value columns of a block, a head
constexpr int kWarpsHead = 4;                        // warps a value head
constexpr int kSlices = kHead / kColumns;            // blocks a key head
constexpr int kStage = 16;                           // tokens of one staging buffer
constexpr int kBatch = 8;                            // tokens whose outputs travel together
constexpr int kTileHead = kHead * kColumns + kHead;  // floats of a head in the state's tile
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int kGroup>
struct Stage {
  float k[kStage][kHead];
  float q[kStage][kHead];
  float v[kStage][kGroup][kColumns];
  float2 gates[kStage][kGroup];  // decay, beta
};

// What one thread copies of a stage: always the same pieces of it, so the places are found once.
template <int kGroup>
struct Fetcher {
  __device__ __forceinline__ Fetcher(const GdnRecurArgs& a, int row0, int key_head, int slice) {
    const int tid = static_cast<int>(threadIdx.x);
    const int key_dims = a.dims.k_heads * kHead;
    channels = 2 * key_dims + a.dims.v_heads * kHead;
    v_heads = a.dims.v_heads;
    const float* rows = a.qkv + row0 * static_cast<std::int64_t>(channels);
    // 16-byte pieces of a token: 32 of q, 32 of k, 4 of v a head.
    qk_token = tid / 64;
    qk_piece = tid % 64;
    qk = rows + qk_token * channels + key_head * kHead + 4 * (qk_piece & 31) +
         (qk_piece < 32 ? 0 : key_dims);
    v_token = tid / (4 * kGroup);
    v_piece = tid % (4 * kGroup);
    v = rows + v_token * channels + 2 * key_dims + (key_head * kGroup + v_piece / 4) * kHead +
        slice * kColumns + 4 * (v_piece % 4);
    const int last = kThreads - 1 - tid;  // from the other end: other warps than v's
    gate_token = last / kGroup;
    gate_head = last % kGroup;
    gate = (static_cast<std::int64_t>(row0) + gate_token) * v_heads + key_head * kGroup + gate_head;
  }

  // Tokens [first, first + n) of the segment.
  __device__ __forceinline__ void run(Stage<kGroup>& to, const GdnRecurArgs& a, int first,
                                      int n) const {
    const std::int64_t ahead = first * static_cast<std::int64_t>(channels);
    float* qk_to = (qk_piece < 32 ? to.q[0] : to.k[0]) + 4 * (qk_piece & 31);
#pragma unroll
    for (int t = 0; t < kStage; t += kThreads / 64) {
      if (t + qk_token < n) {
        cp_async16(qk_to + (t + qk_token) * kHead, qk + ahead + t * channels);
      }
    }
    if (v_token < n) cp_async16(&to.v[v_token][v_piece / 4][4 * (v_piece % 4)], v + ahead);
    if (gate_token < n) {
      const std::int64_t at = gate + first * static_cast<std::int64_t>(v_heads);
      cp_async4(&to.gates[gate_token][gate_head].x, a.decay + at);
      cp_async4(&to.gates[gate_token][gate_head].y, a.beta + at);
    }
  }

  static constexpr int kThreads = kGroup * kWarpsHead * 32;
  static_assert(kThreads >= kStage * 4 * kGroup, "one piece of v a thread");
  const float* qk;
  const float* v;
  std::int64_t gate;
  int channels;
  int v_heads;
  int qk_token, qk_piece;
  int v_token, v_piece;
  int gate_token, gate_head;
};

__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from);
  const float4 b = *reinterpret_cast<const float4*>(from + 64);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Sums over this lane's keys, a column each in x and y, in one chain or two half as long.
template <int kChains>
__device__ __forceinline__ float2 dot8(const float2 (&m)[8], const float (&x)[8]) {
  float2 sum[kChains] = {};
#pragma unroll
  for (int i = 0; i < 8 / kChains; ++i) {
#pragma unroll
    for (int c = 0; c < kChains; ++c) {
      const int at = c * (8 / kChains) + i;
      sum[c].x = fmaf(m[at].x, x[at], sum[c].x);
      sum[c].y = fmaf(m[at].y, x[at], sum[c].y);
    }
  }
  if (kChains == 1) return sum[0];
  return {sum[0].x + sum[kChains - 1].x, sum[0].y + sum[kChains - 1].y};
}

// A lane's place in its block.
struct Place {
  int lane;
  int head;    // within the group
  int column;  // in the slice: the one of its two whose sums it keeps; the other is column ^ 1
  int key;     // its keys: key + 0..3 and 64 + key + 0..3
};

// kBatch tokens from `first` of the stage, of which `n` are real; o of all of them at the end.
template <int kGroup, bool kFull>
__device__ __forceinline__ void batch(const Stage<kGroup>& stage, int first, int n, const Place& at,
                                      float2 (&m)[8], float* out, std::int64_t out_stride) {
  const float* v = &stage.v[first][at.head][at.column];
  const float2* gates = &stage.gates[first][at.head];
  const float* keys = &stage.k[first][at.key];
  const float* queries = &stage.q[first][at.key];
  float2 o[kBatch];
#pragma unroll
  for (int t = 0; t < kBatch; ++t) {
    if (!kFull && t >= n) {
      o[t] = {0.0f, 0.0f};
      continue;
    }
    float k[8], q[8];
    load8(k, keys + t * kHead);
    load8(q, queries + t * kHead);
    const float value = v[t * kGroup * kColumns];
    const float2 gate = gates[t * kGroup];
    const float2 part = dot8<2>(m, k);
    float sum = part.x + __shfl_xor_sync(kAll, part.y, 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i].x = gate.x * m[i].x;
      m[i].y = gate.x * m[i].y;
    }
    sum += __shfl_xor_sync(kAll, sum, 8);
    sum += __shfl_xor_sync(kAll, sum, 4);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float own = gate.y * fmaf(-gate.x, sum, value);
    const float other = __shfl_xor_sync(kAll, own, 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i].x = fmaf(k[i], own, m[i].x);
      m[i].y = fmaf(k[i], other, m[i].y);
    }
    o[t] = dot8<1>(m, q);
  }
  // Each round halves what a lane holds: first the columns part, then the tokens, until lane bits
  // 8, 4, 2 are the token.
  float sums[kBatch];
#pragma unroll
  for (int t = 0; t < kBatch; ++t) sums[t] = o[t].x + __shfl_xor_sync(kAll, o[t].y, 16);
#pragma unroll
  for (int bit = 8; bit > 1; bit >>= 1) {
    const bool upper = (at.lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < bit / 2; ++i) {
      const float keep = upper ? sums[i + bit / 2] : sums[i];
      const float give = upper ? sums[i] : sums[i + bit / 2];
      sums[i] = keep + __shfl_xor_sync(kAll, give, bit);
    }
  }
  const int token = (at.lane >> 1) & 7;
  if (kFull || token < n) out[(first + token) * out_stride] = sums[0];
}

// The block's part of the state in shared memory, on its way in or out: rows of 64 bytes of device
// memory, moved 16 bytes a thread. Four keys apart lie four banks apart.
__device__ __forceinline__ int tile_at(int head, int key) {
  return head * kTileHead + key * kColumns + (key >> 2) * 4;
}

template <int kGroup>
__device__ __forceinline__ std::int64_t state_piece(int i, int key_head, int slice, int& at) {
  const int head = i / (kHead * kColumns / 4);
  const int key = i / (kColumns / 4) % kHead;
  const int column = 4 * (i % (kColumns / 4));
  at = tile_at(head, key) + column;
  return (static_cast<std::int64_t>(key_head * kGroup + head) * kHead + key) * kHead +
         slice * kColumns + column;
}

// kBlocks: of a multiprocessor. Two have fewer registers, and so each token takes longer; but while
// one waits for its state, the other computes.
template <int kGroup, int kBlocks>
__global__ void __launch_bounds__(kGroup* kWarpsHead * 32, kBlocks)
    recur_kernel(const GdnRecurArgs a) {
  extern __shared__ float4 shared_raw[];
  auto* stages = reinterpret_cast<Stage<kGroup>*>(shared_raw);
  const Segment segment = a.step.segments[blockIdx.z];  // read along with the head
  if (static_cast<int>(blockIdx.z) >= a.step.head->segments) return wait_for_previous();
  const int slice = static_cast<int>(blockIdx.x);
  const int key_head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const bool second = (lane & 16) != 0;
  const Place at{lane, warp / kWarpsHead,
                 (warp % kWarpsHead) * 4 + 2 * (lane & 1) + (second ? 1 : 0), 4 * (lane >> 1)};

  // The state's tile and the second buffer take turns.
  float* tile = reinterpret_cast<float*>(stages + 1);
  constexpr int kThreads = kGroup * kWarpsHead * 32;
  constexpr int kPieces = kGroup * kHead * kColumns / 4;
  if (segment.pos0 > 0) {
    const float* from = a.state + segment.state_in * a.dims.slot_stride;
#pragma unroll
    for (int i = 0; i < kPieces; i += kThreads) {
      int to;
      const std::int64_t piece =
          state_piece<kGroup>(i + static_cast<int>(threadIdx.x), key_head, slice, to);
      cp_async16(tile + to, from + piece);
    }
  }
  cp_async_commit();
  wait_for_previous();  // the state is older than the step's projections
  if (segment.rows <= kBatch) let_next_start();
  const Fetcher<kGroup> fetcher(a, segment.row0, key_head, slice);
  fetcher.run(stages[0], a, 0, min(kStage, segment.rows));
  cp_async_commit();
  float2 m[8];  // its keys; x of the column it keeps, y of the other
  float2* own = reinterpret_cast<float2*>(tile + tile_at(at.head, at.key) + (at.column & ~1));
  constexpr int kOwnStep = kColumns / 2;              // float2 to the next key
  constexpr int kOwnHalf = (64 * kColumns + 64) / 2;  // and to the one 64 on
  if (segment.pos0 > 0) {
    cp_async_wait<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = own[i % 4 * kOwnStep + i / 4 * kOwnHalf];
      m[i] = second ? float2{pair.y, pair.x} : pair;
    }
    __syncthreads();  // the second buffer may come
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) m[i] = float2{0.0f, 0.0f};
  }

  const std::int64_t out_stride = static_cast<std::int64_t>(a.dims.v_heads) * kHead;
  float* out = a.o + segment.row0 * out_stride + (key_head * kGroup + at.head) * kHead +
               slice * kColumns + at.column;
  for (int t0 = 0, buffer = 0; t0 < segment.rows; t0 += kStage, buffer ^= 1) {
    const Stage<kGroup>& stage = stages[buffer];
    const int n = min(kStage, segment.rows - t0);
    cp_async_wait<0>();
    __syncthreads();  // tokens are here, and all warps have left the other buffer
    if (t0 + kStage < segment.rows) {
      fetcher.run(stages[buffer ^ 1], a, t0 + kStage, min(kStage, segment.rows - t0 - kStage));
      cp_async_commit();
    }
    for (int first = 0; first < n; first += kBatch) {
      if (first + kBatch <= n) {
        batch<kGroup, true>(stage, first, kBatch, at, m, out, out_stride);
      } else {
        batch<kGroup, false>(stage, first, n - first, at, m, out, out_stride);
      }
    }
    out += kStage * out_stride;
  }

  __syncthreads();  // all warps are done with the buffers
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    own[i % 4 * kOwnStep + i / 4 * kOwnHalf] = second ? float2{m[i].y, m[i].x} : m[i];
  }
  __syncthreads();
  float* to = a.state + segment.state_out * a.dims.slot_stride;
#pragma unroll
  for (int i = 0; i < kPieces; i += kThreads) {
    int from;
    const std::int64_t piece =
        state_piece<kGroup>(i + static_cast<int>(threadIdx.x), key_head, slice, from);
    *reinterpret_cast<float4*>(to + piece) = *reinterpret_cast<const float4*>(tile + from);
  }
}

template <int kGroup, int kBlocks>
void run(cudaStream_t stream, const GdnRecurArgs& args) {
  constexpr int kStageBytes = static_cast<int>(sizeof(Stage<kGroup>));
  constexpr int kTileBytes = kGroup * kTileHead * static_cast<int>(sizeof(float));
  const int bytes = kStageBytes + std::max(kStageBytes, kTileBytes);
  FN_CUDA(cudaFuncSetAttribute(recur_kernel<kGroup, kBlocks>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(kSlices, static_cast<unsigned>(args.dims.k_heads),
                  static_cast<unsigned>(args.step.max_segments));
  launch_dependent(stream, grid, kGroup * kWarpsHead * 32, bytes, recur_kernel<kGroup, kBlocks>,
                   args);
}

// One block each while all fit at once. Of a prompt's step one segment has nearly all rows.
template <int kGroup>
void run(cudaStream_t stream, const GdnRecurArgs& args) {
  constexpr int kTwo = kGroup <= 3 ? 2 : 1;  // of more heads two do not fit
  const int segments = args.step.max_rows <= kDecodeRows ? args.step.max_segments : 1;
  const int blocks = kSlices * args.dims.k_heads * segments;
  if (blocks > multiprocessors()) return run<kGroup, kTwo>(stream, args);
  run<kGroup, 1>(stream, args);
}

}  // namespace

void gdn_recur(cudaStream_t stream, const GdnRecurArgs& args) {
  gdn::check_dims(args.dims);
  switch (args.dims.v_heads / args.dims.k_heads) {
    case 1:
      return run<1>(stream, args);
    case 2:
      return run<2>(stream, args);
    case 3:
      return run<3>(stream, args);
    case 4:
      return run<4>(stream, args);
    default:
      throw LogicError("gdn_recur: the CUDA kernel takes 1 to 4 value heads a key head");
  }
}

}  // namespace flashnext::cuda
