// gdn_conv for the rows of a decode step, in one kernel.
//
// The first clusters of blocks make the gates: a cluster has 16 outputs of a and b for up to 8
// rows, a warp of it one chunk of k (half_product.cuh: the order of `dense`, so its bits), and the
// chunks meet through distributed shared memory. The other blocks have four heads of one segment, a
// warp each: a thread owns four channels over all rows of the segment, reads their window, slides
// along the rows and leaves the new window, so that it does not matter whether the slots are the
// same.
//
// NOTE: x and the window are read before the wait for the predecessor. They are complete by then:
// ops.h says that they were before the predecessor started, and this kernel starts when every block
// of the predecessor has called pdl_trigger() or ended. The product of the projections calls it
// after its own pdl_wait(), that is, when all work before it is complete.
#include "cuda/exl3_jobs.h"
#include "cuda/gdn.cuh"
#include "cuda/half_product.cuh"
#include "cuda/launch.h"

#include <cooperative_groups.h>
#include <type_traits>

namespace flashnext::cuda::gdn {

namespace {

namespace cg = cooperative_groups;

constexpr int kWarps = 4;
constexpr int kCluster = 4;
constexpr int kMaxChunks = kWarps * kCluster;
constexpr int kTileOutputs = 16;

template <int kRows>
struct Parts {
  struct None {};
  float of_chunk[kWarps][kTileOutputs][kFragmentRows];  // read by the cluster
  std::conditional_t<(kRows <= kStagedRows), ChunkPlanes<kRows>, None> planes[kWarps];
};

// Output v of a, then b; null past the end.
__device__ __forceinline__ const std::uint16_t* weight_row(const GdnConvArgs& a, int v) {
  const int heads = a.dims.v_heads;
  if (v >= 2 * heads) return nullptr;
  const std::uint16_t* w = v < heads ? a.a.w : a.b.w;
  return w + static_cast<std::size_t>(v < heads ? v : v - heads) * static_cast<std::size_t>(a.a.in);
}

__host__ __device__ constexpr int gate_tiles(int v_heads) {
  return ceil_div(2 * v_heads, kTileOutputs);
}

// Block `block` of the clusters that make the gates; of fewer rows than a fragment has, all are in
// one. Rows beyond the step's lie in buffers made for more: their products are made of anything and
// never written.
template <int kRows>
__device__ __forceinline__ void make_gates(const GdnConvArgs& a, int block, Parts<kRows>& parts) {
  cg::cluster_group cluster = cg::this_cluster();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int rank = block % kCluster;  // of the block in its cluster
  const int tiles = gate_tiles(a.dims.v_heads);
  const int m0 = block / kCluster % tiles * kTileOutputs;
  const int row0 = kRows < kFragmentRows ? 0 : block / kCluster / tiles * kFragmentRows;
  const int in = a.a.in;
  const int chunks = split_k(in).chunks;
  const int chunk = rank * kWarps + warp;
  const bool is_active = chunk < chunks;
  uint4 top[kChunkBlocks];
  uint4 bottom[kChunkBlocks];
  if (is_active) {
    load_chunk(weight_row(a, m0 + g), weight_row(a, m0 + g + 8), in, chunk * kChunkK, t, top,
               bottom);
  }
  const int rows = min(a.step.head->rows, a.step.max_rows) - row0;
  // The results are shared out: the first warp of a block has four outputs of every row.
  const int m = kTileOutputs / kCluster * rank + lane / kFragmentRows;
  const int row = lane % kFragmentRows;
  const int heads = a.dims.v_heads;
  const bool is_decay = m0 + m < heads;
  const float rate = is_decay ? a.rate[m0 + m] : 0.0f;
  const float dt_bias = is_decay ? a.dt_bias[m0 + m] : 0.0f;
  if (is_active) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (kRows <= kStagedRows) {
      staged_product(top, bottom, a.x, a.step.max_rows, in, chunk * kChunkK, lane,
                     parts.planes[warp], c);
    } else {
      const float* x = a.x + static_cast<std::size_t>(row0 + g) * static_cast<std::size_t>(in);
#pragma unroll
      for (int i = 0; i < kChunkBlocks; ++i) {
        const int k = chunk * kChunkK + i * kBlockK + 8 * t;
        uint4 hi = {0, 0, 0, 0};
        uint4 lo = {0, 0, 0, 0};
        if (g < rows && k < in) {
          // From L2: a multiprocessor may still hold the x of the layer before.
          split8(__ldcg(reinterpret_cast<const float4*>(x + k)),
                 __ldcg(reinterpret_cast<const float4*>(x + k + 4)), hi, lo);
        }
        mma_block(c, top[i], bottom[i], hi, lo);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) parts.of_chunk[warp][g + 8 * (e / 2)][2 * t + e % 2] = c[e];
  }
  cluster.sync();
  float part[kMaxChunks];
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) {
      part[i] = 0.0f;
      if (i < chunks) {
        part[i] = cluster.map_shared_rank(&parts, i / kWarps)->of_chunk[i % kWarps][m][row];
      }
    }
  }
  cluster.sync();  // the others' shared memory is read
  float gate = 0.0f;
  if (warp == 0) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) {
      if (i < chunks) total += part[i];
    }
    total *= kSplitUnscale;
    gate = is_decay ? decay_of(total, rate, dt_bias) : math::sigmoid(total);
  }
  pdl_wait();
  pdl_trigger();
  if (warp == 0 && row < rows && m0 + m < 2 * heads) {
    float* to = is_decay ? a.decay + m0 + m : a.beta + m0 + m - heads;
    to[static_cast<std::size_t>(row0 + row) * static_cast<std::size_t>(heads)] = gate;
  }
}

// Block `block` of those that convolve, kRows rows at a time.
template <int kRows>
__device__ __forceinline__ void convolve(const GdnConvArgs& a, int block) {
  const int heads = 2 * a.dims.k_heads + a.dims.v_heads;
  const int groups = (heads + kWarps - 1) / kWarps;
  const int index = block / groups;
  const int head = block % groups * kWarps + static_cast<int>(threadIdx.x) / 32;
  if (index >= a.step.max_segments || head >= heads) {
    pdl_wait();
    pdl_trigger();
    return;
  }
  const Segment segment = a.step.segments[index];  // read along with the head
  const int segments = a.step.head->segments;
  const std::int64_t channels = static_cast<std::int64_t>(heads) * kHead;
  const int channel = head * kHead + 4 * (static_cast<int>(threadIdx.x) % 32);
  float4 w[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) w[c] = load4(a.conv + (channel + c) * kTaps);
  if (index >= segments) {
    pdl_wait();
    pdl_trigger();
    return;
  }
  float4 x[kTaps];
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) {
    x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (segment.pos0 > 0) {
      const float* from = a.window + segment.state_in * a.dims.slot_stride + i * channels + channel;
      x[i] = __ldcg(reinterpret_cast<const float4*>(from));
    }
  }
  pdl_wait();
  pdl_trigger();

  const float* u = a.u + segment.row0 * channels + channel;
  float* qkv = a.qkv + segment.row0 * channels + channel;
#pragma unroll 1
  for (int row = 0; row < segment.rows; row += kRows) {
    float4 next[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r < segment.rows) next[r] = load4(u + (row + r) * channels);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= segment.rows) break;
      x[3] = next[r];
      *reinterpret_cast<float4*>(qkv + (row + r) * channels) = conv_row(w, x, head, a.dims);
      x[0] = x[1];
      x[1] = x[2];
      x[2] = x[3];
    }
    if (kRows < kFragmentRows) break;  // that was all
  }
  float* to = a.window + segment.state_out * a.dims.slot_stride + channel;
#pragma unroll
  for (int i = 0; i < kTaps - 1; ++i) *reinterpret_cast<float4*>(to + i * channels) = x[i];
}

__host__ __device__ constexpr int gate_blocks(const GdnConvArgs& args) {
  return kCluster * gate_tiles(args.dims.v_heads) * ceil_div(args.step.max_rows, kFragmentRows);
}

template <int kRows>
__global__ void __launch_bounds__(32 * kWarps)
    few_kernel(const __grid_constant__ GdnConvArgs args) {
  __shared__ Parts<kRows> parts;
  const int block = static_cast<int>(blockIdx.x);
  const int first = gate_blocks(args);
  if (block < first) {
    make_gates<kRows>(args, block, parts);
  } else {
    convolve<kRows>(args, block - first);
  }
}

}  // namespace

bool is_few(const GdnConvArgs& args) {
  return args.step.max_rows <= kDecodeRows && split_k(args.a.in).chunks <= kMaxChunks;
}

void conv_few(cudaStream_t stream, const GdnConvArgs& args) {
  const int groups = ceil_div(2 * args.dims.k_heads + args.dims.v_heads, kWarps);
  const int blocks = gate_blocks(args) + groups * args.step.max_segments;
  const dim3 grid(static_cast<unsigned>(ceil_div(blocks, kCluster) * kCluster));
  const auto run = [&]<int kRows>() {
    launch_pdl_cluster(stream, few_kernel<kRows>, grid, dim3(32 * kWarps), 0, dim3(kCluster), args);
  };
  if (args.step.max_rows == 1) return run.operator()<1>();
  if (args.step.max_rows <= 4) return run.operator()<4>();
  run.operator()<kFragmentRows>();
}

}  // namespace flashnext::cuda::gdn
