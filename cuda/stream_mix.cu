// Residual streams: embed, residual, and the gated mix of one site (spec/model.md 2).
//
// mix, per group of rows: norm (pending residual, RMS, planes of the normed stack) -> down and
// inject (half_product.cuh, partial sums a slice) -> hidden (joins the slices) -> up, gates and x.
// Decode goes through mix_up.cu, and one fragment of rows at the real dimensions through
// mix_decode.cu: two kernels. Same arithmetic.
#include "cpp/base/errors.h"
#include "cuda/kernels.h"
#include "cuda/mix.cuh"

#include <algorithm>
#include <utility>

namespace flashnext::cuda {

namespace {

__device__ __forceinline__ float joined(const MixParams& p, int row, int v) {
  float total = 0.0f;
#pragma unroll 8
  for (int s = 0; s < p.slices; ++s) {
    total += p.partial[(static_cast<std::size_t>(s) * static_cast<std::size_t>(p.group) +
                        static_cast<std::size_t>(row)) *
                           static_cast<std::size_t>(p.width) +
                       static_cast<std::size_t>(v)];
  }
  return total;
}

// Block (row, stream). kHeld: the pieces of a stream, whose values stay in registers; 0: any
// number, in shared memory.
template <int kHeld>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(const MixParams p) {
  extern __shared__ float stream[];  // (dim), when not held
  __shared__ float parts[kMaxPieces][kNormWarps];
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= group_rows(p)) return;
  const int h = static_cast<int>(blockIdx.y);
  const int out_row = p.row0 + row;
  const int in_row = p.pick != nullptr ? p.pick[out_row] : out_row;
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const std::size_t stack = dim * static_cast<std::size_t>(p.num_streams);
  const std::size_t offset = static_cast<std::size_t>(h) * dim;
  float* s = p.streams + static_cast<std::size_t>(in_row) * stack + offset;
  const float* y = nullptr;
  float inj = 0.0f;
  if (p.pending_y != nullptr) {
    y = p.pending_y + static_cast<std::size_t>(out_row) * dim;
    inj = p.pending_inj[out_row * p.num_streams + h];
  }
  const int tid = static_cast<int>(threadIdx.x);
  const int pieces = kHeld > 0 ? kHeld : (p.dim + kPiece - 1) / kPiece;
  const float* norm = p.norm + offset;
  // Squares in pieces, warps in order within a piece, pieces in order: as stack_kernel.
  const auto add_squares = [&](int piece, float squares) {
    squares = warp_sum(squares);
    if (tid % 32 == 0) parts[piece][tid / 32] = squares;
  };
  float4 v[kHeld > 0 ? kHeld : 1];
  float4 w[kHeld > 0 ? kHeld : 1];
  if constexpr (kHeld > 0) {
    float4 add[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = i * kPiece + 4 * tid;
      v[i] = add[i] = w[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (c >= p.dim) continue;
      v[i] = __ldcs(reinterpret_cast<const float4*>(s + c));
      if (y != nullptr) add[i] = *reinterpret_cast<const float4*>(y + c);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = i * kPiece + 4 * tid;
      if (c < p.dim) {
        w[i] = *reinterpret_cast<const float4*>(norm + c);
        if (y != nullptr) {
          v[i] = add_scaled(v[i], inj, add[i]);
          __stcs(reinterpret_cast<float4*>(s + c), v[i]);
        }
      }
      add_squares(i, sum_squares(v[i]));
    }
  } else {
    for (int piece = 0; piece < pieces; ++piece) {
      const int c = piece * kPiece + 4 * tid;
      float squares = 0.0f;
      if (c < p.dim) {
        v[0] = *reinterpret_cast<const float4*>(s + c);
        if (y != nullptr) {
          v[0] = add_scaled(v[0], inj, *reinterpret_cast<const float4*>(y + c));
          *reinterpret_cast<float4*>(s + c) = v[0];
        }
        *reinterpret_cast<float4*>(stream + c) = v[0];
        squares = sum_squares(v[0]);
      }
      add_squares(piece, squares);
    }
  }
  __syncthreads();
  float total = 0.0f;
  for (int piece = 0; piece < pieces; ++piece) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kNormWarps; ++i) squares += parts[piece][i];
    total += squares;
  }
  const float r = inverse_rms(p, total);
  const std::size_t to = static_cast<std::size_t>(row) * stack + offset;
#pragma unroll
  for (int piece = 0; piece < pieces; ++piece) {
    const int c = piece * kPiece + 4 * tid;
    if (c >= p.dim) continue;
    if constexpr (kHeld == 0) {
      v[0] = *reinterpret_cast<const float4*>(stream + c);
      w[0] = *reinterpret_cast<const float4*>(norm + c);
    }
    const int i = kHeld > 0 ? piece : 0;
    store_normed(v[i], r, w[i], p.stack.hi + to + c, p.stack.lo + to + c);
  }
}

void launch_norm(cudaStream_t stream, const MixParams& p) {
  const dim3 grid(static_cast<unsigned>(p.group), static_cast<unsigned>(p.num_streams));
  if (p.dim <= kPiece) {
    launch_pdl(stream, norm_kernel<1>, grid, dim3(kNormThreads), 0, p);
  } else if (p.dim <= 2 * kPiece) {
    launch_pdl(stream, norm_kernel<2>, grid, dim3(kNormThreads), 0, p);
  } else {
    launch_pdl(stream, norm_kernel<0>, grid, dim3(kNormThreads),
               static_cast<std::size_t>(p.dim) * sizeof(float), p);
  }
}

// Joins the slices: planes of the hidden row, and inj. Block: a row.
__global__ void __launch_bounds__(256) hidden_kernel(const MixParams p) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= group_rows(p)) return;
  const std::size_t to = static_cast<std::size_t>(row) * static_cast<std::size_t>(p.rank);
  for (int v = static_cast<int>(threadIdx.x); v < p.width; v += static_cast<int>(blockDim.x)) {
    const float total = joined(p, row, v);
    if (v < p.rank) {
      split(hidden_value(p, total), p.hidden.hi[to + v], p.hidden.lo[to + v]);
    } else {
      p.inj[(p.row0 + row) * p.num_streams + v - p.rank] = inject_value(p, total);
    }
  }
}

// Half e of 16 bytes.
__device__ __forceinline__ std::uint16_t half_of(const uint4& v, int e) {
  const std::uint32_t pair = e < 2 ? v.x : e < 4 ? v.y : e < 6 ? v.z : v.w;
  return static_cast<std::uint16_t>(e % 2 == 0 ? pair & 0xFFFFu : pair >> 16);
}

// Block (n-tile, channels): 128 / S channels of every stream. x is the mean over streams of gated
// normed streams; a thread makes eight channels of a row at a time.
template <int W, int kStreams>
__global__ void __launch_bounds__(kTileThreads, 1) up_tile_kernel(const MixParams p) {
  extern __shared__ __align__(16) char smem[];
  constexpr int kChannels = kTileM / kStreams;
  constexpr int kAcross = kChannels / 8;  // threads that share a row
  constexpr int kTasks = (kTileN<W> * kAcross + kTileThreads - 1) / kTileThreads;
  constexpr int kTaskRows = kTileThreads / kAcross;
  pdl_trigger();
  pdl_wait();
  const int rows = group_rows(p);
  const int n0 = static_cast<int>(blockIdx.x) * kTileN<W>;
  if (n0 >= rows) return;
  const int c0 = static_cast<int>(blockIdx.y) * kChannels;
  const std::size_t dim = static_cast<std::size_t>(p.dim);
  const auto row_of = [&](int m) -> const std::uint16_t* {
    const int h = m / kChannels;
    const int c = c0 + m % kChannels;
    if (c >= p.dim) return nullptr;
    return p.up + (static_cast<std::size_t>(h) * dim + static_cast<std::size_t>(c)) *
                      static_cast<std::size_t>(p.rank);
  };
  // The thread's tasks: channels c .. c+7 of rows n, n + kTaskRows, ...
  const int c = static_cast<int>(threadIdx.x) % kAcross * 8;
  const int n = static_cast<int>(threadIdx.x) / kAcross;
  const bool inside = c0 + c < p.dim && n < kTileN<W>;
  const std::size_t at = static_cast<std::size_t>(n0 + n) * dim * kStreams +
                         static_cast<std::size_t>(c0 + c);  // of the first task's first stream
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    // One of the threads that share 32 bytes asks for them.
    if (!inside || n0 + n + i * kTaskRows >= rows || c % 16 != 0) continue;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const std::size_t from = at + static_cast<std::size_t>(i * kTaskRows * kStreams + s) * dim;
      prefetch_l2(p.stack.hi + from);
      prefetch_l2(p.stack.lo + from);
    }
  }
  float sum[W][4][4];
  tile_product<W>(row_of, p.rank, p.hidden, n0, rows, 0, split_k(p.rank).chunks, p.deep, smem, sum);
  uint4 hi[kTasks][kStreams];
  uint4 lo[kTasks][kStreams];
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    const bool present = inside && n0 + n + i * kTaskRows < rows;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const std::size_t from = at + static_cast<std::size_t>(i * kTaskRows * kStreams + s) * dim;
      hi[i][s] = lo[i][s] = {0, 0, 0, 0};
      if (present) {
        hi[i][s] = *reinterpret_cast<const uint4*>(p.stack.hi + from);
        lo[i][s] = *reinterpret_cast<const uint4*>(p.stack.lo + from);
      }
    }
  }
  // (rows of the tile, 128 + pad) in the stages' place. With this pad neither the stores below nor
  // the loads of eight threads meet a bank twice.
  constexpr int kStride = kTileM + 4;
  static_assert(kTileN<W> * kStride * sizeof(float) <= kTileSmem<W>);
  float* gates = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int i = 0; i < W; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        gates[tile_column<W>(j, e) * kStride + tile_row<W>(i, e)] = sum[i][j][e] * kSplitUnscale;
      }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTasks; ++i) {
    const int row = n + i * kTaskRows;
    if (!inside || n0 + row >= rows) break;
    float* to =
        p.x + static_cast<std::size_t>(p.row0 + n0 + row) * dim + static_cast<std::size_t>(c0 + c);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        const float4 four =
            *reinterpret_cast<const float4*>(gates + row * kStride + s * kChannels + c + 4 * part);
        const float gate[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[e] += flat_sigmoid(gate[e]) *
                  unsplit(half_of(hi[i][s], 4 * part + e), half_of(lo[i][s], 4 * part + e));
        }
      }
      *reinterpret_cast<float4*>(to + 4 * part) = {x[0] * p.inv_streams, x[1] * p.inv_streams,
                                                   x[2] * p.inv_streams, x[3] * p.inv_streams};
    }
  }
}

template <int W, int kStreams>
void launch_up_tiles(cudaStream_t stream, const MixParams& p) {
  const dim3 grid(static_cast<unsigned>(ceil_div(p.group, kTileN<W>)),
                  static_cast<unsigned>(ceil_div(p.dim, kTileM / kStreams)));
  launch_tiles<W>(stream, up_tile_kernel<W, kStreams>, grid, p);
}

template <int kStreams>
void launch_up_tiles(cudaStream_t stream, const MixParams& p) {
  if (p.group > kTileN<2>) {
    launch_up_tiles<4, kStreams>(stream, p);
  } else {
    launch_up_tiles<2, kStreams>(stream, p);
  }
}

void launch_up_tiles(cudaStream_t stream, const MixParams& p) {
  switch (p.num_streams) {
    case 1:
      return launch_up_tiles<1>(stream, p);
    case 2:
      return launch_up_tiles<2>(stream, p);
    case 4:
      return launch_up_tiles<4>(stream, p);
    default:
      return launch_up_tiles<8>(stream, p);
  }
}

// Block (row).
__global__ void __launch_bounds__(256) embed_kernel(const EmbedArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= args.step.head->rows) return;
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::uint16_t* from = reinterpret_cast<const std::uint16_t*>(args.table) +
                              static_cast<std::size_t>(args.step.rows[row].token) * dim;
  float* to = args.streams +
              static_cast<std::size_t>(row) * dim * static_cast<std::size_t>(args.num_streams);
  for (int c = static_cast<int>(threadIdx.x) * 4; c < args.dim; c += 1024) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from + c);
    const float4 v = {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u),
                      __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xFFFF0000u)};
    for (int h = 0; h < args.num_streams; ++h) {
      *reinterpret_cast<float4*>(to + static_cast<std::size_t>(h) * dim + c) = v;
    }
  }
}

// Block (row, stream).
__global__ void __launch_bounds__(256) residual_kernel(const ResidualArgs args) {
  pdl_trigger();
  pdl_wait();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= rows_now(args.rows)) return;
  const int h = static_cast<int>(blockIdx.y);
  const std::size_t dim = static_cast<std::size_t>(args.dim);
  const std::size_t at =
      static_cast<std::size_t>(row) * static_cast<std::size_t>(args.num_streams) +
      static_cast<std::size_t>(h);
  const float inj = args.inj[at];
  float* s = args.streams + at * dim;
  const float* y = args.y + static_cast<std::size_t>(row) * dim;
  for (int c = static_cast<int>(threadIdx.x) * 4; c < args.dim; c += 1024) {
    const float4 add = *reinterpret_cast<const float4*>(y + c);
    float4 v = *reinterpret_cast<const float4*>(s + c);
    v = {v.x + inj * add.x, v.y + inj * add.y, v.z + inj * add.z, v.w + inj * add.w};
    *reinterpret_cast<float4*>(s + c) = v;
  }
}

struct MixSpace {
  std::size_t stack_hi, stack_lo, partial, hidden_hi, hidden_lo, bytes;  // offsets
  int group;
  int width;
  int slices;
};

constexpr int kGroupRows = 2048;  // that share a workspace at a time in the tile form

// Rows that go through the kernels at a time.
int group_size(int max_rows) { return max_rows <= kDecodeRows ? kDecodeRows : kGroupRows; }

MixSpace mix_space(const MixArgs& args) {
  MixSpace space{};
  const int stack = args.num_streams * args.dim;
  space.group = std::min(args.rows.max, group_size(args.rows.max));
  space.width = args.rank + (args.w.inject != nullptr ? args.num_streams : 0);
  space.slices = split_k(stack).slices;
  const std::size_t group = static_cast<std::size_t>(space.group);
  std::size_t at = 0;
  const auto take = [&](std::size_t bytes) { return std::exchange(at, at + align_up(bytes)); };
  space.stack_hi = take(group * static_cast<std::size_t>(stack) * 2);
  space.stack_lo = take(group * static_cast<std::size_t>(stack) * 2);
  space.partial = take(static_cast<std::size_t>(space.slices) * group *
                       static_cast<std::size_t>(space.width) * sizeof(float));
  space.hidden_hi = take(group * static_cast<std::size_t>(args.rank) * 2);
  space.hidden_lo = take(group * static_cast<std::size_t>(args.rank) * 2);
  space.bytes = at;
  return space;
}

}  // namespace

std::size_t workspace_bytes(const MixArgs& args) { return mix_space(args).bytes; }

void embed(cudaStream_t stream, const EmbedArgs& args) {
  check(args.dim % 4 == 0, "embed: dim must be a multiple of 4");
  if (args.step.max_rows <= 0) return;
  launch_pdl(stream, embed_kernel, dim3(static_cast<unsigned>(args.step.max_rows)), dim3(256), 0,
             args);
}

void residual(cudaStream_t stream, const ResidualArgs& args) {
  check(args.dim % 4 == 0, "residual: dim must be a multiple of 4");
  if (args.rows.max <= 0) return;
  const dim3 grid(static_cast<unsigned>(args.rows.max), static_cast<unsigned>(args.num_streams));
  launch_pdl(stream, residual_kernel, grid, dim3(256), 0, args);
}

void mix(cudaStream_t stream, const MixArgs& args) {
  check(args.num_streams >= 1 && args.num_streams <= kMaxStreams && kTileM % args.num_streams == 0,
        "mix: 1, 2, 4 or 8 streams");
  check(args.dim <= kPiece * kMaxPieces, "mix: dim");
  check(args.dim % 8 == 0 && args.rank % 8 == 0, "mix: dim and rank must be multiples of 8");
  check(args.pick == nullptr || args.pending_y == nullptr, "mix: pick excludes pending");
  if (args.rows.max <= 0) return;
  const MixSpace space = mix_space(args);
  check(args.workspace.bytes >= space.bytes, "mix: workspace too small");
  char* work = static_cast<char*>(args.workspace.data);
  const auto u16 = [&](std::size_t at) { return reinterpret_cast<std::uint16_t*>(work + at); };
  const bool decode = args.rows.max <= kDecodeRows;
  const bool fused = args.rows.max <= kFragmentRows && fused_decode(args.num_streams, args.dim);
  const int step = group_size(args.rows.max);

  MixParams p{};
  p.rows = args.rows;
  p.pick = args.pick;
  p.streams = args.streams;
  p.pending_inj = args.pending_inj;
  p.pending_y = args.pending_y;
  p.norm = args.w.norm;
  p.up = args.w.up;
  p.x = args.x;
  p.inj = args.w.inject != nullptr ? args.inj : nullptr;
  p.stack = {u16(space.stack_hi), u16(space.stack_lo)};
  p.partial = reinterpret_cast<float*>(work + space.partial);
  p.hidden = {u16(space.hidden_hi), u16(space.hidden_lo)};
  p.eps = args.eps;
  p.num_streams = args.num_streams;
  p.dim = args.dim;
  p.rank = args.rank;
  p.width = space.width;
  p.slices = space.slices;
  p.inv_dim = 1.0f / static_cast<float>(args.dim);
  p.inv_streams = 1.0f / static_cast<float>(args.num_streams);
  p.update = fused && args.pending_y != nullptr ? 1 : 0;

  ProductArgs product{};
  product.rows = args.rows;
  product.w.in = args.num_streams * args.dim;
  product.w.w[0] = args.w.down;
  product.w.w[1] = args.w.inject;
  product.w.n = args.w.inject != nullptr ? 2 : 1;
  product.w.first[1] = args.rank;
  product.w.first[2] = args.rank + args.num_streams;
  product.planes = p.stack;
  product.partial = reinterpret_cast<float*>(work + space.partial);

  p.down = product.w;

  for (int row0 = 0; row0 < args.rows.max; row0 += step) {
    p.row0 = product.row0 = row0;
    p.group = product.group = std::min(args.rows.max - row0, step);
    const unsigned rows = static_cast<unsigned>(p.group);
    if (fused) {
      mix_stack_decode(stream, p);
      mix_up_decode(stream, p);
      continue;
    }
    launch_norm(stream, p);
    if (decode) {
      product_decode(stream, product);
    } else {
      product_tiles(stream, product);
    }
    launch_pdl(stream, hidden_kernel, dim3(rows), dim3(256), 0, p);
    if (decode) {
      mix_up_decode(stream, p);
    } else {
      launch_up_tiles(stream, p);
    }
  }
}

}  // namespace flashnext::cuda
