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
#include "cuda/gdn.cuh"
#include "cuda/kernels.h"

// Cards with fewer multiprocessors than there are blocks want two on each: fewer registers then.
#ifndef FN_RECUR_BLOCKS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define FN_RECUR_BLOCKS (kGroup <= 3 ? 2 : 1)
#else
#define FN_RECUR_BLOCKS 1
#endif
#endif

namespace flashnext::cuda {
namespace {

using gdn::kHead;

constexpr int kColumns = 16;               // value columns of a block, a head
constexpr int kWarpsHead = 4;              // warps a value head
constexpr int kSlices = kHead / kColumns;  // blocks a key head
constexpr int kStage = 16;                 // tokens of one staging buffer
constexpr int kBatch = 8;                  // tokens whose outputs travel together
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int kGroup>
struct Stage {
  float k[kStage][kHead];
  float q[kStage][kHead];
  float v[kStage][kGroup][kColumns];
  float2 gates[kStage][kGroup];  // decay, beta
};

template <int kGroup>
__device__ __forceinline__ void fetch(Stage<kGroup>& to, const GdnRecurArgs& a, int row, int n,
                                      int key_head, int slice) {
  constexpr int kThreads = kGroup * kWarpsHead * 32;
  const int tid = static_cast<int>(threadIdx.x);
  const int key_dims = a.dims.k_heads * kHead;
  const std::int64_t channels = 2 * key_dims + a.dims.v_heads * kHead;
  const float* rows = a.qkv + row * channels;
  for (int i = tid; i < n * 64; i += kThreads) {  // 16-byte pieces: 32 of q, 32 of k a token
    const int t = i >> 6;
    const int part = i & 63;
    const float* from = rows + t * channels + key_head * kHead + 4 * (part & 31);
    if (part < 32) {
      cp_async16(&to.q[t][4 * (part & 31)], from);
    } else {
      cp_async16(&to.k[t][4 * (part & 31)], from + key_dims);
    }
  }
  constexpr int kPieces = kGroup * kColumns / 4;
  for (int i = tid; i < n * kPieces; i += kThreads) {
    const int t = i / kPieces;
    const int j = (i % kPieces) / (kColumns / 4);
    const int c = 4 * (i % (kColumns / 4));
    cp_async16(&to.v[t][j][c], rows + t * channels + 2 * key_dims +
                                   (key_head * kGroup + j) * kHead + slice * kColumns + c);
  }
  for (int i = tid; i < n * kGroup; i += kThreads) {
    const int t = i / kGroup;
    const int j = i % kGroup;
    const std::int64_t at =
        static_cast<std::int64_t>(row + t) * a.dims.v_heads + key_head * kGroup + j;
    cp_async4(&to.gates[t][j].x, a.decay + at);
    cp_async4(&to.gates[t][j].y, a.beta + at);
  }
}

__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from);
  const float4 b = *reinterpret_cast<const float4*>(from + 64);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ __forceinline__ float2 dot8(const float2 (&m)[8], const float (&x)[8]) {
  float2 sum{0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum.x = fmaf(m[i].x, x[i], sum.x);
    sum.y = fmaf(m[i].y, x[i], sum.y);
  }
  return sum;
}

// A lane's place in its block.
struct Place {
  int lane;
  int head;    // within the group
  int column;  // first of its two, in the slice
  int key;     // its keys: key + 0..3 and 64 + key + 0..3
};

// kBatch tokens from `first` of the stage, of which `n` are real; o of all of them at the end.
template <int kGroup, bool kFull>
__device__ __forceinline__ void batch(const Stage<kGroup>& stage, int first, int n, const Place& at,
                                      float2 (&m)[8], float* out, std::int64_t out_stride) {
  const bool second = (at.lane & 16) != 0;  // this lane sums M^T k of its second column
  const float* v = &stage.v[first][at.head][at.column + (second ? 1 : 0)];
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
    const float2 part = dot8(m, k);
    float sum = second ? part.y : part.x;
    sum += __shfl_xor_sync(kAll, second ? part.x : part.y, 16);
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
    const float2 delta{second ? other : own, second ? own : other};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i].x = fmaf(k[i], delta.x, m[i].x);
      m[i].y = fmaf(k[i], delta.y, m[i].y);
    }
    o[t] = dot8(m, q);
  }
  // Sixteen sums over sixteen lanes: each round halves what a lane holds, and lane bits 16, 8, 4
  // end up as the token, bit 2 as the column.
  float sums[kBatch];
#pragma unroll
  for (int t = 0; t < kBatch / 2; ++t) {
    const float2 keep = second ? o[t + 4] : o[t];
    const float2 give = second ? o[t] : o[t + 4];
    sums[2 * t] = keep.x + __shfl_xor_sync(kAll, give.x, 16);
    sums[2 * t + 1] = keep.y + __shfl_xor_sync(kAll, give.y, 16);
  }
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
  const int token = at.lane >> 2;
  if (kFull || token < n) out[(first + token) * out_stride + ((at.lane >> 1) & 1)] = sums[0];
}

template <int kGroup>
__global__ void __launch_bounds__(kGroup* kWarpsHead * 32, FN_RECUR_BLOCKS)
    recur_kernel(const GdnRecurArgs a) {
  extern __shared__ float4 shared_raw[];
  auto* stages = reinterpret_cast<Stage<kGroup>*>(shared_raw);
  const Segment segment = a.step.segments[blockIdx.z];  // read along with the head
  if (static_cast<int>(blockIdx.z) >= a.step.head->segments) return wait_for_previous();
  const int slice = static_cast<int>(blockIdx.x);
  const int key_head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const Place at{lane, warp / kWarpsHead, (warp % kWarpsHead) * 4 + 2 * (lane & 1),
                 4 * (lane >> 1)};

  const std::int64_t place =
      (static_cast<std::int64_t>(key_head * kGroup + at.head) * kHead + at.key) * kHead +
      slice * kColumns + at.column;
  float2 m[8];
  if (segment.pos0 > 0) {
    const float* from = a.state + segment.state_in * a.dims.slot_stride + place;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      m[i] = *reinterpret_cast<const float2*>(from + (i % 4 + 64 * (i / 4)) * kHead);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) m[i] = float2{0.0f, 0.0f};
  }
  wait_for_previous();  // the state is older than the step's projections
  if (segment.rows <= kBatch) let_next_start();
  fetch(stages[0], a, segment.row0, min(kStage, segment.rows), key_head, slice);
  cp_async_commit();

  const std::int64_t out_stride = static_cast<std::int64_t>(a.dims.v_heads) * kHead;
  float* out = a.o + segment.row0 * out_stride + (key_head * kGroup + at.head) * kHead +
               slice * kColumns + at.column;
  for (int t0 = 0, buffer = 0; t0 < segment.rows; t0 += kStage, buffer ^= 1) {
    const Stage<kGroup>& stage = stages[buffer];
    const int n = min(kStage, segment.rows - t0);
    cp_async_wait<0>();
    __syncthreads();  // tokens are here, and all warps have left the other buffer
    if (t0 + kStage < segment.rows) {
      fetch(stages[buffer ^ 1], a, segment.row0 + t0 + kStage,
            min(kStage, segment.rows - t0 - kStage), key_head, slice);
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

  float* to = a.state + segment.state_out * a.dims.slot_stride + place;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    *reinterpret_cast<float2*>(to + (i % 4 + 64 * (i / 4)) * kHead) = m[i];
  }
}

template <int kGroup>
void run(cudaStream_t stream, const GdnRecurArgs& args) {
  const int bytes = 2 * static_cast<int>(sizeof(Stage<kGroup>));
  FN_CUDA(cudaFuncSetAttribute(recur_kernel<kGroup>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               bytes));
  const dim3 grid(kSlices, static_cast<unsigned>(args.dims.k_heads),
                  static_cast<unsigned>(args.step.max_segments));
  launch_dependent(stream, grid, kGroup * kWarpsHead * 32, bytes, recur_kernel<kGroup>, args);
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
