// mix for at most 8 rows, in two kernels.
//
// stack_kernel: a cluster has one m-tile of down and inject, a block of it one slice of k. Every
// cluster norms the rows itself (they are small and lie in L2), its blocks exchange sums of squares
// and slice totals through distributed shared memory. up_kernel: gates and x, and the pending
// residual is added to the streams, which no other cluster reads any more.
#include "cuda/mix.cuh"

#include <cooperative_groups.h>

namespace flashnext::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kStackThreads = 256;
constexpr int kWarps = kStackThreads / 32;
static_assert(kWarps * kChunkK == kPiece, "a warp a chunk");
// Halves of a row of planes in shared memory: 64 bytes beyond a multiple of 128, so that the
// fragments of two rows meet no bank twice.
constexpr int kPlaneStride = kPiece + 32;

struct StackShared {
  float parts[kWarps][16][kDecodeRows];
  float totals[16][kDecodeRows];  // of the slice; read by the cluster
  float squares[kDecodeRows];     // of the piece; read by the cluster
  float warp_squares[kDecodeRows][kWarps];
  float r[kDecodeRows];
};

__host__ __device__ constexpr std::size_t stack_smem(int rows) {
  return static_cast<std::size_t>(rows) * (kPiece * sizeof(float) + 2 * kPlaneStride * 2);
}

__global__ void __launch_bounds__(kStackThreads) stack_kernel(const MixParams p) {
  extern __shared__ __align__(16) char dynamic[];
  __shared__ StackShared shared;
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m0 = static_cast<int>(blockIdx.x) * 16;
  const int slice = static_cast<int>(blockIdx.y);  // also the rank in the cluster
  uint4 top[kChunkBlocks];
  uint4 bottom[kChunkBlocks];
  load_chunk(p.down.row(m0 + g), p.down.row(m0 + g + 8), p.down.in, slice * kPiece + warp * kChunkK,
             t, top, bottom);
  cg::cluster_group cluster = cg::this_cluster();
  const int pieces = p.dim / kPiece;
  const int h = slice / pieces;
  const int c0 = slice % pieces * kPiece;
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const std::size_t stack = dim * static_cast<std::size_t>(p.num_streams);
  const std::size_t offset = static_cast<std::size_t>(slice) * kPiece;
  float* values = reinterpret_cast<float*>(dynamic);                       // (group, kPiece)
  auto* hi = reinterpret_cast<std::uint16_t*>(values + p.group * kPiece);  // (group, stride)
  std::uint16_t* lo = hi + p.group * kPlaneStride;

  pdl_wait();
  const int rows = group_rows(p);
  if (rows <= 0) return;  // the whole grid
#pragma unroll 2
  for (int row = 0; row < rows; ++row) {
    const int out_row = p.row0 + row;
    const int in_row = p.pick != nullptr ? p.pick[out_row] : out_row;
    const float* s = p.streams + static_cast<std::size_t>(in_row) * stack + offset;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = 4 * (tid + i * kStackThreads);
      if (c >= kPiece) continue;
      float4 v = *reinterpret_cast<const float4*>(s + c);
      if (p.pending_y != nullptr) {
        v = add_scaled(v, p.pending_inj[out_row * p.num_streams + h],
                       *reinterpret_cast<const float4*>(
                           p.pending_y + static_cast<std::size_t>(out_row) * dim + c0 + c));
      }
      *reinterpret_cast<float4*>(values + row * kPiece + c) = v;
      squares = add_squares(squares, v);
    }
    squares = warp_sum(squares);
    if (lane == 0) shared.warp_squares[row][warp] = squares;
  }
  __syncthreads();
  if (tid < rows) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.warp_squares[tid][w];
    shared.squares[tid] = sum;
  }
  cluster.sync();
  if (tid < rows) {
    float sum = 0.0f;
    for (int i = 0; i < pieces; ++i) {
      sum += cluster.map_shared_rank(&shared, h * pieces + i)->squares[tid];
    }
    shared.r[tid] = math::rsqrt(math::div(sum, static_cast<float>(p.dim)) + p.eps);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = 4 * (tid + i * kStackThreads);
    if (c >= kPiece) continue;
    const float4 w = *reinterpret_cast<const float4*>(p.norm + offset + c);
    for (int row = 0; row < rows; ++row) {
      std::uint16_t* hi_to = hi + row * kPlaneStride + c;
      std::uint16_t* lo_to = lo + row * kPlaneStride + c;
      store_normed(*reinterpret_cast<const float4*>(values + row * kPiece + c), shared.r[row], w,
                   hi_to, lo_to);
      if (m0 == 0) {  // for the up kernel
        const std::size_t to =
            static_cast<std::size_t>(row) * stack + offset + static_cast<std::size_t>(c);
        *reinterpret_cast<uint2*>(p.stack.hi + to) = *reinterpret_cast<const uint2*>(hi_to);
        *reinterpret_cast<uint2*>(p.stack.lo + to) = *reinterpret_cast<const uint2*>(lo_to);
      }
    }
  }
  __syncthreads();
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kChunkBlocks; ++i) {
    uint4 b_hi = {0, 0, 0, 0};
    uint4 b_lo = {0, 0, 0, 0};
    if (g < rows) {
      const int at = g * kPlaneStride + warp * kChunkK + i * kBlockK + 8 * t;
      b_hi = *reinterpret_cast<const uint4*>(hi + at);
      b_lo = *reinterpret_cast<const uint4*>(lo + at);
    }
    mma_block(c, top[i], bottom[i], b_hi, b_lo);
  }
  shared.parts[warp][g][2 * t] = c[0];
  shared.parts[warp][g][2 * t + 1] = c[1];
  shared.parts[warp][g + 8][2 * t] = c[2];
  shared.parts[warp][g + 8][2 * t + 1] = c[3];
  __syncthreads();
  if (tid < 16 * kDecodeRows) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.parts[w][tid / kDecodeRows][tid % kDecodeRows];
    shared.totals[tid / kDecodeRows][tid % kDecodeRows] = total;
  }
  cluster.sync();
  // The m-tile's results, shared out over the blocks.
  for (int i = slice + p.slices * tid; i < 16 * rows; i += p.slices * kStackThreads) {
    const int v = m0 + i % 16;
    const int row = i / 16;
    if (v >= p.width) continue;
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < p.slices; ++s) {
      total += cluster.map_shared_rank(&shared, s)->totals[i % 16][row];
    }
    if (v < p.rank) {
      const int to = row * p.rank + v;
      split(hidden_value(p, total), p.hidden.hi[to], p.hidden.lo[to]);
    } else {
      p.inj[(p.row0 + row) * p.num_streams + v - p.rank] = inject_value(p, total);
    }
  }
  cluster.sync();  // nobody leaves while its totals are read
}

// Block: 16 channels of every stream, a warp a stream; at least 128 threads.
__global__ void __launch_bounds__(32 * kMaxStreams) up_kernel(const MixParams p) {
  extern __shared__ __align__(16) std::uint16_t hidden[];  // hi then lo: (kDecodeRows, stride)
  __shared__ float gates[kMaxStreams][16][kDecodeRows + 1];
  constexpr int kAhead = 2;  // chunks whose weights are fetched before the wait
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  const int lane = tid % 32;
  const int h = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int c0 = static_cast<int>(blockIdx.x) * 16;
  const int chunks = split_k(p.rank).chunks;
  const auto weight_row = [&](int m) -> const std::uint16_t* {
    if (h >= p.num_streams || c0 + m >= p.dim) return nullptr;
    return p.up + (static_cast<std::size_t>(h) * static_cast<std::size_t>(p.dim) +
                   static_cast<std::size_t>(c0 + m)) *
                      static_cast<std::size_t>(p.rank);
  };
  const std::uint16_t* top_row = weight_row(g);
  const std::uint16_t* bottom_row = weight_row(g + 8);
  uint4 top[kAhead][kChunkBlocks];
  uint4 bottom[kAhead][kChunkBlocks];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    load_chunk(i < chunks ? top_row : nullptr, i < chunks ? bottom_row : nullptr, p.rank,
               i * kChunkK, t, top[i], bottom[i]);
  }
  pdl_wait();
  const int rows = group_rows(p);
  if (rows <= 0) return;

  const int stride = (p.rank + 63) / 64 * 64 + 32;  // as kPlaneStride
  std::uint16_t* hidden_lo = hidden + kDecodeRows * stride;
  const int pieces = p.rank / 8;
  for (int i = tid; i < rows * pieces; i += threads) {
    const int row = i / pieces;
    const int k = i % pieces * 8;
    *reinterpret_cast<uint4*>(hidden + row * stride + k) =
        *reinterpret_cast<const uint4*>(p.hidden.hi + row * p.rank + k);
    *reinterpret_cast<uint4*>(hidden_lo + row * stride + k) =
        *reinterpret_cast<const uint4*>(p.hidden.lo + row * p.rank + k);
  }
  // One channel of a row a thread: its normed streams, and the update that was pending.
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const std::size_t stack = dim * static_cast<std::size_t>(p.num_streams);
  const int c = c0 + tid % 16;
  const int row = tid / 16;
  const bool has_x = row < rows && c < p.dim;
  float n[kMaxStreams];
  if (has_x) {
#pragma unroll
    for (int s = 0; s < kMaxStreams; ++s) {
      if (s < p.num_streams) {
        const std::size_t at = static_cast<std::size_t>(row) * stack +
                               static_cast<std::size_t>(s) * dim + static_cast<std::size_t>(c);
        n[s] = unsplit(p.stack.hi[at], p.stack.lo[at]);
      }
    }
    if (p.update != 0) {
      const int out_row = p.row0 + row;
      const float y = p.pending_y[static_cast<std::size_t>(out_row) * dim + c];
      float* to = p.streams + static_cast<std::size_t>(out_row) * stack + c;
#pragma unroll
      for (int s = 0; s < kMaxStreams; ++s) {
        if (s < p.num_streams) {
          float* stream = to + static_cast<std::size_t>(s) * dim;
          *stream = *stream + p.pending_inj[out_row * p.num_streams + s] * y;
        }
      }
    }
  }
  __syncthreads();

  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const auto chunk_product = [&](int chunk, const uint4(&a)[kChunkBlocks],
                                 const uint4(&b)[kChunkBlocks], float(&acc)[4]) {
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const int k = chunk * kChunkK + i * kBlockK + 8 * t;
      uint4 hi = {0, 0, 0, 0};
      uint4 lo = {0, 0, 0, 0};
      if (g < rows && k < p.rank) {
        hi = *reinterpret_cast<const uint4*>(hidden + g * stride + k);
        lo = *reinterpret_cast<const uint4*>(hidden_lo + g * stride + k);
      }
      mma_block(acc, a[i], b[i], hi, lo);
    }
  };
  if (h < p.num_streams) {
    float first[kAhead][4] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) chunk_product(i, top[i], bottom[i], first[i]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i < chunks) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += first[i][e];
      }
    }
    for (int i = kAhead; i < chunks; ++i) {
      float next[4] = {};
      load_chunk(top_row, bottom_row, p.rank, i * kChunkK, t, top[0], bottom[0]);
      chunk_product(i, top[0], bottom[0], next);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += next[e];
    }
    gates[h][g][2 * t] = sum[0] * kSplitUnscale;
    gates[h][g][2 * t + 1] = sum[1] * kSplitUnscale;
    gates[h][g + 8][2 * t] = sum[2] * kSplitUnscale;
    gates[h][g + 8][2 * t + 1] = sum[3] * kSplitUnscale;
  }
  __syncthreads();
  if (has_x) {
    float x = 0.0f;
#pragma unroll
    for (int s = 0; s < kMaxStreams; ++s) {
      if (s < p.num_streams) x += math::sigmoid(gates[s][tid % 16][row]) * n[s];
    }
    p.x[static_cast<std::size_t>(p.row0 + row) * dim + c] =
        math::div(x, static_cast<float>(p.num_streams));
  }
}

}  // namespace

void mix_stack_decode(cudaStream_t stream, const MixParams& p) {
  const std::size_t smem = stack_smem(p.group);
  allow_smem(stack_kernel, static_cast<int>(stack_smem(kDecodeRows)));
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, 16)), static_cast<unsigned>(p.slices));
  launch_pdl_cluster(stream, stack_kernel, grid, dim3(kStackThreads), smem,
                     dim3(1, static_cast<unsigned>(p.slices)), p);
}

void mix_up_decode(cudaStream_t stream, const MixParams& p) {
  const std::size_t stride = static_cast<std::size_t>((p.rank + 63) / 64 * 64 + 32);
  const int threads = p.num_streams < 4 ? 128 : 32 * p.num_streams;
  launch_pdl(stream, up_kernel, dim3(static_cast<unsigned>(ceil_div(p.dim, 16))),
             dim3(static_cast<unsigned>(threads)), 2 * kDecodeRows * stride * 2, p);
}

}  // namespace flashnext::cuda
