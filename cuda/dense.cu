// Products of fp16 weights (half_product.cuh): the op `dense`, and the launches that `mix` shares.
#include "cpp/base/errors.h"
#include "cuda/half_product.cuh"
#include "cuda/kernels.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

// Where the totals of weight row v go.
struct Target {
  float* to;           // of the group's first row
  std::size_t stride;  // from row to row
  float scale;

  __device__ __forceinline__ void store(int row, float total) const {
    to[static_cast<std::size_t>(row) * stride] = total * scale;
  }
};

__device__ __forceinline__ Target target(const ProductArgs& args, int v, int slices, int slice) {
  if (slices == 1 && args.partial == nullptr) {
    const int i = args.w.find(v);
    const std::size_t out = static_cast<std::size_t>(args.w.first[i + 1] - args.w.first[i]);
    return {args.y[i] + static_cast<std::size_t>(args.row0) * out +
                static_cast<std::size_t>(v - args.w.first[i]),
            out, kSplitUnscale};
  }
  const std::size_t width = static_cast<std::size_t>(args.w.rows());
  return {args.partial +
              static_cast<std::size_t>(slice) * static_cast<std::size_t>(args.group) * width +
              static_cast<std::size_t>(v),
          width, 1.0f};
}

// Block (m-tile of 16 weight rows, slice, fragment of rows); warp w has chunk w of the slice.
// kPlanes: activations are args.planes, not args.x; one kernel for both would spill registers.
template <bool kPlanes>
__global__ void __launch_bounds__(512, 2) decode_kernel(const ProductArgs args) {
  __shared__ float parts[16][16][kFragmentRows];
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m0 = static_cast<int>(blockIdx.x) * 16;
  const int slice = static_cast<int>(blockIdx.y);
  const KSplit split = split_k(args.w.in);
  const int chunk = slice * split.slice_chunks + warp;
  const int chunks = min(split.slice_chunks, split.chunks - slice * split.slice_chunks);
  const int k0 = chunk * kChunkK;

  uint4 top[kChunkBlocks];
  uint4 bottom[kChunkBlocks];
  const bool active = warp < chunks;
  if (active) {
    load_chunk(args.w.row(m0 + g), args.w.row(m0 + g + 8), args.w.in, k0, t, top, bottom);
  }
  pdl_wait();
  const int first = kFragmentRows * static_cast<int>(blockIdx.z);  // row of the group
  const int rows = min(min(rows_now(args.rows) - args.row0, args.group) - first, kFragmentRows);
  if (rows <= 0) return;
  if (active) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const std::size_t in = static_cast<std::size_t>(args.w.in);
    chunk_product(
        top, bottom, k0, t,
        [&](int k, uint4& hi, uint4& lo) {
          if (g >= rows || k >= args.w.in) return;
          if constexpr (!kPlanes) {
            split8(args.x + static_cast<std::size_t>(args.row0 + first + g) * in + k, hi, lo);
          } else {
            const std::size_t offset =
                static_cast<std::size_t>(first + g) * in + static_cast<std::size_t>(k);
            hi = *reinterpret_cast<const uint4*>(args.planes.hi + offset);
            lo = *reinterpret_cast<const uint4*>(args.planes.lo + offset);
          }
        },
        c);
    parts[warp][g][2 * t] = c[0];
    parts[warp][g][2 * t + 1] = c[1];
    parts[warp][g + 8][2 * t] = c[2];
    parts[warp][g + 8][2 * t + 1] = c[3];
  }
  __syncthreads();
  for (int i = tid; i < 16 * rows; i += static_cast<int>(blockDim.x)) {
    const int m = i % 16;
    const int row = i / 16;
    if (m0 + m >= args.w.rows()) continue;
    float total = 0.0f;
    for (int w = 0; w < chunks; ++w) total += parts[w][m][row];
    target(args, m0 + m, split.slices, slice).store(first + row, total);
  }
}

// Block (n-tile, m-tile, slice).
template <int W>
__global__ void __launch_bounds__(kTileThreads, 1) tile_kernel(const ProductArgs args) {
  extern __shared__ __align__(16) char smem[];
  pdl_trigger();
  pdl_wait();
  const int rows = min(rows_now(args.rows) - args.row0, args.group);
  const int n0 = static_cast<int>(blockIdx.x) * kTileN<W>;
  if (n0 >= rows) return;
  const int m0 = static_cast<int>(blockIdx.y) * kTileM;
  const int slice = static_cast<int>(blockIdx.z);
  const KSplit split = split_k(args.w.in);
  const int first = slice * split.slice_chunks;
  float sum[W][4][4];
  tile_product<W>([&](int m) { return args.w.row(m0 + m); }, args.w.in, args.planes, n0, rows,
                  first, min(first + split.slice_chunks, split.chunks), args.deep, smem, sum);
#pragma unroll
  for (int i = 0; i < W; ++i)
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
      const int v = m0 + tile_row<W>(i, half);
      if (v >= args.w.rows()) continue;
      const Target to = target(args, v, split.slices, slice);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int e = half; e < half + 2; ++e) {
          const int row = n0 + tile_column<W>(j, e);
          if (row < rows) to.store(row, sum[i][j][e]);
        }
    }
}

// x (rows, in) -> planes, a row a block.
__global__ void __launch_bounds__(256) split_kernel(const ProductArgs args, const float* x) {
  pdl_trigger();
  pdl_wait();
  const int rows = min(rows_now(args.rows) - args.row0, args.group);
  const int row = static_cast<int>(blockIdx.x);
  if (row >= rows) return;
  const std::size_t in = static_cast<std::size_t>(args.w.in);
  const float* from = x + static_cast<std::size_t>(args.row0 + row) * in;
  const std::size_t to = static_cast<std::size_t>(row) * in;
  for (int k = static_cast<int>(threadIdx.x) * 8; k < args.w.in; k += 2048) {
    uint4 hi;
    uint4 lo;
    split8(from + k, hi, lo);
    *reinterpret_cast<uint4*>(args.planes.hi + to + k) = hi;
    *reinterpret_cast<uint4*>(args.planes.lo + to + k) = lo;
  }
}

// partial -> y, slices in order. Block (row, weight rows in steps of 256).
__global__ void __launch_bounds__(256) join_kernel(const ProductArgs args) {
  pdl_trigger();
  pdl_wait();
  const int rows = min(rows_now(args.rows) - args.row0, args.group);
  const int row = static_cast<int>(blockIdx.x);
  const int v = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (row >= rows || v >= args.w.rows()) return;
  const int slices = split_k(args.w.in).slices;
  float total = 0.0f;
  for (int s = 0; s < slices; ++s) {
    total += args.partial[(static_cast<std::size_t>(s) * static_cast<std::size_t>(args.group) +
                           static_cast<std::size_t>(row)) *
                              static_cast<std::size_t>(args.w.rows()) +
                          static_cast<std::size_t>(v)];
  }
  const int i = args.w.find(v);
  const int out = args.w.first[i + 1] - args.w.first[i];
  args.y[i][static_cast<std::size_t>(args.row0 + row) * static_cast<std::size_t>(out) +
            static_cast<std::size_t>(v - args.w.first[i])] = total * kSplitUnscale;
}

// Rows that share a workspace at a time: many, because the narrow weights of a model have only a
// few tiles of outputs.
constexpr int kDenseGroupRows = 8192;
// Twice as many tiles still run at once.
constexpr int kFewTiles = 66;

struct DenseSpace {
  std::size_t hi, lo, partial, bytes;  // offsets
  int group;
};

DenseSpace dense_space(const DenseArgs& args) {
  DenseSpace space{};
  const int in = args.w[0].in;
  std::size_t outs = 0;
  for (int i = 0; i < args.n; ++i) outs += static_cast<std::size_t>(args.w[i].out);
  space.group = std::min(args.rows.max, kDenseGroupRows);
  const std::size_t group = static_cast<std::size_t>(space.group);
  std::size_t at = 0;
  if (args.rows.max > kDecodeRows) {
    space.hi = at;
    at += align_up(group * static_cast<std::size_t>(in) * 2);
    space.lo = at;
    at += align_up(group * static_cast<std::size_t>(in) * 2);
  }
  const std::size_t slices = static_cast<std::size_t>(split_k(in).slices);
  if (slices > 1) {
    space.partial = at;
    at += align_up(slices * group * outs * sizeof(float));
  }
  space.bytes = at;
  return space;
}

}  // namespace

void product_decode(cudaStream_t stream, const ProductArgs& args) {
  const KSplit split = split_k(args.w.in);
  const dim3 grid(static_cast<unsigned>(ceil_div(args.w.rows(), 16)),
                  static_cast<unsigned>(split.slices),
                  static_cast<unsigned>(ceil_div(args.group, kFragmentRows)));
  const auto kernel = args.x != nullptr ? decode_kernel<false> : decode_kernel<true>;
  launch_pdl(stream, kernel, grid, dim3(static_cast<unsigned>(32 * split.slice_chunks)), 0, args);
}

void product_tiles(cudaStream_t stream, const ProductArgs& args) {
  const auto run = [&]<int W>() {
    const dim3 grid(static_cast<unsigned>(ceil_div(args.group, kTileN<W>)),
                    static_cast<unsigned>(ceil_div(args.w.rows(), kTileM)),
                    static_cast<unsigned>(split_k(args.w.in).slices));
    launch_tiles<W>(stream, tile_kernel<W>, grid, args);
  };
  // The larger tile does more with what it loads; the smaller one gives work to more processors.
  const int large =
      ceil_div(args.group, kTileN<4>) * ceil_div(args.w.rows(), kTileM) * split_k(args.w.in).slices;
  if (large > kFewTiles) {
    run.operator()<4>();
  } else {
    run.operator()<2>();
  }
}

std::size_t workspace_bytes(const DenseArgs& args) { return dense_space(args).bytes; }

void dense(cudaStream_t stream, const DenseArgs& args) {
  check(args.n >= 1 && args.n <= kMaxLinears, "dense: 1 to 4 weights");
  check(args.w[0].in % 8 == 0, "dense: `in` must be a multiple of 8");
  if (args.rows.max <= 0) return;
  const DenseSpace space = dense_space(args);
  check(args.workspace.bytes >= space.bytes, "dense: workspace too small");
  char* work = static_cast<char*>(args.workspace.data);
  ProductArgs product{};
  product.rows = args.rows;
  product.w.n = args.n;
  product.w.in = args.w[0].in;
  for (int i = 0; i < args.n; ++i) {
    check(args.w[i].in == args.w[0].in, "dense: weights of one launch share `in`");
    product.w.w[i] = args.w[i].w;
    product.w.first[i + 1] = product.w.first[i] + args.w[i].out;
    product.y[i] = args.y[i];
  }
  const bool joined = split_k(product.w.in).slices > 1;
  product.partial = joined ? reinterpret_cast<float*>(work + space.partial) : nullptr;
  const bool decode = args.rows.max <= kDecodeRows;
  const int step = decode ? kDecodeRows : kDenseGroupRows;
  if (!decode) {
    product.planes = {reinterpret_cast<std::uint16_t*>(work + space.hi),
                      reinterpret_cast<std::uint16_t*>(work + space.lo)};
  }
  for (int row0 = 0; row0 < args.rows.max; row0 += step) {
    product.row0 = row0;
    product.group = std::min(args.rows.max - row0, step);
    const unsigned rows = static_cast<unsigned>(product.group);
    if (decode) {
      product.x = args.x;
      product_decode(stream, product);
    } else {
      launch_pdl(stream, split_kernel, dim3(rows), dim3(256), 0, product, args.x);
      product_tiles(stream, product);
    }
    if (joined) {
      const unsigned across = static_cast<unsigned>(ceil_div(product.w.rows(), 256));
      launch_pdl(stream, join_kernel, dim3(rows, across), dim3(256), 0, product);
    }
  }
}

}  // namespace flashnext::cuda
