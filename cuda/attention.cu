// Attention over the tokens that a row may see (attention_tile.cuh has the arithmetic).
//
// Prefill: a block walks the tiles of one row and kv head, keys of the next tile and values of this
// one under way while it computes. Decode: a block a tile, whose partial results go
// through the workspace to a second kernel that joins them in the same order.
#include "cuda/attention_tile.cuh"
#include "cuda/check.h"
#include "cuda/dependent.cuh"
#include "cuda/kernels.h"

#include <algorithm>

namespace flashnext::cuda {
namespace {

using namespace attn;

// Blocks a multiprocessor that its shared memory allows.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kWalkBlocks = 1;
#else
constexpr int kWalkBlocks = 3;
#endif

int max_tiles(const AttentionArgs& a) {
  const int tokens = std::min(a.dims.max_blocks * kBlock + kBlock - 1, a.max_context);
  return (tokens + kTile - 1) / kTile;
}

__global__ void __launch_bounds__(kTileThreads, kWalkBlocks) walk_kernel(const AttentionArgs a) {
  extern __shared__ float4 shared_raw[];
  TileShared& shared = *reinterpret_cast<TileShared*>(shared_raw);
  std::int32_t* quads = reinterpret_cast<std::int32_t*>(&shared + 1);  // (max_blocks + 1)
  const int r = static_cast<int>(blockIdx.x) / a.dims.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.x) % a.dims.kv_heads;
  if (r >= a.step.head->rows) return;
  const Row row = a.step.rows[r];
  const int group = a.dims.heads / a.dims.kv_heads;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;

  const TokenList list = token_list(a, r, row.pos, a.count[r]);
  for (int i = tid; i < (list.tokens + kBlock - 1) / kBlock; i += kTileThreads) {
    const int pos = i < list.selected ? list.blocks[i] * kBlock : list_tail(list, i);
    quads[i] = token_row(a, row.lane, kv_head, pos);
  }
  const std::int64_t head0 = static_cast<std::int64_t>(r) * a.dims.heads + kv_head * group;
  Query query;
  load_query(query, a.q + head0 * kHeadDim, group);
  __syncthreads();
  const std::uint32_t keys = shared_address(shared.k);
  const std::uint32_t values = shared_address(shared.v);
  fetch_rows(keys, a.planes.k, quads, list.tokens);
  cp_async_commit();

  float joined[8][4] = {};
  float row_max = -__int_as_float(0x7F800000);  // of head tid / 8
  float row_sum = 0.0f;
  for (int first = 0; first < list.tokens; first += kTile) {
    const int valid = min(list.tokens - first, kTile);
    cp_async_wait<0>();
    __syncthreads();  // keys are here; all warps are done with the values before
    fetch_rows(values, a.planes.v, quads + first / kBlock, valid);
    cp_async_commit();
    tile_scores(shared, query);
    __syncthreads();  // scores are complete; all warps are done with the keys
    if (first + kTile < list.tokens) {
      fetch_rows(keys, a.planes.k, quads + (first + kTile) / kBlock, list.tokens - first - kTile);
    }
    cp_async_commit();
    const TileStats tile = tile_softmax(shared, valid);
    const Join factors = join_factors(row_max, tile.max);
    row_max = fmaxf(row_max, tile.max);
    row_sum = join(row_sum, tile.sum, factors.keep, factors.take);
    if ((tid & 7) == 0) {
      shared.keep(tid >> 3) = factors.keep;
      shared.take(tid >> 3) = factors.take;
      shared.total(tid >> 3) = row_sum;
    }
    cp_async_wait<1>();
    __syncthreads();  // values, probabilities and factors are here
    float acc[8][4];
    tile_values(shared, acc);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float keep = shared.keep(lane / 4 + 8 * half);
      const float take = shared.take(lane / 4 + 8 * half);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        joined[n][2 * half] = join(joined[n][2 * half], acc[n][2 * half], keep, take);
        joined[n][2 * half + 1] = join(joined[n][2 * half + 1], acc[n][2 * half + 1], keep, take);
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = lane / 4 + 8 * half;
    if (head >= group) continue;
    const float total = shared.total(head);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int dim = 64 * warp + 8 * n + 2 * (lane & 3);
      const float2 gate =
          *reinterpret_cast<const float2*>(a.qg + ((head0 + head) * 2 + 1) * kHeadDim + dim);
      *reinterpret_cast<float2*>(a.y + (head0 + head) * kHeadDim + dim) =
          float2{finish(joined[n][2 * half], total, gate.x),
                 finish(joined[n][2 * half + 1], total, gate.y)};
    }
  }
}

// Partial results of the tiles: values (rows, kv_heads, tiles, group, head_dim), then maximum and
// sum (rows, kv_heads, tiles, group).
struct Partials {
  float* values;
  float2* stats;
  int tiles;
};

__host__ __device__ std::int64_t partial_count(const AttentionArgs& a, int tiles) {
  return static_cast<std::int64_t>(a.step.max_rows) * a.dims.heads * tiles;
}

__global__ void __launch_bounds__(kTileThreads, 2)
    tile_kernel(const AttentionArgs a, const Partials partials) {
  extern __shared__ float4 shared_raw[];
  TileShared& shared = *reinterpret_cast<TileShared*>(shared_raw);
  __shared__ std::int32_t quads[kTileQuads];
  wait_for_previous();
  let_next_start();
  const int r = static_cast<int>(blockIdx.z);
  const int kv_head = static_cast<int>(blockIdx.y);
  const int tile = static_cast<int>(blockIdx.x);
  const int first = tile * kTile;
  const int group = a.dims.heads / a.dims.kv_heads;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid >> 5;
  const int lane = tid & 31;
  // Read together what depends on nothing, some of it for naught: a row waits for two reads here.
  const int rows = a.step.head->rows;
  const Row row = a.step.rows[r];
  const int count = a.count[r];
  const int entry = first / kBlock + tid;
  const int block = tid < kTileQuads && entry < a.dims.max_blocks
                        ? a.blocks[static_cast<std::int64_t>(r) * a.dims.max_blocks + entry]
                        : 0;
  Query query;
  load_query(query,
             a.q + (static_cast<std::int64_t>(r) * a.dims.heads + kv_head * group) * kHeadDim,
             group);
  if (r >= rows) return;
  const TokenList list = token_list(a, r, row.pos, count);
  if (first >= list.tokens) return;
  const int valid = min(list.tokens - first, kTile);
  if (tid * kBlock < valid) {
    const int pos = entry < list.selected ? block * kBlock : list_tail(list, entry);
    quads[tid] = token_row(a, row.lane, kv_head, pos);
  }
  __syncthreads();
  fetch_rows(shared_address(shared.k), a.planes.k, quads, valid);
  cp_async_commit();
  fetch_rows(shared_address(shared.v), a.planes.v, quads, valid);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  tile_scores(shared, query);
  __syncthreads();
  const TileStats stats = tile_softmax(shared, valid);
  const std::int64_t at =
      ((static_cast<std::int64_t>(r) * a.dims.kv_heads + kv_head) * partials.tiles + tile) * group;
  if ((tid & 7) == 0 && tid / 8 < group) partials.stats[at + tid / 8] = {stats.max, stats.sum};
  cp_async_wait<0>();
  __syncthreads();
  float acc[8][4];
  tile_values(shared, acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int head = lane / 4 + 8 * half;
    if (head >= group) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<float2*>(partials.values + (at + head) * kHeadDim + 64 * warp + 8 * n +
                                 2 * (lane & 3)) = float2{acc[n][2 * half], acc[n][2 * half + 1]};
    }
  }
}

// A block a row and head, a thread a dim.
__global__ void __launch_bounds__(kHeadDim)
    join_kernel(const AttentionArgs a, const Partials partials) {
  extern __shared__ float4 shared_raw[];
  float2* stats = reinterpret_cast<float2*>(shared_raw);            // (tiles)
  Join* factors = reinterpret_cast<Join*>(stats + partials.tiles);  // (tiles)
  const int r = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int rows = a.step.head->rows;
  if (r >= rows) return wait_for_previous();  // the buffers may end with the step's last row
  const Row row = a.step.rows[r];
  const int count = a.count[r];
  const std::int64_t out = static_cast<std::int64_t>(r) * a.dims.heads + head;
  const float gate = a.qg[(2 * out + 1) * kHeadDim + tid];
  const int group = a.dims.heads / a.dims.kv_heads;
  const int tiles = (token_list(a, r, row.pos, count).tokens + kTile - 1) / kTile;
  const std::int64_t at =
      (static_cast<std::int64_t>(r) * a.dims.kv_heads + head / group) * partials.tiles * group +
      head % group;
  wait_for_previous();
  let_next_start();
  const float* values = partials.values + at * kHeadDim + tid;
  const std::int64_t stride = static_cast<std::int64_t>(group) * kHeadDim;
  constexpr int kAhead = 36;  // loads under way: all tiles of the usual budget
  float tile[kAhead];
  auto read = [&](int t0) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) tile[i] = t0 + i < tiles ? values[(t0 + i) * stride] : 0.0f;
  };
  read(0);
  for (int t = tid; t < tiles; t += kHeadDim) stats[t] = partials.stats[at + t * group];
  __syncthreads();
  for (int t = tid; t < tiles; t += kHeadDim) {
    float before = -__int_as_float(0x7F800000);
    for (int i = 0; i < t; ++i) before = fmaxf(before, stats[i].x);
    factors[t] = join_factors(before, stats[t].x);
  }
  __syncthreads();
  float joined = 0.0f;
  float total = 0.0f;
  for (int t0 = 0; t0 < tiles; t0 += kAhead) {
    if (t0 > 0) read(t0);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (t0 + i >= tiles) break;
      const Join f = factors[t0 + i];
      total = join(total, stats[t0 + i].y, f.keep, f.take);
      joined = join(joined, tile[i], f.keep, f.take);
    }
  }
  a.y[out * kHeadDim + tid] = finish(joined, total, gate);
}

}  // namespace

std::size_t workspace_bytes(const AttentionArgs& args) {
  if (args.step.max_rows > kDecodeRows) return 0;
  return static_cast<std::size_t>(partial_count(args, max_tiles(args))) *
         (kHeadDim * sizeof(float) + sizeof(float2));
}

void attention(cudaStream_t stream, const AttentionArgs& args) {
  check_dims(args.dims);
  const unsigned rows = static_cast<unsigned>(args.step.max_rows);
  const unsigned heads = static_cast<unsigned>(args.dims.heads);
  const unsigned kv_heads = static_cast<unsigned>(args.dims.kv_heads);
  if (args.step.max_rows > kDecodeRows) {
    const int bytes = static_cast<int>(sizeof(TileShared)) + (args.dims.max_blocks + 1) * 4;
    FN_CUDA(cudaFuncSetAttribute(walk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    walk_kernel<<<rows * kv_heads, kTileThreads, bytes, stream>>>(args);
    return;
  }
  check(args.workspace.bytes >= workspace_bytes(args), "attention: workspace too small");
  const int tiles = max_tiles(args);
  float* values = static_cast<float*>(args.workspace.data);
  const Partials partials{
      values, reinterpret_cast<float2*>(values + partial_count(args, tiles) * kHeadDim), tiles};
  const int bytes = static_cast<int>(sizeof(TileShared));
  FN_CUDA(cudaFuncSetAttribute(tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  launch_dependent(stream, dim3(static_cast<unsigned>(tiles), kv_heads, rows), kTileThreads, bytes,
                   tile_kernel, args, partials);
  const int join_bytes = tiles * static_cast<int>(sizeof(Join) + sizeof(float2));
  launch_dependent(stream, dim3(heads, rows), kHeadDim, join_bytes, join_kernel, args, partials);
}

}  // namespace flashnext::cuda
