// The integer linear for few rows. A block of four warps takes 128 outputs and a range of k; every
// warp streams its own units (32 inputs, 128 outputs of packed weights) through a ring in shared
// memory. A weight costs a shift, a mask and one multiplication: its four product bytes are the A
// operand of the tensor core's u8 x s8 product, against digits repeated four times, so that 1 to 8
// columns (a column is one digit of one row) cost the same. Sums are integers: blocks add theirs in
// any order, and the last one of 128 outputs finishes them.
#include "cuda/check.h"
#include "cuda/cp_async.cuh"
#include "cuda/exl3_jobs.h"
#include "cuda/exl3_locate.cuh"
#include "cuda/exl3_trellis.cuh"
#include "cuda/launch.h"

#include <algorithm>

namespace flashnext::cuda {

namespace {

constexpr int kWarps = 4;

constexpr int ring_stages(int words) { return words >= 80 ? 3 : 4; }

template <int kWords>
__device__ __forceinline__ void fetch_unit(uint4* to, const std::byte* strip, std::int64_t pitch,
                                           int unit, int words, int lane) {
  const std::byte* row0 = strip + 2 * unit * pitch;
  const int w = kWords != 0 ? kWords : words;
#pragma unroll
  for (int i = 0; i < (2 * w + 31) / 32; ++i) {
    const int c = lane + 32 * i;
    if (2 * kWords % 32 != 0 || kWords == 0) {
      if (c >= 2 * w) break;
    }
    cp_async16(to + c, c < w ? row0 + 16 * c : row0 + pitch + 16 * (c - w));
  }
}

template <int kWords, int kGroups>
__global__ void __launch_bounds__(32 * kWarps, kGroups == 1 ? 6 : 4)
    gemv_kernel(const __grid_constant__ Jobs jobs) {
  extern __shared__ uint4 smem[];
  __shared__ bool is_last;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int words = kWords != 0 ? kWords : jobs.words;
  constexpr int kStages = ring_stages(kWords == 0 ? 128 : kWords);
  uint4* ring = smem + warp * kStages * 2 * words;
  int* sums = reinterpret_cast<int*>(smem + kWarps * kStages * 2 * words);  // (columns, 128)

  const int group = static_cast<int>(blockIdx.x) / jobs.strips;
  const int strip_index = static_cast<int>(blockIdx.x) % jobs.strips;
  const int splits = static_cast<int>(gridDim.y);
  const int units = jobs.in / 32;
  const int first = units * static_cast<int>(blockIdx.y) / splits + warp;
  const int end = units * static_cast<int>(blockIdx.y + 1) / splits;

  // Weights of linears are nobody's output, so their first units travel while the predecessor ends.
  Strip strip;
  const bool is_linear = jobs.experts == nullptr;
  if (!is_linear) {
    pdl_wait();
    if (group >= *jobs.num_groups) return;
    strip = locate(jobs, strip_index, jobs.groups[group].expert);
  } else {
    strip = locate(jobs, strip_index, 0);
  }
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    const int unit = first + s * kWarps;
    if (unit < end)
      fetch_unit<kWords>(ring + s * 2 * words, strip.trellis, strip.pitch, unit, words, lane);
    cp_async_commit();
  }
  if (is_linear) pdl_wait();
  pdl_trigger();

  const int digits = jobs.digits;
  const int count = is_linear ? jobs.rows.scale * *jobs.rows.count : jobs.groups[group].count;
  const int columns = count * digits;
  if (columns == 0) return;
  const auto position_of = [&](int i) { return is_linear ? i : jobs.groups[group].position[i]; };
  for (int i = static_cast<int>(threadIdx.x); i < columns * 128; i += 32 * kWarps) sums[i] = 0;

  // The lane's column (and column + 8) of digits.
  const std::int8_t* column[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = (lane >> 2) + 8 * g;
    column[g] = nullptr;
    if (c < columns) {
      column[g] = jobs.planes + 4 * (lane & 3) +
                  (static_cast<std::int64_t>(strip.plane * digits + c % digits) * jobs.capacity +
                   position_of(c / digits)) *
                      jobs.in;
    }
  }
  const auto load_digits = [&](int unit, std::uint32_t(&d)[kGroups][2]) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      d[g][0] = d[g][1] = 0;
      if (column[g] != nullptr && unit < end) {
        d[g][0] = *reinterpret_cast<const std::uint32_t*>(column[g] + 32 * unit);
        d[g][1] = *reinterpret_cast<const std::uint32_t*>(column[g] + 32 * unit + 16);
      }
    }
  };

  const TileLane<kWords> tile_lane(lane, words);
  int acc[kGroups][8][4] = {};
  std::uint32_t now[kGroups][2];
  load_digits(first, now);
  __syncthreads();  // sums are zero
  int slot = 0;
  for (int unit = first; unit < end; unit += kWarps) {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    {
      const int ahead = unit + (kStages - 1) * kWarps;
      const int to = slot == 0 ? kStages - 1 : slot - 1;
      if (ahead < end) {
        fetch_unit<kWords>(ring + to * 2 * words, strip.trellis, strip.pitch, ahead, words, lane);
      }
      cp_async_commit();
    }
    std::uint32_t next[kGroups][2];
    load_digits(unit + kWarps, next);
    const std::uint32_t* tiles = reinterpret_cast<const std::uint32_t*>(ring + slot * 2 * words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t b[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        b[g][0] = __byte_perm(now[g][half], 0, 0x0000);
        b[g][1] = __byte_perm(now[g][half], 0, 0x1111);
        b[g][2] = __byte_perm(now[g][half], 0, 0x2222);
        b[g][3] = __byte_perm(now[g][half], 0, 0x3333);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        std::uint32_t x[8];
        tile_lane.products(tiles + (half * 8 + n) * (words / 2), x);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          mma_u8s8(acc[g][n], x[0], x[4], x[1], x[5], b[g][0], b[g][1]);
          mma_u8s8(acc[g][n], x[2], x[6], x[3], x[7], b[g][2], b[g][3]);
        }
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      now[g][0] = next[g][0];
      now[g][1] = next[g][1];
    }
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }

#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = 8 * g + 2 * (lane & 3) + (i & 1);
      if (c >= columns) continue;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        atomicAdd(sums + c * 128 + 16 * n + (lane >> 2) + 8 * (i >> 1), acc[g][n][i]);
      }
    }
  }
  __syncthreads();

  if (splits > 1) {
    const int pitch = 128 * jobs.strips;
    int* all = jobs.sums + 128 * strip_index;
    const auto at = [&](int i) {  // of (column, output) i
      const int c = i >> 7;
      return all +
             static_cast<std::int64_t>(position_of(c / digits) * digits + c % digits) * pitch +
             (i & 127);
    };
    for (int i = static_cast<int>(threadIdx.x); i < columns * 128; i += 32 * kWarps) {
      atomicAdd(at(i), sums[i]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(jobs.arrivals + blockIdx.x, 1) == splits - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = static_cast<int>(threadIdx.x); i < columns * 128; i += 32 * kWarps) {
      sums[i] = __ldcg(at(i));
    }
    __syncthreads();
  }

  for (int i = warp; i < count; i += kWarps) {
    const int position = position_of(i);
    const RowScale scale =
        jobs.scales[static_cast<std::int64_t>(strip.plane) * jobs.capacity + position];
    float v[4];
#pragma unroll
    for (int o = 0; o < 4; ++o) {
      const int* a = sums + i * digits * 128 + 4 * lane + o;
      long long total = a[0];
      if (digits == 2) total = 256 * total + a[128];
      v[o] = affine(total - 510LL * scale.sum, scale);
    }
    finish_row(v, scale.q, lane, strip.svh, strip.bias,
               strip.y + static_cast<std::int64_t>(position) * strip.out);
  }
}

// Splits of k: about four blocks a multiprocessor hide latency, and a block costs a few units of
// its own.
int choose_splits(int strips, int units, int processors) {
  constexpr int kOverhead = 6;
  int best = 1;
  int best_cost = 0;
  for (int splits = 1; splits <= std::max(1, units / kWarps); ++splits) {
    const int blocks = std::max(4, ceil_div(strips * splits, processors));
    const int share = kWarps * ceil_div(ceil_div(units, splits), kWarps);
    const int cost = blocks * (share + kOverhead);
    if (splits == 1 || cost < best_cost) {
      best = splits;
      best_cost = cost;
    }
  }
  return best;
}

template <int kWords>
void launch_gemv(cudaStream_t stream, const Jobs& jobs, int groups, int columns) {
  const int strips = groups * jobs.strips;
  const int splits = choose_splits(strips, jobs.in / 32, multiprocessors());
  const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(splits));
  const int ring = kWarps * ring_stages(kWords == 0 ? 128 : kWords) * 32 * jobs.words;
  const int smem = ring + 128 * 4 * columns;
  if (columns <= 8) {
    allow_smem(gemv_kernel<kWords, 1>, smem);
    launch_pdl(stream, gemv_kernel<kWords, 1>, grid, dim3(32 * kWarps),
               static_cast<std::size_t>(smem), jobs);
  } else {
    allow_smem(gemv_kernel<kWords, 2>, smem);
    launch_pdl(stream, gemv_kernel<kWords, 2>, grid, dim3(32 * kWarps),
               static_cast<std::size_t>(smem), jobs);
  }
}

}  // namespace

void exl3_gemv(cudaStream_t stream, const Jobs& jobs, int groups, int columns) {
  check(columns <= 2 * kGroupColumns, "exl3: columns of a GEMV");
  switch (jobs.words) {
    case 48:
      return launch_gemv<48>(stream, jobs, groups, columns);
    case 64:
      return launch_gemv<64>(stream, jobs, groups, columns);
    case 80:
      return launch_gemv<80>(stream, jobs, groups, columns);
    default:
      return launch_gemv<0>(stream, jobs, groups, columns);
  }
}

}  // namespace flashnext::cuda
