// The integer linear for many rows: tiles of 128 outputs x up to 64 positions on the int8 tensor
// cores.
//
// A warp owns 16 outputs. It decodes its weights straight into A fragments, as two unsigned planes
// of U = B + 2 = 4 h + l, and multiplies both with both digits of every position: four products.
// Sums of one digit share an accumulator: the h products of 64 inputs are summed apart and added
// times four. Two blocks a multiprocessor, so that some warps decode while others keep the tensor
// core busy.
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_locate.cuh"
#include "cuda/exl3_trellis.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 3;
constexpr int kChunk = 64;  // inputs of a step
constexpr int kEights = kTileRows / 8;
constexpr int kPlaneBytes = kTileRows * kChunk;
constexpr int kOutPitch = 132;  // floats; no bank conflicts when fragments are stored

constexpr int stage_bytes(int digits, int words) { return digits * kPlaneBytes + 64 * words; }

constexpr int smem_bytes(int digits, int words) {
  const int ring = kStages * stage_bytes(digits, words);
  const int out = kTileRows * kOutPitch * 4;
  return ring > out ? ring : out;
}

// Weights of one lane for 64 inputs: A fragments of two k32 steps.
struct Fragments {
  std::uint32_t high[4][2];  // (k-tile, output g or g + 8), four inputs each
  std::uint32_t low[4][2];
};

// The four-byte sum of x, plus 2, times 64: h in bits 8..15, l in bits 6..7.
__device__ __forceinline__ std::uint32_t scaled_sum(std::uint32_t x) {
  return __dp4a(x, 0x40404040u, 128u);
}

template <int kWords>
__device__ __forceinline__ void decode(const std::uint32_t* tile, int tile_pitch,
                                       const TileLane<kWords>& lane, Fragments& f) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    std::uint32_t x[8];
    lane.products(tile + t * tile_pitch, x);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const std::uint32_t a = scaled_sum(x[4 * c]) + (scaled_sum(x[4 * c + 1]) << 16);
      const std::uint32_t b = scaled_sum(x[4 * c + 2]) + (scaled_sum(x[4 * c + 3]) << 16);
      f.high[t][c] = __byte_perm(a, b, 0x7531);
      f.low[t][c] = __byte_perm(a, b, 0x6420) >> 6;  // the six low bits of every byte are zero
    }
  }
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&b)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address));
}

// acc += digits of `positions` positions times the fragments. The matrices of the next eight
// positions are on their way during the products of these.
template <int kDigits>
__device__ __forceinline__ void multiply(std::uint32_t planes, int positions, const Fragments& f,
                                         int (&acc)[kEights][kDigits][4]) {
  std::uint32_t b[2][kDigits][4];
  const auto load = [&](int n) {
#pragma unroll
    for (int d = 0; d < kDigits; ++d) {
      load_matrices(b[n & 1][d],
                    planes + static_cast<std::uint32_t>(d * kPlaneBytes + n * 8 * kChunk));
    }
  };
  load(0);
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
    if (8 * n >= positions) break;
    if (n + 1 < kEights) load(n + 1);
    int part[kDigits][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        mma_u8s8(part[d], f.high[2 * step][0], f.high[2 * step][1], f.high[2 * step + 1][0],
                 f.high[2 * step + 1][1], b[n & 1][d][2 * step], b[n & 1][d][2 * step + 1]);
        mma_u8s8(acc[n][d], f.low[2 * step][0], f.low[2 * step][1], f.low[2 * step + 1][0],
                 f.low[2 * step + 1][1], b[n & 1][d][2 * step], b[n & 1][d][2 * step + 1]);
      }
    }
#pragma unroll
    for (int d = 0; d < kDigits; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][d][i] += 4 * part[d][i];
    }
  }
}

// Copies chunks of a tile into the ring: digits (digit, position, 64) with 16-byte parts swizzled,
// then packed weights (4 k-tiles, 8 tiles). A thread always copies the same parts.
template <int kWords, int kDigits>
class Fetch {
 public:
  __device__ Fetch(const Strip& strip, const std::int8_t* planes, std::int64_t plane_bytes, int in,
                   int words, int positions)
      : plane_bytes_(plane_bytes), step_(4 * strip.pitch) {
    const int thread = static_cast<int>(threadIdx.x);
    const int position = thread >> 2;
    const int part = thread & 3;
    digits_ = planes + static_cast<std::int64_t>(position) * in + 16 * part;
    digits_to_ =
        static_cast<std::uint32_t>(position * kChunk + 16 * (part ^ ((position >> 1) & 3)));
    is_position_ = position < positions;
    const int w = kWords != 0 ? kWords : words;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = thread + i * kThreads;
      is_weight_[i] = at < 4 * w;
      weights_[i] = strip.trellis + at / w * strip.pitch + 16 * (at % w);
    }
  }

  // The next chunk, to the stage at a shared address.
  __device__ __forceinline__ void next(std::uint32_t stage) {
    if (is_position_) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        cp_async16_shared(stage + static_cast<unsigned>(d * kPlaneBytes) + digits_to_,
                          digits_ + d * plane_bytes_);
      }
    }
    digits_ += kChunk;
    const std::uint32_t to = stage + kDigits * kPlaneBytes + 16 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (is_weight_[i])
        cp_async16_shared(to + static_cast<unsigned>(i * 16 * kThreads), weights_[i]);
      weights_[i] += step_;
    }
  }

 private:
  std::int64_t plane_bytes_;
  std::int64_t step_;
  const std::int8_t* digits_;
  const std::byte* weights_[2];
  std::uint32_t digits_to_;
  bool is_position_;
  bool is_weight_[2];
};

template <int kWords, int kDigits>
__global__ void __launch_bounds__(kThreads, 2) gemm_kernel(const __grid_constant__ Jobs jobs) {
  static_assert(kThreads == 4 * kTileRows, "a thread copies one part of a position");
  extern __shared__ uint4 smem[];
  __shared__ RowScale scales[kTileRows];
  pdl_wait();
  pdl_trigger();
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int words = kWords != 0 ? kWords : jobs.projection[0].words;
  const std::uint32_t stage_size = static_cast<std::uint32_t>(stage_bytes(kDigits, words));
  const std::uint32_t ring = shared_address(smem);
  const std::uint32_t ring_end = ring + kStages * stage_size;
  const int chunks = jobs.in / kChunk;
  const TileLane<kWords> tile_lane(lane, words);
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  const int pairs = jobs.rows.scale * *jobs.rows.count * jobs.slots - jobs.first;
  const int launch_positions = min(max(pairs, 0), jobs.capacity);
  const int tiles =
      jobs.experts != nullptr ? *jobs.num_tiles : (launch_positions + kTileRows - 1) / kTileRows;
  const std::uint32_t lane_at =
      static_cast<std::uint32_t>((lane & 7) * kChunk + 16 * ((lane >> 3) ^ ((lane & 7) >> 1)));

  for (int work = static_cast<int>(blockIdx.x); work < tiles * jobs.strips;
       work += static_cast<int>(gridDim.x)) {
    const int tile_index = work / jobs.strips;
    ExpertTile tile;
    if (jobs.experts != nullptr) {
      tile = jobs.tiles[tile_index];
    } else {
      tile = {0, tile_index * kTileRows, min(kTileRows, launch_positions - tile_index * kTileRows)};
    }
    const Strip strip = locate(jobs, work % jobs.strips, jobs.experts + tile.expert);
    if (static_cast<int>(threadIdx.x) < tile.count) {
      scales[threadIdx.x] = jobs.scales[static_cast<std::int64_t>(strip.plane) * jobs.capacity +
                                        tile.first + static_cast<int>(threadIdx.x)];
    }
    Fetch<kWords, kDigits> fetch(strip,
                                 jobs.planes + strip.plane * kDigits * plane_bytes +
                                     static_cast<std::int64_t>(tile.first) * jobs.in,
                                 plane_bytes, jobs.in, words, tile.count);
    std::uint32_t to = ring;
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < chunks) fetch.next(to);
      cp_async_commit();
      to += stage_size;
    }
    int acc[kEights][kDigits][4] = {};
    std::uint32_t from = ring;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (chunk + kStages - 1 < chunks) fetch.next(to);
      cp_async_commit();
      to = to + stage_size == ring_end ? ring : to + stage_size;
      Fragments fragments;
      const std::byte* weights =
          reinterpret_cast<const std::byte*>(smem) + (from - ring) + kDigits * kPlaneBytes;
      decode<kWords>(reinterpret_cast<const std::uint32_t*>(weights) + warp * (words / 2),
                     4 * words, tile_lane, fragments);
      multiply<kDigits>(from + lane_at, tile.count, fragments, acc);
      from = from + stage_size == ring_end ? ring : from + stage_size;
    }

    // Looked up again rather than kept in registers through the product.
    const Strip result = locate(jobs, work % jobs.strips, jobs.experts + tile.expert);
    // Step 6 in fragments, then a row a warp: rotation, scale and bias.
    float* out = reinterpret_cast<float*>(smem);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = 8 * n + 2 * (lane & 3) + (i & 1);
        const RowScale scale = scales[position];
        long long total = acc[n][0][i];
        if constexpr (kDigits == 2) total = 256 * total + acc[n][kDigits - 1][i];
        out[position * kOutPitch + 16 * warp + (lane >> 2) + 8 * (i >> 1)] =
            affine(total - 512LL * scale.sum, scale);
      }
    }
    __syncthreads();
#pragma unroll 2
    for (int position = warp; position < tile.count; position += kThreads / 32) {
      const float4 value = *reinterpret_cast<const float4*>(out + position * kOutPitch + 4 * lane);
      float v[4] = {value.x, value.y, value.z, value.w};
      const int at = tile.first + position;
      const std::int64_t row = jobs.scatter != 0 ? jobs.order[jobs.first + at] : at;
      finish_row(v, scales[position].q, lane, result.svh, result.bias, result.y + row * result.out);
    }
    __syncthreads();  // the ring and the scales are free again
  }
}

template <int kWords, int kDigits>
void launch_gemm(cudaStream_t stream, const Jobs& jobs, int tiles) {
  const int smem = smem_bytes(kDigits, jobs.projection[0].words);
  const int blocks = std::min(tiles * jobs.strips, 2 * multiprocessors());
  allow_smem(gemm_kernel<kWords, kDigits>, smem);
  launch_pdl(stream, gemm_kernel<kWords, kDigits>, dim3(static_cast<unsigned>(blocks)),
             dim3(kThreads), static_cast<std::size_t>(smem), jobs);
}

template <int kDigits>
void launch_words(cudaStream_t stream, const Jobs& jobs, int tiles) {
  switch (jobs.projection[0].words) {
    case 48:
      return launch_gemm<48, kDigits>(stream, jobs, tiles);
    case 64:
      return launch_gemm<64, kDigits>(stream, jobs, tiles);
    case 80:
      return launch_gemm<80, kDigits>(stream, jobs, tiles);
    default:
      return launch_gemm<0, kDigits>(stream, jobs, tiles);
  }
}

}  // namespace

void exl3_gemm(cudaStream_t stream, const Jobs& jobs, int tiles) {
  if (jobs.digits == 2) {
    launch_words<2>(stream, jobs, tiles);
  } else {
    launch_words<1>(stream, jobs, tiles);
  }
}

}  // namespace flashnext::cuda
