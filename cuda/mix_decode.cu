// mix for at most 8 rows, in two kernels; what both wait for is latency, not bandwidth.
//
// stack_kernel: a cluster has one m-tile of down and inject, a block of it one slice of k. Every
// cluster norms the rows itself (they are small and lie in L2), its blocks exchange sums of squares
// and products through distributed shared memory. up_kernel: gates and x, and the pending residual
// is added to the streams, which no other block reads any more. Weights are fetched before the wait
// for the predecessor; afterwards, loads do not wait for the number of rows: rows beyond it lie in
// buffers made for more, and only what is written is limited.
#include "cuda/mix.cuh"

#include <cooperative_groups.h>

namespace flashnext::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kChunkWarps = 8;
static_assert(kChunkWarps * kChunkK == kPiece, "a warp a chunk");
// Halves of a row of planes in shared memory: 64 bytes beyond a multiple of 128, so that the
// fragments of two rows meet no bank twice.
constexpr int kPlaneStride = kPiece + 32;

template <int kRows>
struct StackShared {
  float parts[kChunkWarps][kRows][16];  // of the slice; read by the cluster
  float squares[kRows][kNormWarps];     // of the piece; read by the cluster
  float r[kRows];
  alignas(16) std::uint16_t hi[kRows][kPlaneStride];
  alignas(16) std::uint16_t lo[kRows][kPlaneStride];
};

// kRows >= the rows of the group.
template <int kRows>
__global__ void __launch_bounds__(kNormThreads, 2) stack_kernel(const MixParams p) {
  __shared__ StackShared<kRows> shared;
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m0 = static_cast<int>(blockIdx.x) * 16;
  const int slice = static_cast<int>(blockIdx.y);  // also the rank in the cluster
  const std::size_t offset = static_cast<std::size_t>(slice) * kPiece;
  uint4 top[kChunkBlocks];
  uint4 bottom[kChunkBlocks];
  if (warp < kChunkWarps) {
    load_chunk(p.down.row(m0 + g), p.down.row(m0 + g + 8), p.down.in,
               slice * kPiece + warp * kChunkK, t, top, bottom);
  }
  const float4 w = *reinterpret_cast<const float4*>(p.norm + offset + 4 * tid);
  cg::cluster_group cluster = cg::this_cluster();
  const int pieces = p.dim / kPiece;
  const int h = slice / pieces;
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const std::size_t stack = dim * static_cast<std::size_t>(p.num_streams);
  const float* s_from = p.streams + offset + 4 * tid;
  const float* y_from = p.pending_y + slice % pieces * kPiece + 4 * tid;

  pdl_wait();
  float4 v[kRows];
  if (p.pick == nullptr) {
    constexpr int kPart = kRows < 4 ? kRows : 4;  // rows whose updates are in flight at a time
#pragma unroll
    for (int row0 = 0; row0 < kRows; row0 += kPart) {
      float4 y[kPart];
      float inj[kPart];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        if (row0 + i >= p.group) break;
        const std::size_t from = static_cast<std::size_t>(p.row0 + row0 + i);
        v[row0 + i] = *reinterpret_cast<const float4*>(s_from + from * stack);
        if (p.pending_y != nullptr) {
          y[i] = *reinterpret_cast<const float4*>(y_from + from * dim);
          inj[i] = p.pending_inj[from * static_cast<std::size_t>(p.num_streams) + h];
        }
      }
      if (p.pending_y != nullptr) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) v[row0 + i] = add_scaled(v[row0 + i], inj[i], y[i]);
      }
    }
  }
  const int rows = group_rows(p);
  if (rows <= 0) return;  // the whole grid
  if (p.pick != nullptr) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row < rows) {
        v[row] = *reinterpret_cast<const float4*>(
            s_from + static_cast<std::size_t>(p.pick[p.row0 + row]) * stack);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float squares = warp_sum(sum_squares(v[row]));
    if (lane == 0) shared.squares[row][warp] = squares;
  }
  cluster.sync();
  // A warp a row: its stream's pieces, warps in order within a piece, pieces in order.
  if (warp < rows) {
    const int mine = lane < pieces * kNormWarps ? lane : 0;
    const float part = cluster.map_shared_rank(&shared, h * pieces + mine / kNormWarps)
                           ->squares[warp][mine % kNormWarps];
    float total = 0.0f;
    for (int i = 0; i < pieces; ++i) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kNormWarps; ++j) {
        sum += __shfl_sync(0xFFFFFFFFu, part, i * kNormWarps + j);
      }
      total += sum;
    }
    if (lane == 0) shared.r[warp] = inverse_rms(p, total);
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    store_normed(v[row], row < rows ? shared.r[row] : 0.0f, w, &shared.hi[row][4 * tid],
                 &shared.lo[row][4 * tid]);
  }
  __syncthreads();
  if (warp < kChunkWarps) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      uint4 hi = {0, 0, 0, 0};
      uint4 lo = {0, 0, 0, 0};
      if (g < kRows) {
        const int at = warp * kChunkK + i * kBlockK + 8 * t;
        hi = *reinterpret_cast<const uint4*>(&shared.hi[g % kRows][at]);
        lo = *reinterpret_cast<const uint4*>(&shared.lo[g % kRows][at]);
      }
      mma_block(c, top[i], bottom[i], hi, lo);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 2 * t + e % 2;
      if (row < kRows) shared.parts[warp][row][g + 8 * (e / 2)] = c[e];
    }
  }
  cluster.sync();
  // The m-tile's results, shared out over the blocks; eight lanes a result, a lane a slice.
  const int task = slice + p.slices * (tid / 8);
  const int m = task % 16;
  const int row = task / 16;
  float total = 0.0f;
  if (row < rows && lane % 8 < p.slices) {
    const StackShared<kRows>* from = cluster.map_shared_rank(&shared, lane % 8);
#pragma unroll
    for (int i = 0; i < kChunkWarps; ++i) total += from->parts[i][row % kRows][m];
  }
  asm volatile("barrier.cluster.arrive;" ::: "memory");  // this block has read what it needs
  float sum = 0.0f;
  for (int s = 0; s < p.slices; ++s) sum += __shfl_sync(0xFFFFFFFFu, total, s, 8);
  const int out = m0 + m;
  if (row < rows && out < p.width && lane % 8 == 0) {
    if (out < p.rank) {
      const int to = row * p.rank + out;
      split(hidden_value(p, sum), p.hidden.hi[to], p.hidden.lo[to]);
    } else {
      p.inj[(p.row0 + row) * p.num_streams + out - p.rank] = inject_value(p, sum);
    }
  }
  if (m0 == 0) {  // the normed streams, for the up kernel
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) break;
      const std::size_t to = static_cast<std::size_t>(r) * stack + offset + 4 * tid;
      *reinterpret_cast<uint2*>(p.stack.hi + to) =
          *reinterpret_cast<const uint2*>(&shared.hi[r][4 * tid]);
      *reinterpret_cast<uint2*>(p.stack.lo + to) =
          *reinterpret_cast<const uint2*>(&shared.lo[r][4 * tid]);
    }
  }
  asm volatile("barrier.cluster.wait;" ::: "memory");  // nobody reads this block any more
}

// Block: 16 channels of every stream, a warp a stream; at least 128 threads.
template <int kStreams>
__global__ void __launch_bounds__(kStreams < 4 ? 128 : 32 * kStreams) up_kernel(const MixParams p) {
  extern __shared__ __align__(16) std::uint16_t hidden[];  // hi then lo: (kDecodeRows, stride)
  __shared__ float gates[kStreams][16][kDecodeRows + 1];
  constexpr int kThreads = kStreams < 4 ? 128 : 32 * kStreams;
  constexpr int kAhead = 2;  // chunks whose weights are fetched before the wait
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int h = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int c0 = static_cast<int>(blockIdx.x) * 16;
  const int chunks = split_k(p.rank).chunks;
  const auto weight_row = [&](int m) -> const std::uint16_t* {
    if (h >= kStreams || c0 + m >= p.dim) return nullptr;
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
  // Rows and ends of rows that nothing is loaded into are read as zeros.
  const int stride = (p.rank + 63) / 64 * 64 + 32;
  std::uint16_t* hidden_lo = hidden + kDecodeRows * stride;
  for (int i = 8 * tid; i < 2 * kDecodeRows * stride; i += 8 * kThreads) {
    *reinterpret_cast<uint4*>(hidden + i) = {0, 0, 0, 0};
  }
  __syncthreads();

  pdl_wait();
  for (int row = 0; row < p.group; ++row) {
    for (int k = 8 * tid; k < 2 * p.rank; k += 8 * kThreads) {
      const bool low = k >= p.rank;
      const int at = low ? k - p.rank : k;
      *reinterpret_cast<uint4*>((low ? hidden_lo : hidden) + row * stride + at) =
          *reinterpret_cast<const uint4*>((low ? p.hidden.lo : p.hidden.hi) + row * p.rank + at);
    }
  }
  // One channel of a row a thread: its normed streams, and the update that was pending.
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const int c = c0 + tid % 16;
  const int row = tid / 16;
  const std::size_t at =
      static_cast<std::size_t>(row) * dim * kStreams + static_cast<std::size_t>(c);
  const std::size_t out_row = static_cast<std::size_t>(p.row0 + row);
  const bool mine = row < p.group && c < p.dim;
  std::uint16_t n_hi[kStreams];
  std::uint16_t n_lo[kStreams];
  float stream[kStreams];
  float inj[kStreams];
  float y = 0.0f;
  if (mine) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      n_hi[s] = p.stack.hi[at + static_cast<std::size_t>(s) * dim];
      n_lo[s] = p.stack.lo[at + static_cast<std::size_t>(s) * dim];
    }
    if (p.update != 0) {
      y = p.pending_y[out_row * dim + c];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        inj[s] = p.pending_inj[out_row * kStreams + s];
        stream[s] = p.streams[(out_row * kStreams + s) * dim + c];
      }
    }
  }
  const int rows = group_rows(p);
  if (rows <= 0) return;
  __syncthreads();

  if (h < kStreams) {
    const auto fragment = [&](const std::uint16_t* plane, int chunk, int i) -> uint4 {
      const int k = chunk * kChunkK + i * kBlockK + 8 * t;
      return k < p.rank ? *reinterpret_cast<const uint4*>(plane + g * stride + k)
                        : uint4{0, 0, 0, 0};
    };
    float first[kAhead][4] = {};
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      uint4 hi[kAhead];
      uint4 lo[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        hi[a] = fragment(hidden, a, i);
        lo[a] = fragment(hidden_lo, a, i);
      }
#pragma unroll
      for (int part = 0; part < 4; ++part)
#pragma unroll
        for (int a = 0; a < kAhead; ++a)
          mma_part(first[a], part, top[a][i], bottom[a][i], hi[a], lo[a]);
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += a < chunks ? first[a][e] : 0.0f;
    for (int chunk = kAhead; chunk < chunks; ++chunk) {
      float next[4] = {};
      load_chunk(top_row, bottom_row, p.rank, chunk * kChunkK, t, top[0], bottom[0]);
#pragma unroll
      for (int i = 0; i < kChunkBlocks; ++i) {
        mma_block(next, top[0][i], bottom[0][i], fragment(hidden, chunk, i),
                  fragment(hidden_lo, chunk, i));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += next[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) gates[h][g + 8 * (e / 2)][2 * t + e % 2] = sum[e] * kSplitUnscale;
  }
  __syncthreads();
  if (!mine || row >= rows) return;
  float gated[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    gated[s] = math::sigmoid(gates[s][tid % 16][row]) * unsplit(n_hi[s], n_lo[s]);
  }
  float x = 0.0f;
#pragma unroll
  for (int s = 0; s < kStreams; ++s) x += gated[s];
  p.x[out_row * dim + c] = x * p.inv_streams;
  if (p.update != 0) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      p.streams[(out_row * kStreams + s) * dim + c] = stream[s] + inj[s] * y;
    }
  }
}

template <int kRows>
void launch_stack(cudaStream_t stream, const MixParams& p) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, 16)), static_cast<unsigned>(p.slices));
  launch_pdl_cluster(stream, stack_kernel<kRows>, grid, dim3(kNormThreads), 0,
                     dim3(1, static_cast<unsigned>(p.slices)), p);
}

template <int kStreams>
void launch_up(cudaStream_t stream, const MixParams& p) {
  const std::size_t stride = static_cast<std::size_t>((p.rank + 63) / 64 * 64 + 32);
  launch_pdl(stream, up_kernel<kStreams>, dim3(static_cast<unsigned>(ceil_div(p.dim, 16))),
             dim3(kStreams < 4 ? 128 : 32 * kStreams), 2 * kDecodeRows * stride * 2, p);
}

}  // namespace

void mix_stack_decode(cudaStream_t stream, const MixParams& p) {
  if (p.group <= 1) {
    launch_stack<1>(stream, p);
  } else if (p.group <= 4) {
    launch_stack<4>(stream, p);
  } else {
    launch_stack<8>(stream, p);
  }
}

void mix_up_decode(cudaStream_t stream, const MixParams& p) {
  switch (p.num_streams) {
    case 1:
      return launch_up<1>(stream, p);
    case 2:
      return launch_up<2>(stream, p);
    case 4:
      return launch_up<4>(stream, p);
    default:
      return launch_up<8>(stream, p);
  }
}

}  // namespace flashnext::cuda
