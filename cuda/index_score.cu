#include "cuda/attention.cuh"
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/dependent.cuh"
#include "cuda/index_score.cuh"

namespace flashnext::cuda::attn {
namespace {

constexpr int kThreads = 256;
constexpr int kQueryFloats = kIndexHeads * kIndexDim;
constexpr int kKeyStride = kIndexDim + 4;  // floats; padding keeps the lanes on different banks
constexpr float kScale = 0.088388347648318447f;  // 128^-0.5

// 64 pooled keys of a lane, from block `first`, to shared memory.
__device__ __forceinline__ void fetch_keys(float* keys, const IndexSelectArgs& a, int lane_id,
                                           int first, int blocks) {
  constexpr int kPieces = kIndexDim / 4;
  constexpr int kPageBlocks = kPageTokens / kBlock;
  const std::int32_t* pages = a.step.pages + static_cast<std::int64_t>(lane_id) * a.step.max_pages;
  for (int i = static_cast<int>(threadIdx.x); i < blocks * kPieces; i += kThreads) {
    const int b = i / kPieces;
    const int at = 4 * (i % kPieces);
    const std::int64_t page = pages[(first + b) / kPageBlocks];
    cp_async16(
        &keys[b * kKeyStride + at],
        a.planes.index_pooled + (page * kPageBlocks + (first + b) % kPageBlocks) * kIndexDim + at);
  }
}

__device__ __forceinline__ void add_dot(float4 q, float4 k, float& sum) {
  sum = fmaf(q.x, k.x, sum);
  sum = fmaf(q.y, k.y, sum);
  sum = fmaf(q.z, k.z, sum);
  sum = fmaf(q.w, k.w, sum);
}

__device__ __forceinline__ float join_heads(float h0, float h1, float h2, float h3) {
  float s = 0.0f + fmaxf(h0, 0.0f);
  s += fmaxf(h1, 0.0f);
  s += fmaxf(h2, 0.0f);
  s += fmaxf(h3, 0.0f);
  return s * kScale;
}

// Few rows: a block takes one row and 64 selection blocks, a thread one head of one of them.
__global__ void __launch_bounds__(kThreads)
    few_kernel(const IndexSelectArgs a, float* scores, std::int64_t stride, int row0) {
  __shared__ __align__(16) float keys[kScoreBlocks * kKeyStride];
  __shared__ __align__(16) float query[kIndexHeads * kKeyStride];
  const int r = row0 + static_cast<int>(blockIdx.x);
  const int rows = a.step.head->rows;
  const Row row = a.step.rows[r];
  wait_for_previous();
  let_next_start();
  if (r >= rows) return;
  const int complete = (row.pos + 1) / kBlock;
  const int first = static_cast<int>(blockIdx.y) * kScoreBlocks;
  if (complete <= a.dims.max_blocks || first >= complete) return;
  fetch_keys(keys, a, row.lane, first, min(kScoreBlocks, complete - first));
  for (int i = static_cast<int>(threadIdx.x); i < kQueryFloats / 4; i += kThreads) {
    cp_async16(&query[(i / (kIndexDim / 4)) * kKeyStride + 4 * (i % (kIndexDim / 4))],
               a.iq + static_cast<std::int64_t>(r) * kQueryFloats + 4 * i);
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int b = static_cast<int>(threadIdx.x) / kIndexHeads;
  const int h = static_cast<int>(threadIdx.x) % kIndexHeads;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < kIndexDim; k += 4) {
    add_dot(*reinterpret_cast<const float4*>(&query[h * kKeyStride + k]),
            *reinterpret_cast<const float4*>(&keys[b * kKeyStride + k]), sum);
  }
  float heads[kIndexHeads];
#pragma unroll
  for (int i = 0; i < kIndexHeads; ++i) {
    heads[i] = __shfl_sync(0xFFFFFFFFu, sum, (lane & ~(kIndexHeads - 1)) | i);
  }
  if (h == 0 && first + b < complete) {
    scores[blockIdx.x * stride + first + b] = join_heads(heads[0], heads[1], heads[2], heads[3]);
  }
}

constexpr int kTileRows = 32;
constexpr int kTilesBlock = 4;                  // tiles of selection blocks that one block walks
constexpr int kQueryStride = kQueryFloats + 4;  // floats
constexpr int kManyBytes =
    static_cast<int>(sizeof(float)) * (kTileRows * kQueryStride + kScoreBlocks * kKeyStride);

// Many rows: 32 rows against 64 selection blocks at a time, a thread two rows and four blocks.
__global__ void __launch_bounds__(kThreads)
    many_kernel(const IndexSelectArgs a, float* scores, std::int64_t stride, int row0, int row1) {
  extern __shared__ float4 shared_raw[];
  float* queries = reinterpret_cast<float*>(shared_raw);
  float* keys = queries + kTileRows * kQueryStride;
  const int tile0 = row0 + static_cast<int>(blockIdx.x) * kTileRows;
  const int end = min(min(tile0 + kTileRows, row1), a.step.head->rows);
  const int tid = static_cast<int>(threadIdx.x);
  const int row_group = tid / 16;
  const int block_group = tid % 16;
  // Rows of one sequence at a time, for they share the keys; mostly that is the whole tile.
  for (int begin = tile0; begin < end;) {
    const Row head_row = a.step.rows[begin];
    const Segment segment = a.step.segments[head_row.segment];
    const int stop = min(end, segment.row0 + segment.rows);
    const int rows = stop - begin;
    const int most_complete = (head_row.pos + rows) / kBlock;
    const int group_first = static_cast<int>(blockIdx.y) * kTilesBlock * kScoreBlocks;
    if (most_complete > a.dims.max_blocks && group_first < most_complete) {
      __syncthreads();  // the queries of the sequence before are no longer read
      for (int i = tid; i < rows * (kQueryFloats / 4); i += kThreads) {
        const int r = i / (kQueryFloats / 4);
        const int at = 4 * (i % (kQueryFloats / 4));
        cp_async16(&queries[r * kQueryStride + at],
                   a.iq + static_cast<std::int64_t>(begin + r) * kQueryFloats + at);
      }
      for (int tile = 0; tile < kTilesBlock; ++tile) {
        const int first = group_first + tile * kScoreBlocks;
        if (first >= most_complete) break;
        if (tile > 0) __syncthreads();  // the keys of the tile before are no longer read
        fetch_keys(keys, a, head_row.lane, first, min(kScoreBlocks, most_complete - first));
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        float sums[2][kIndexHeads][4] = {};
        const float* q0 = queries + 2 * row_group * kQueryStride;
        const float* k0 = keys + block_group * kKeyStride;
#pragma unroll 1
        for (int k = 0; k < kIndexDim; k += 4) {
          float4 key[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            key[j] = *reinterpret_cast<const float4*>(k0 + 16 * j * kKeyStride + k);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < kIndexHeads; ++h) {
              const float4 q =
                  *reinterpret_cast<const float4*>(q0 + i * kQueryStride + h * kIndexDim + k);
#pragma unroll
              for (int j = 0; j < 4; ++j) add_dot(q, key[j], sums[i][h][j]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int r = 2 * row_group + i;
          const int complete = (head_row.pos + r + 1) / kBlock;
          if (r >= rows || complete <= a.dims.max_blocks) continue;
          float* to = scores + (begin + r - row0) * stride + first + block_group;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (first + block_group + 16 * j < complete) {
              to[16 * j] = join_heads(sums[i][0][j], sums[i][1][j], sums[i][2][j], sums[i][3][j]);
            }
          }
        }
      }
    }
    begin = stop;
  }
}

}  // namespace

void index_scores(cudaStream_t stream, const IndexSelectArgs& args, float* scores,
                  std::int64_t stride, int row0, int rows) {
  const int tiles = static_cast<int>(stride / kScoreBlocks);
  if (args.step.max_rows <= kDecodeRows) {
    launch_dependent(stream, dim3(static_cast<unsigned>(rows), static_cast<unsigned>(tiles)),
                     kThreads, 0, few_kernel, args, scores, stride, row0);
    return;
  }
  FN_CUDA(
      cudaFuncSetAttribute(many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kManyBytes));
  const dim3 grid(static_cast<unsigned>((rows + kTileRows - 1) / kTileRows),
                  static_cast<unsigned>((tiles + kTilesBlock - 1) / kTilesBlock));
  many_kernel<<<grid, kThreads, kManyBytes, stream>>>(args, scores, stride, row0, row0 + rows);
}

}  // namespace flashnext::cuda::attn
