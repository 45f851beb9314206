// mix for the rows of a decode step, the second kernel: up, gates and x. The pending residual is
// added to the streams, which no other block reads any more.
//
// Weights wait in registers, as in mix_decode.cu, which asks L2 for them.
#include "cuda/mix.cuh"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kAhead = 2;  // chunks that the up kernel fetches before the wait
constexpr int up_threads(int streams) { return streams < 4 ? 128 : 32 * streams; }
// Halves of a row of hidden planes in shared memory.
__host__ __device__ constexpr int hidden_stride(int rank) { return (rank + 63) / 64 * 64 + 32; }

// Block: 16 channels of every stream, a warp a stream, and up to 8 rows; at least 128 threads.
template <int kStreams>
__global__ void __launch_bounds__(up_threads(kStreams), 1)
    up_kernel(const __grid_constant__ MixParams all) {
  const MixParams p = fragment_of(all);
  extern __shared__ __align__(16) char smem[];
  __shared__ float gated[kStreams][kFragmentRows][16];
  constexpr int kThreads = up_threads(kStreams);
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int h = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int c0 = static_cast<int>(blockIdx.x) * 16;
  const int chunks = split_k(p.rank).chunks;
  const int stride = hidden_stride(p.rank);
  // Planes (group, stride).
  std::uint16_t* hidden_hi = reinterpret_cast<std::uint16_t*>(smem);
  std::uint16_t* hidden_lo = hidden_hi + p.group * stride;
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
  for (int a = 0; a < kAhead; ++a) {
    load_chunk(top_row, bottom_row, p.rank, a * kChunkK, t, top[a], bottom[a]);
  }
  pdl_trigger();
  int rows = 0;

  pdl_wait();
  for (int row = 0; row < p.group; ++row) {
    for (int k = 8 * tid; k < 2 * p.rank; k += 8 * kThreads) {
      const bool low = k >= p.rank;
      const int at = low ? k - p.rank : k;
      *reinterpret_cast<uint4*>((low ? hidden_lo : hidden_hi) + row * stride + at) =
          *reinterpret_cast<const uint4*>((low ? p.hidden.lo : p.hidden.hi) + row * p.rank + at);
    }
  }
  // Every lane's normed streams are those that its sums will gate: (g, 2t), (g, 2t+1), (g+8, 2t),
  // (g+8, 2t+1) of (channel, row). Meanwhile they get the update that was pending.
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  float n[4];
  {
    std::uint16_t n_hi[4];
    std::uint16_t n_lo[4];
    float stream[4];
    float y[4];
    float inj[2];
    float* at[4];  // null: nothing there
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 2 * t + e % 2;
      const int c = c0 + g + 8 * (e / 2);
      at[e] = nullptr;
      if (h >= kStreams || row >= p.group || c >= p.dim) continue;
      const std::size_t out_row = static_cast<std::size_t>(p.row0 + row);
      const std::size_t from =
          static_cast<std::size_t>(row * kStreams + h) * dim + static_cast<std::size_t>(c);
      n_hi[e] = p.stack.hi[from];
      n_lo[e] = p.stack.lo[from];
      if (p.update != 0) {
        at[e] = p.streams + (out_row * kStreams + h) * dim + c;
        stream[e] = *at[e];
        y[e] = p.pending_y[out_row * dim + c];
        if (e < 2) inj[e] = p.pending_inj[out_row * kStreams + h];
      }
    }
    rows = group_rows(p);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      n[e] = unsplit(n_hi[e], n_lo[e]);
      if (at[e] != nullptr && 2 * t + e % 2 < rows) *at[e] = stream[e] + inj[e % 2] * y[e];
    }
  }
  if (rows <= 0) return;
  __syncthreads();

  if (h < kStreams) {
    const auto fragment = [&](const std::uint16_t* plane, int chunk, int i) -> uint4 {
      const int k = chunk * kChunkK + i * kBlockK + 8 * t;
      return k < p.rank && g < p.group ? *reinterpret_cast<const uint4*>(plane + g * stride + k)
                                       : uint4{0, 0, 0, 0};
    };
    float first[kAhead][4] = {};
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      uint4 hi[kAhead];
      uint4 lo[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        hi[a] = fragment(hidden_hi, a, i);
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
        mma_block(next, top[0][i], bottom[0][i], fragment(hidden_hi, chunk, i),
                  fragment(hidden_lo, chunk, i));
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += next[e];
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e % 2 >= rows) continue;
      gated[h][2 * t + e % 2][g + 8 * (e / 2)] = flat_sigmoid(sum[e] * kSplitUnscale) * n[e];
    }
  }
  __syncthreads();
  const int c = tid % 16;
  const int row = tid / 16;
  if (row >= rows || c0 + c >= p.dim) return;
  float x = 0.0f;
#pragma unroll
  for (int s = 0; s < kStreams; ++s) x += gated[s][row % kFragmentRows][c];
  p.x[static_cast<std::size_t>(p.row0 + row) * dim + static_cast<std::size_t>(c0 + c)] =
      x * p.inv_streams;
}

template <int kStreams>
void launch_up(cudaStream_t stream, const MixParams& p) {
  const int rows = std::min<int>(p.group, kFragmentRows);
  const std::size_t planes = static_cast<std::size_t>(rows * hidden_stride(p.rank)) * 4;
  allow_smem(up_kernel<kStreams>, static_cast<int>(planes));
  const dim3 grid(static_cast<unsigned>(ceil_div(p.dim, 16)), 1,
                  static_cast<unsigned>(ceil_div(p.group, kFragmentRows)));
  launch_pdl(stream, up_kernel<kStreams>, grid, dim3(up_threads(kStreams)), planes, p);
}

}  // namespace

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
