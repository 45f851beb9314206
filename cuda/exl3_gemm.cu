// The integer linear for many rows: tiles of 128 outputs x up to 128 positions on the int8 tensor
// cores.
//
// A warp owns 16 outputs. It decodes its weights straight into A fragments, as two unsigned planes
// of U = B + 2 = 4 h + l, and multiplies both with both digits of every position: four products.
// Sums of one digit share an accumulator: the h products of 64 inputs are summed apart and added
// times four. Half of the warps run one step behind the others, so that on every scheduler one warp
// decodes while another keeps the tensor core busy.
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
constexpr int kStages = 4;
constexpr int kAhead = kStages - 2;  // chunks under way: a lagging warp still reads the one before
constexpr int kChunk = 64;           // inputs of a step
constexpr int kPlaneBytes = kTileRows * kChunk;
constexpr int kOutPitch = 132;  // floats; no bank conflicts when fragments are stored
constexpr int kOutRows = 64;

constexpr int stage_bytes(int digits, int words) { return digits * kPlaneBytes + 64 * words; }

constexpr int smem_bytes(int digits, int words) {
  const int ring = kStages * stage_bytes(digits, words);
  const int out = kOutRows * kOutPitch * 4;
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

template <int kDigits>
__device__ __forceinline__ void multiply(std::uint32_t planes, int positions, const Fragments& f,
                                         int (&acc)[16][kDigits][4]) {
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    if (16 * pair >= positions) break;
    std::uint32_t b[2][kDigits][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
        load_matrices(b[n][d], planes + static_cast<std::uint32_t>(d * kPlaneBytes +
                                                                   (2 * pair + n) * 8 * kChunk));
      }
    }
    int part[2][kDigits][4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int d = 0; d < kDigits; ++d) {
          mma_u8s8(part[n][d], f.high[2 * step][0], f.high[2 * step][1], f.high[2 * step + 1][0],
                   f.high[2 * step + 1][1], b[n][d][2 * step], b[n][d][2 * step + 1]);
          mma_u8s8(acc[2 * pair + n][d], f.low[2 * step][0], f.low[2 * step][1],
                   f.low[2 * step + 1][0], f.low[2 * step + 1][1], b[n][d][2 * step],
                   b[n][d][2 * step + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[2 * pair + n][d][i] += 4 * part[n][d][i];
      }
    }
  }
}

// One chunk of the ring: digits (digit, position, 64) with 16-byte parts swizzled, then the packed
// weights (4 k-tiles, 8 tiles).
template <int kWords, int kDigits>
__device__ __forceinline__ void fetch_chunk(std::byte* stage, const Strip& strip,
                                            const std::int8_t* planes, std::int64_t plane_bytes,
                                            int in, int words, int positions, int chunk) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < 2 * kDigits; ++i) {
    const int position = (thread >> 2) + 64 * (i & 1);
    const int part = thread & 3;
    if (position >= positions) continue;
    cp_async16(
        stage + (i >> 1) * kPlaneBytes + position * kChunk + 16 * (part ^ ((position >> 1) & 3)),
        planes + (i >> 1) * plane_bytes + static_cast<std::int64_t>(position) * in +
            chunk * kChunk + 16 * part);
  }
  const int w = kWords != 0 ? kWords : words;
  std::byte* weights = stage + kDigits * kPlaneBytes;
  for (int i = thread; i < 4 * w; i += kThreads) {
    const int tile = i / w;
    cp_async16(weights + 16 * i,
               strip.trellis + (4 * chunk + tile) * strip.pitch + 16 * (i - tile * w));
  }
}

template <int kWords, int kDigits>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ uint4 smem[];
  __shared__ RowScale scales[kTileRows];
  pdl_wait();
  pdl_trigger();
  std::byte* ring = reinterpret_cast<std::byte*>(smem);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int lag = warp >> 2;
  const int words = kWords != 0 ? kWords : jobs.words;
  const int stage_size = stage_bytes(kDigits, words);
  const int chunks = jobs.in / kChunk;
  const TileLane<kWords> tile_lane(lane, words);
  const std::int64_t plane_bytes = static_cast<std::int64_t>(jobs.capacity) * jobs.in;
  const int pairs = jobs.rows.scale * *jobs.rows.count * jobs.slots - jobs.first;
  const int launch_positions = min(max(pairs, 0), jobs.capacity);
  const int tiles =
      jobs.experts != nullptr ? *jobs.num_tiles : (launch_positions + kTileRows - 1) / kTileRows;

  for (int work = static_cast<int>(blockIdx.x); work < tiles * jobs.strips;
       work += static_cast<int>(gridDim.x)) {
    const int tile_index = work / jobs.strips;
    ExpertTile tile;
    if (jobs.experts != nullptr) {
      tile = jobs.tiles[tile_index];
    } else {
      tile = {0, tile_index * kTileRows, min(kTileRows, launch_positions - tile_index * kTileRows)};
    }
    const Strip strip = locate(jobs, work % jobs.strips, tile.expert);
    const std::int8_t* planes = jobs.planes + strip.plane * kDigits * plane_bytes +
                                static_cast<std::int64_t>(tile.first) * jobs.in;
    if (static_cast<int>(threadIdx.x) < tile.count) {
      scales[threadIdx.x] = jobs.scales[static_cast<std::int64_t>(strip.plane) * jobs.capacity +
                                        tile.first + static_cast<int>(threadIdx.x)];
    }

#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (s < chunks) {
        fetch_chunk<kWords, kDigits>(ring + s * stage_size, strip, planes, plane_bytes, jobs.in,
                                     words, tile.count, s);
      }
      cp_async_commit();
    }
    int acc[16][kDigits][4] = {};
    Fragments fragments;
    // A warp alternates between decoding a chunk and multiplying it; lagging warps are a half step
    // behind.
    const std::uint32_t lane_at =
        static_cast<std::uint32_t>((lane & 7) * kChunk + 16 * ((lane >> 3) ^ ((lane & 7) >> 1)));
    const std::uint32_t ring_at = shared_address(ring);
    for (int half = 0; half <= 2 * chunks; ++half) {
      const int chunk = half >> 1;
      if ((half & 1) == 0 && chunk < chunks) {
        cp_async_wait<kAhead - 1>();
        __syncthreads();
        const int ahead = chunk + kAhead;
        if (ahead < chunks) {
          fetch_chunk<kWords, kDigits>(ring + ahead % kStages * stage_size, strip, planes,
                                       plane_bytes, jobs.in, words, tile.count, ahead);
        }
        cp_async_commit();
      }
      if (((half ^ lag) & 1) == 0) {
        if (chunk < chunks) {
          const std::byte* weights = ring + chunk % kStages * stage_size + kDigits * kPlaneBytes;
          decode<kWords>(reinterpret_cast<const std::uint32_t*>(weights) + warp * (words / 2),
                         4 * words, tile_lane, fragments);
        }
      } else {
        const int behind = chunk - lag;
        if (behind >= 0) {
          multiply<kDigits>(
              ring_at + static_cast<std::uint32_t>(behind % kStages * stage_size) + lane_at,
              tile.count, fragments, acc);
        }
      }
    }

    // Step 6 in fragments, then a row a warp: rotation, scale and bias.
    float* out = reinterpret_cast<float*>(smem);
    const int g = lane >> 2;
    const int t = lane & 3;
#pragma unroll
    for (int part = 0; part < kTileRows / kOutRows; ++part) {
      if (part * kOutRows >= tile.count) break;
      __syncthreads();
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = 8 * n + 2 * t + (i & 1);
          const int(&a)[kDigits][4] = acc[8 * part + n];
          const RowScale scale = scales[part * kOutRows + position];
          long long total = a[0][i];
          if constexpr (kDigits == 2) total = 256 * total + a[kDigits - 1][i];
          out[position * kOutPitch + 16 * warp + g + 8 * (i >> 1)] =
              affine(total - 512LL * scale.sum, scale);
        }
      }
      __syncthreads();
      for (int r = warp; r < kOutRows; r += kThreads / 32) {
        const int position = part * kOutRows + r;
        if (position >= tile.count) break;
        const float4 value = *reinterpret_cast<const float4*>(out + r * kOutPitch + 4 * lane);
        float v[4] = {value.x, value.y, value.z, value.w};
        const int at = tile.first + position;
        const std::int64_t row = jobs.scatter != 0 ? jobs.order[jobs.first + at] : at;
        finish_row(v, scales[position].q, lane, strip.svh, strip.bias, strip.y + row * strip.out);
      }
    }
    __syncthreads();  // the ring and the scales are free again
  }
}

template <int kWords, int kDigits>
void launch_gemm(cudaStream_t stream, const Jobs& jobs, int tiles) {
  const int smem = smem_bytes(kDigits, jobs.words);
  const int blocks = std::min(tiles * jobs.strips, multiprocessors());
  allow_smem(gemm_kernel<kWords, kDigits>, smem);
  launch_pdl(stream, gemm_kernel<kWords, kDigits>, dim3(static_cast<unsigned>(blocks)),
             dim3(kThreads), static_cast<std::size_t>(smem), jobs);
}

template <int kDigits>
void launch_words(cudaStream_t stream, const Jobs& jobs, int tiles) {
  switch (jobs.words) {
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
