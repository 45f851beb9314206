// The delta rule, token by token, M in registers.
//
// A block owns 16 value columns of every value head of one key head (so q and k are staged once
// for the group) for one segment. A warp owns 4 columns over all 128 keys: lane bit 0 picks two of
// the columns, the other bits 8 keys. Both dots of a token are taken on the state before the
// update, o = decay M^T q + delta (k.q), so that one exchange of the warp serves both; its tree is
// fixed, and a token is computed the same way whether it comes alone or in a prompt.
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/gdn.cuh"
#include "cuda/kernels.h"

namespace flashnext::cuda {
namespace {

using gdn::kHead;

constexpr int kColumns = 16;               // value columns of a block, a head
constexpr int kWarpsHead = 4;              // warps a value head
constexpr int kSlices = kHead / kColumns;  // blocks a key head
constexpr int kStage = 16;                 // tokens of one staging buffer
constexpr unsigned kAll = 0xFFFFFFFFu;

template <int kGroup>
struct Stage {
  float k[kStage + 1][kHead];  // one token of slack: the loop reads one ahead
  float q[kStage + 1][kHead];
  float v[kStage + 1][kGroup][kColumns];
  float4 scalars[kStage + 1][kGroup];  // decay, beta, k.q
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
    cp_async4(&to.scalars[t][j].x, a.decay + at);
    cp_async4(&to.scalars[t][j].y, a.beta + at);
  }
}

// k.q of every staged token, one warp a token.
template <int kGroup>
__device__ __forceinline__ void dot_keys(Stage<kGroup>& s, int n, int warp, int lane) {
  for (int t = warp; t < n; t += kGroup * kWarpsHead) {
    const float4 k = *reinterpret_cast<const float4*>(&s.k[t][4 * lane]);
    const float4 q = *reinterpret_cast<const float4*>(&s.q[t][4 * lane]);
    const float dot = gdn::warp_sum(fmaf(k.w, q.w, fmaf(k.z, q.z, fmaf(k.y, q.y, k.x * q.x))));
    if (lane < kGroup) s.scalars[t][lane].z = dot;
  }
}

struct Token {
  float k[8];
  float q[8];
  float2 v;
  float4 scalars;
};

__device__ __forceinline__ void load8(float (&to)[8], const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from);
  const float4 b = *reinterpret_cast<const float4*>(from + 64);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

template <int kGroup>
__global__ void __launch_bounds__(kGroup* kWarpsHead * 32) recur_kernel(const GdnRecurArgs a) {
  extern __shared__ float4 shared_raw[];
  auto* stages = reinterpret_cast<Stage<kGroup>*>(shared_raw);
  if (static_cast<int>(blockIdx.z) >= a.step.head->segments) return;
  const Segment segment = a.step.segments[blockIdx.z];
  const int slice = static_cast<int>(blockIdx.x);
  const int key_head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int head = warp / kWarpsHead;                           // within the group
  const int column = (warp % kWarpsHead) * 4 + 2 * (lane & 1);  // of this lane's two, in the slice
  const int key = 4 * (lane >> 1);  // this lane's keys: key + 0..3 and 64 + key + 0..3

  fetch(stages[0], a, segment.row0, min(kStage, segment.rows), key_head, slice);
  cp_async_commit();

  const std::int64_t place =
      (static_cast<std::int64_t>(key_head * kGroup + head) * kHead + key) * kHead +
      slice * kColumns + column;
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

  const bool second = (lane & 16) != 0;     // this lane ends up with a sum of M^T q, else M^T k
  const bool odd_column = (lane & 8) != 0;  // of its second column
  float* out =
      a.o +
      (static_cast<std::int64_t>(segment.row0) * a.dims.v_heads + key_head * kGroup + head) *
          kHead +
      slice * kColumns + column + (odd_column ? 1 : 0);
  const std::int64_t out_stride = static_cast<std::int64_t>(a.dims.v_heads) * kHead;
  const bool writes = second && (lane & 6) == 0;

  for (int t0 = 0, buffer = 0; t0 < segment.rows; t0 += kStage, buffer ^= 1) {
    Stage<kGroup>& stage = stages[buffer];
    const int n = min(kStage, segment.rows - t0);
    cp_async_wait<0>();
    __syncthreads();  // tokens are here, and all warps have left the other buffer
    if (t0 + kStage < segment.rows) {
      fetch(stages[buffer ^ 1], a, segment.row0 + t0 + kStage,
            min(kStage, segment.rows - t0 - kStage), key_head, slice);
    }
    cp_async_commit();
    dot_keys(stage, n, warp, lane);
    __syncthreads();

    Token next;
    auto read = [&](int t) {
      load8(next.k, &stage.k[t][key]);
      load8(next.q, &stage.q[t][key]);
      next.v = *reinterpret_cast<const float2*>(&stage.v[t][head][column]);
      next.scalars = stage.scalars[t][head];
    };
    read(0);
#pragma unroll 2
    for (int t = 0; t < n; ++t) {
      const Token token = next;
      read(t + 1);
      float p0 = 0.0f, p1 = 0.0f, o0 = 0.0f, o1 = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        p0 = fmaf(m[i].x, token.k[i], p0);
        p1 = fmaf(m[i].y, token.k[i], p1);
        o0 = fmaf(m[i].x, token.q[i], o0);
        o1 = fmaf(m[i].y, token.q[i], o1);
      }
      const float decay = token.scalars.x;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // off the chain: runs while the sums travel
        m[i].x = decay * m[i].x;
        m[i].y = decay * m[i].y;
      }
      // Sums over 16 key groups: the lane bits 16 and 8 choose which of the four sums a lane keeps.
      float keep0 = second ? o0 : p0;
      float keep1 = second ? o1 : p1;
      keep0 += __shfl_xor_sync(kAll, second ? p0 : o0, 16);
      keep1 += __shfl_xor_sync(kAll, second ? p1 : o1, 16);
      float sum = odd_column ? keep1 : keep0;
      sum += __shfl_xor_sync(kAll, odd_column ? keep0 : keep1, 8);
      sum += __shfl_xor_sync(kAll, sum, 4);
      sum += __shfl_xor_sync(kAll, sum, 2);
      const float beta = token.scalars.y;
      const float d0 = beta * fmaf(-decay, __shfl_sync(kAll, sum, lane & 1), token.v.x);
      const float d1 = beta * fmaf(-decay, __shfl_sync(kAll, sum, (lane & 1) | 8), token.v.y);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        m[i].x = fmaf(token.k[i], d0, m[i].x);
        m[i].y = fmaf(token.k[i], d1, m[i].y);
      }
      if (writes) *out = fmaf(token.scalars.z, odd_column ? d1 : d0, decay * sum);
      out += out_stride;
    }
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
  recur_kernel<kGroup><<<grid, kGroup * kWarpsHead * 32, bytes, stream>>>(args);
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
