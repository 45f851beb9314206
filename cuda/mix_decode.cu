// mix for at most kFragmentRows, in two kernels; what both wait for is latency, not bandwidth. This
// is the first: norm, down and hidden.
//
// A cluster has one m-tile of down and inject, a block of it one slice of k. Every cluster norms
// the rows itself (they are small and lie in L2); its blocks push sums of squares and products into
// each other's shared memory. Weights are fetched before the wait for the predecessor, into
// registers (staging in shared memory was slower on an H200: 213 against 196 us a step); those of
// the up kernel, whose blocks find no place beside these, into L2. After the wait, loads do not
// wait for the number of rows: rows beyond it lie in buffers made for more, and only what is
// written is limited.
#include "cuda/exl3_cluster.cuh"
#include "cuda/mix.cuh"

namespace flashnext::cuda {

namespace {

constexpr int kChunkWarps = 8;
static_assert(kChunkWarps * kChunkK == kPiece, "a warp a chunk");
constexpr int kMaxSlices = 8;
// Halves of a row of planes in shared memory: 64 bytes beyond a multiple of 128, so that the
// fragments of two rows meet no bank twice.
constexpr int kPlaneStride = kPiece + 32;

// *to = value in the block of that rank; four bytes for its barrier.
__device__ __forceinline__ void push(float* to, float value, std::uint64_t* barrier, int rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address_at(to, rank)),
      "r"(__float_as_uint(value)), "r"(address_at(barrier, rank))
      : "memory");
}

template <int kRows>
struct StackShared {
  std::uint64_t squares_barrier;
  std::uint64_t totals_barrier;
  // Pushed by the cluster: warps' sums of the stream's pieces, and the slices' totals of the rows
  // that this block joins.
  float squares[kRows][32];
  float totals[kRows][kMaxSlices][16];
  float parts[kChunkWarps][kRows][16];
  float r[kRows];
  alignas(16) std::uint16_t hi[kRows][kPlaneStride];
  alignas(16) std::uint16_t lo[kRows][kPlaneStride];
};

// 1 / rms of a row of the stream: warps in order within a piece, pieces in order.
__device__ __forceinline__ float inverse_rms_of(const MixParams& p, const float* squares,
                                                int pieces) {
  float total = 0.0f;
  for (int i = 0; i < pieces; ++i) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kNormWarps; ++j) sum += squares[i * kNormWarps + j];
    total += sum;
  }
  return inverse_rms(p, total);
}

// Every block asks for its share of the up kernel's weights, in lines of 128 bytes.
__device__ __forceinline__ void prefetch_up(const MixParams& p) {
  const unsigned lines =
      static_cast<unsigned>(p.num_streams * p.dim) * static_cast<unsigned>(p.rank) / 64u;
  const unsigned block = blockIdx.x + gridDim.x * blockIdx.y;
  const unsigned step = kNormThreads * gridDim.x * gridDim.y;
#pragma unroll 1
  for (unsigned i = block * kNormThreads + threadIdx.x; i < lines; i += step) {
    prefetch_l2(p.up + 64 * static_cast<std::size_t>(i));
  }
}

// kRows >= the rows of the group. Two blocks a multiprocessor: more would spill the weights.
template <int kRows>
__global__ void __launch_bounds__(kNormThreads, 2) stack_kernel(const MixParams p) {
  extern __shared__ __align__(16) char smem[];
  StackShared<kRows>& shared = *reinterpret_cast<StackShared<kRows>*>(smem);
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
  pdl_trigger();
  if (tid == 0) {
    init_barrier(&shared.squares_barrier);
    init_barrier(&shared.totals_barrier);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  const float4 w = *reinterpret_cast<const float4*>(p.norm + offset + 4 * tid);
  prefetch_up(p);
  const int pieces = p.dim / kPiece;
  const int h = slice / pieces;
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const std::size_t stack = dim * static_cast<std::size_t>(p.num_streams);
  const float* s_from = p.streams + offset + 4 * tid;
  const float* y_from = p.pending_y + slice % pieces * kPiece + 4 * tid;

  pdl_wait();
  float4 v[kRows];
  if (p.pick == nullptr) {
    // Rows whose updates are in flight at a time.
    constexpr int kPart = kRows == 1 ? 1 : 2;
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
  await_cluster();
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
  // Every warp's sums go to the blocks of its stream, this one included.
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
    const float squares = warp_sum(sum_squares(v[row]));
    if (lane < pieces) {
      push(&shared.squares[row][slice % pieces * kNormWarps + warp], squares,
           &shared.squares_barrier, h * pieces + lane);
    }
  }
  if (tid == 0) expect_bytes(&shared.squares_barrier, 4 * kNormWarps * pieces * rows);
  await(&shared.squares_barrier);
  float r = 0.0f;
  if constexpr (kRows == 1) {
    r = inverse_rms_of(p, shared.squares[0], pieces);
  } else {
    if (warp < rows) {
      r = inverse_rms_of(p, shared.squares[warp], pieces);
      if (lane == 0) shared.r[warp] = r;
    }
    __syncthreads();
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= rows) break;
    std::uint16_t* hi = &shared.hi[row][4 * tid];
    std::uint16_t* lo = &shared.lo[row][4 * tid];
    store_normed(v[row], kRows == 1 ? r : shared.r[row], w, hi, lo);
    if (m0 == 0) {  // the normed streams, for the up kernel
      const std::size_t to = static_cast<std::size_t>(row) * stack + offset + 4 * tid;
      *reinterpret_cast<uint2*>(p.stack.hi + to) = *reinterpret_cast<const uint2*>(hi);
      *reinterpret_cast<uint2*>(p.stack.lo + to) = *reinterpret_cast<const uint2*>(lo);
    }
  }
  __syncthreads();
  if (warp < kChunkWarps) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      // Columns of rows beyond the real ones hold anything; a column never mixes with another.
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
  __syncthreads();
  // A row's slices are joined by the block of rank row % slices.
  const int m = tid % 16;
  if (tid < 16 * rows) {
    const int row = tid / 16 % kRows;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkWarps; ++i) total += shared.parts[i][row][m];
    push(&shared.totals[row][slice][m], total, &shared.totals_barrier, row % p.slices);
  }
  if (slice >= rows) return;  // nobody pushes to this block any more
  if (tid == 0) {
    const int led = (rows - slice + p.slices - 1) / p.slices;
    expect_bytes(&shared.totals_barrier, 4 * 16 * p.slices * led);
  }
  await(&shared.totals_barrier);
  const int row = slice + p.slices * (tid / 16);
  const int out = m0 + m;
  if (row >= rows || out >= p.width) return;
  float sum = 0.0f;
  for (int s = 0; s < p.slices; ++s) sum += shared.totals[row % kRows][s][m];
  if (out < p.rank) {
    const int to = row * p.rank + out;
    split(hidden_value(p, sum), p.hidden.hi[to], p.hidden.lo[to]);
  } else {
    p.inj[(p.row0 + row) * p.num_streams + out - p.rank] = inject_value(p, sum);
  }
}

template <int kRows>
void launch_stack(cudaStream_t stream, const MixParams& p) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, 16)), static_cast<unsigned>(p.slices));
  const dim3 cluster(1, static_cast<unsigned>(p.slices));
  constexpr std::size_t kShared = sizeof(StackShared<kRows>);
  allow_smem(stack_kernel<kRows>, static_cast<int>(kShared));
  launch_pdl_cluster(stream, stack_kernel<kRows>, grid, dim3(kNormThreads), kShared, cluster, p);
}

}  // namespace

void mix_stack_decode(cudaStream_t stream, const MixParams& p) {
  if (p.group <= 1) {
    launch_stack<1>(stream, p);
  } else if (p.group <= 4) {
    launch_stack<4>(stream, p);
  } else {
    launch_stack<kFragmentRows>(stream, p);
  }
}

}  // namespace flashnext::cuda
