// mix for at most 8 rows, in two kernels; what both wait for is latency, not bandwidth.
//
// stack_kernel: a cluster has one m-tile of down and inject, a block of it one slice of k. Every
// cluster norms the rows itself (they are small and lie in L2); its blocks push sums of squares and
// products into each other's shared memory. up_kernel: gates and x, and the pending residual is
// added to the streams, which no other block reads any more. Weights are fetched before the wait
// for the predecessor; afterwards, loads do not wait for the number of rows: rows beyond it lie in
// buffers made for more, and only what is written is limited.
//
// Where a multiprocessor has the room, weights wait in shared memory and blocks are so thin that
// both kernels lie beside the blocks of a predecessor: all their bytes travel while it computes.
// Elsewhere they wait in registers, and stack_kernel asks for the weights of up_kernel too, whose
// blocks find no place beside its own.
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

__device__ __forceinline__ void fetch_piece(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}

// A thread's weights of one chunk, fetched ahead. In shared memory a thread reads only what it has
// copied itself, so that its own wait is enough.
template <bool kStaged>
struct Chunk;

template <>
struct Chunk<false> {
  uint4 a[kChunkBlocks];
  uint4 b[kChunkBlocks];

  __device__ __forceinline__ void fetch(const std::uint16_t* top_row,
                                        const std::uint16_t* bottom_row, int in, int k0, int t,
                                        uint4*, int) {
    load_chunk(top_row, bottom_row, in, k0, t, a, b);
  }
  __device__ __forceinline__ uint4 top(int i) const { return a[i]; }
  __device__ __forceinline__ uint4 bottom(int i) const { return b[i]; }
};

template <>
struct Chunk<true> {
  const uint4* mine;  // the thread's first of `pitch` threads' pieces
  int pitch;

  __device__ __forceinline__ void fetch(const std::uint16_t* top_row,
                                        const std::uint16_t* bottom_row, int in, int k0, int t,
                                        uint4* to, int threads) {
    mine = to;
    pitch = threads;
#pragma unroll
    for (int i = 0; i < kChunkBlocks; ++i) {
      const int k = k0 + i * kBlockK + 8 * t;
      copy(to + 2 * i * threads, top_row, k, in);
      copy(to + (2 * i + 1) * threads, bottom_row, k, in);
    }
  }
  __device__ __forceinline__ uint4 top(int i) const { return mine[2 * i * pitch]; }
  __device__ __forceinline__ uint4 bottom(int i) const { return mine[(2 * i + 1) * pitch]; }

  // Zeros where there is nothing; no address is read then.
  static __device__ __forceinline__ void copy(uint4* to, const std::uint16_t* row, int k, int in) {
    const bool present = row != nullptr && k < in;
    if (!present) {
      *to = {0, 0, 0, 0};
      return;
    }
    fetch_piece(to, row + k);
  }
};

constexpr int kChunkPieces = 2 * kChunkBlocks;  // of a thread and chunk

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

// kRows >= the rows of the group.
template <int kRows, bool kStaged>
__global__ void __launch_bounds__(kNormThreads, kStaged&& kRows == 1 ? 4
                                                : kStaged            ? 3
                                                          : 2) stack_kernel(const MixParams p) {
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
  Chunk<kStaged> chunk;
  if (warp < kChunkWarps) {
    chunk.fetch(
        p.down.row(m0 + g), p.down.row(m0 + g + 8), p.down.in, slice * kPiece + warp * kChunkK, t,
        reinterpret_cast<uint4*>(smem + sizeof(StackShared<kRows>)) + tid, 32 * kChunkWarps);
  }
  pdl_trigger();
  if (tid == 0) {
    init_barrier(&shared.squares_barrier);
    init_barrier(&shared.totals_barrier);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  float4 w;
  uint4* w_at = reinterpret_cast<uint4*>(smem + sizeof(StackShared<kRows>)) +
                32 * kChunkWarps * kChunkPieces + tid;
  if constexpr (kStaged) {
    fetch_piece(w_at, p.norm + offset + 4 * tid);
  } else {
    w = *reinterpret_cast<const float4*>(p.norm + offset + 4 * tid);
  }
  if constexpr (!kStaged) prefetch_up(p);
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
    constexpr int kPart = kRows == 1 ? 1 : kStaged ? 4 : 2;
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
  if (rows <= 0) {  // the whole grid
    if constexpr (kStaged) asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }
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
  if constexpr (kStaged) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    w = *reinterpret_cast<const float4*>(w_at);
  }
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
      mma_block(c, chunk.top(i), chunk.bottom(i), hi, lo);
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

constexpr int kAhead = 2;  // chunks that the up kernel fetches before the wait
constexpr int up_threads(int streams) { return streams < 4 ? 128 : 32 * streams; }
// Halves of a row of hidden planes in shared memory.
__host__ __device__ constexpr int hidden_stride(int rank) { return (rank + 63) / 64 * 64 + 32; }

// Block: 16 channels of every stream, a warp a stream; at least 128 threads.
template <int kStreams, bool kStaged>
__global__ void __launch_bounds__(up_threads(kStreams), kStaged ? 640 / up_threads(kStreams) : 1)
    up_kernel(const MixParams p) {
  extern __shared__ __align__(16) char smem[];
  __shared__ float gated[kStreams][kDecodeRows][16];
  constexpr int kThreads = up_threads(kStreams);
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int h = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int c0 = static_cast<int>(blockIdx.x) * 16;
  const int chunks = split_k(p.rank).chunks;
  const int stride = hidden_stride(p.rank);
  // Planes (group, stride), then the weights.
  std::uint16_t* hidden_hi = reinterpret_cast<std::uint16_t*>(smem);
  std::uint16_t* hidden_lo = hidden_hi + p.group * stride;
  uint4* staged = reinterpret_cast<uint4*>(hidden_lo + p.group * stride) + tid;
  const auto weight_row = [&](int m) -> const std::uint16_t* {
    if (h >= kStreams || c0 + m >= p.dim) return nullptr;
    return p.up + (static_cast<std::size_t>(h) * static_cast<std::size_t>(p.dim) +
                   static_cast<std::size_t>(c0 + m)) *
                      static_cast<std::size_t>(p.rank);
  };
  const std::uint16_t* top_row = weight_row(g);
  const std::uint16_t* bottom_row = weight_row(g + 8);
  Chunk<kStaged> ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    ahead[i].fetch(top_row, bottom_row, p.rank, i * kChunkK, t,
                   staged + i * kChunkPieces * kThreads, kThreads);
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
  if constexpr (kStaged) asm volatile("cp.async.wait_all;" ::: "memory");
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
          mma_part(first[a], part, ahead[a].top(i), ahead[a].bottom(i), hi[a], lo[a]);
    }
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += a < chunks ? first[a][e] : 0.0f;
    if constexpr (!kStaged) {
      for (int chunk = kAhead; chunk < chunks; ++chunk) {
        float next[4] = {};
        Chunk<false> more;
        load_chunk(top_row, bottom_row, p.rank, chunk * kChunkK, t, more.a, more.b);
#pragma unroll
        for (int i = 0; i < kChunkBlocks; ++i) {
          mma_block(next, more.top(i), more.bottom(i), fragment(hidden_hi, chunk, i),
                    fragment(hidden_lo, chunk, i));
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] += next[e];
      }
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
  for (int s = 0; s < kStreams; ++s) x += gated[s][row % kDecodeRows][c];
  p.x[static_cast<std::size_t>(p.row0 + row) * dim + static_cast<std::size_t>(c0 + c)] =
      x * p.inv_streams;
}

// Whether at least three blocks that stage their weights fit on a multiprocessor.
// FN_MIX_VARIANT 1: never.
bool has_room([[maybe_unused]] std::size_t block_bytes) {
#if defined(FN_MIX_VARIANT) && FN_MIX_VARIANT == 1
  return false;
#else
  int device = 0;
  int room = 0;
  int reserved = 0;
  FN_CUDA(cudaGetDevice(&device));
  FN_CUDA(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  FN_CUDA(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  return 3 * (block_bytes + static_cast<std::size_t>(reserved)) <= static_cast<std::size_t>(room);
#endif
}

template <int kRows>
void launch_stack(cudaStream_t stream, const MixParams& p) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, 16)), static_cast<unsigned>(p.slices));
  const dim3 cluster(1, static_cast<unsigned>(p.slices));
  constexpr std::size_t kShared = sizeof(StackShared<kRows>);
  constexpr std::size_t kStaged =
      kShared + (32 * kChunkWarps * kChunkPieces + kNormThreads) * sizeof(uint4);
  const auto launch = [&](auto* kernel, std::size_t bytes) {
    allow_smem(kernel, static_cast<int>(bytes));
    launch_pdl_cluster(stream, kernel, grid, dim3(kNormThreads), bytes, cluster, p);
  };
  if (has_room(kStaged)) {
    launch(stack_kernel<kRows, true>, kStaged);
  } else {
    launch(stack_kernel<kRows, false>, kShared);
  }
}

template <int kStreams>
void launch_up(cudaStream_t stream, const MixParams& p) {
  constexpr int kThreads = up_threads(kStreams);
  const std::size_t planes = static_cast<std::size_t>(p.group * hidden_stride(p.rank)) * 4;
  const std::size_t staged = planes + kAhead * kChunkPieces * kThreads * sizeof(uint4);
  const auto launch = [&](auto* kernel, std::size_t bytes) {
    allow_smem(kernel, static_cast<int>(bytes));
    launch_pdl(stream, kernel, dim3(static_cast<unsigned>(ceil_div(p.dim, 16))), dim3(kThreads),
               bytes, p);
  };
  if (split_k(p.rank).chunks <= kAhead && has_room(staged)) {
    launch(up_kernel<kStreams, true>, staged);
  } else {
    launch(up_kernel<kStreams, false>, planes);
  }
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
