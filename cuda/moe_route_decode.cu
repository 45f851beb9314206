// route for few rows, in one kernel: blocks form a slice of the logits each, by the arithmetic of
// half_product.cuh; the last of them to arrive at the ticket chooses for all rows.
//
// Ordering: the logits of a block are written by its first warp before that warp's barrier, the
// barrier before the arrival of its first thread, which releases; the arrival of the last block
// acquires, and its barrier hands that on to its other threads. The ticket counts up to the number
// of blocks and falls back to zero by itself, so that the next launch, which waits for this one to
// complete, finds it so.
#include "cpp/base/errors.h"
#include "cuda/half_product.cuh"
#include "cuda/kernels.h"
#include "cuda/moe_route.cuh"

#include <type_traits>

namespace flashnext::cuda {

namespace {

constexpr int kBlockRows = 8;  // weight rows a block: half of an MMA's, so that more blocks load
constexpr int kBlockWarps = 16;
constexpr int kLaneExperts = kFewExperts / 32;
constexpr int most_rows(int row_warps) { return kBlockWarps / row_warps; }

template <int kRowWarps>
struct RowShared {
  ChoiceShared<kLaneExperts> choice;
  float tops[kRowWarps];
};

template <int kRowWarps>
struct RouteShared {
  static constexpr int kRows = most_rows(kRowWarps);
  struct None {};
  using Planes = std::conditional_t<(kRows <= kStagedRows), ChunkPlanes<kRows>, None>;
  union Warp {
    Planes planes;
    float parts[kBlockRows][kFragmentRows];  // in the place of the warp's own planes
  };
  union {
    Warp warps[kBlockWarps];
    RowShared<kRowWarps> rows[kBlockWarps / kRowWarps];
  };
  bool last;
};

// True for the last of `blocks` arrivals.
__device__ __forceinline__ bool arrive_last(std::int32_t* ticket, unsigned blocks) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(ticket), "r"(blocks - 1)
               : "memory");
  return before == blocks - 1;
}

// Softmax and choice of one row by kRowWarps warps, which share the exponentials and quotients;
// each adds up the 32 partial sums for itself, and the first one chooses.
template <int kRowWarps>
__device__ __forceinline__ void choose_row(const RouteArgs& args, const float* logits, int row,
                                           int part, int lane, RowShared<kRowWarps>& shared) {
  constexpr int kMine = kLaneExperts / kRowWarps;
  const int barrier = kRowWarps == kBlockWarps ? 1 : row + 1;
  const auto sync = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * kRowWarps) : "memory");
  };
  const int experts = args.router.out;
  const float* from = logits + static_cast<std::size_t>(row) * static_cast<std::size_t>(experts);
  float* exponentials = shared.choice.exponentials;
  float p[kMine];
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int id = lane + 32 * (part + kRowWarps * j);
    p[j] = id < experts ? __ldcg(from + id) : -INFINITY;
  }
  // The largest logit, as a scan from logit 0 on finds it: NaN is passed over, unless it comes
  // first.
  float top = __ldcg(from);
#pragma unroll
  for (int j = 0; j < kMine; ++j) top = larger(top, p[j]);
  top = warp_larger(top);
  if (lane == 0) shared.tops[part] = top;
  sync();
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) top = larger(top, shared.tops[w]);
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    p[j] = math::exp(p[j] - top);
    exponentials[lane + 32 * (part + kRowWarps * j)] = p[j];
  }
  sync();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneExperts; ++i) {
    const float e = exponentials[lane + 32 * i];
    if (lane + 32 * i < experts) total += e;
  }
  total = warp_total(total);
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int id = lane + 32 * (part + kRowWarps * j);
    shared.choice.keys[id] = id < experts ? key_of(math::div(p[j], total)) : 0;
  }
  sync();
  if (part != 0) return;
  finish_row<kLaneExperts>(args, row, lane, shared.choice);
}

// Block: kBlockRows rows of the router and, behind them, of the shared gate; warp w has chunk w of
// k. Rows beyond the step's lie in buffers made for more: they are read, so that no load waits for
// their number, and never written.
template <int kRowWarps>
__global__ void __launch_bounds__(32 * kBlockWarps, 2)
    route_decode_kernel(const RouteArgs args, float* logits) {
  constexpr int kRows = most_rows(kRowWarps);  // >= rows.max
  __shared__ RouteShared<kRowWarps> shared;
  pdl_trigger();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int m0 = static_cast<int>(blockIdx.x) * kBlockRows;
  const int in = args.router.in;
  const int experts = args.router.out;
  const int chunks = split_k(in).chunks;
  const int k0 = warp * kChunkK;
  const std::uint16_t* w = nullptr;
  if (m0 + g < experts) {
    w = args.router.w + static_cast<std::size_t>(m0 + g) * static_cast<std::size_t>(in);
  } else if (m0 + g == experts) {
    w = args.shared_gate.w;
  }
  uint4 top[kChunkBlocks];
  uint4 bottom[kChunkBlocks];
  if (warp < chunks) load_chunk(w, nullptr, in, k0, t, top, bottom);

  pdl_wait();
  const int count = *args.rows.count;  // used only when the other loads are under way
  if (warp < chunks) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (kRows <= kStagedRows) {
      staged_product(top, bottom, args.x, args.rows.max, in, k0, lane, shared.warps[warp].planes,
                     c);
      __syncwarp();  // the planes are read; the sums take their place
    } else {
      const float* x = args.x + static_cast<std::size_t>(g) * static_cast<std::size_t>(in);
      chunk_product(
          top, bottom, k0, t,
          [&](int k, uint4& hi, uint4& lo) {
            if (g >= args.rows.max || k >= in) return;
            // By value: of references the compiler loads one float at a time.
            const float4 first = *reinterpret_cast<const float4*>(x + k);
            const float4 second = *reinterpret_cast<const float4*>(x + k + 4);
            split8(first, second, hi, lo);
          },
          c);
    }
    *reinterpret_cast<float2*>(&shared.warps[warp].parts[g][2 * t]) = {c[0], c[1]};
  }
  const int rows = min(args.rows.scale * count, args.rows.max);
  if (rows <= 0) return;  // the whole grid
  __syncthreads();
  if (warp == 0) {
    // One warp, so that its first thread may arrive without waiting for the block.
#pragma unroll
    for (int j = 0; j < ceil_div(kBlockRows * kRows, 32); ++j) {
      const int item = lane + 32 * j;
      if (item >= kBlockRows * kRows) break;
      const int v = m0 + item / kRows;
      const int row = item % kRows;
      // The total of `dense`: no sum that starts from zero is -0, so that adding zeros changes
      // none.
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < kBlockWarps; ++i) {
        total += i < chunks ? shared.warps[i].parts[item / kRows][row] : 0.0f;
      }
      total *= kSplitUnscale;
      if (row < rows && v < experts) {
        logits[static_cast<std::size_t>(row) * static_cast<std::size_t>(experts) +
               static_cast<std::size_t>(v)] = total;
      } else if (row < rows && v == experts) {
        args.gate[row] = total;
      }
    }
    __syncwarp();
    if (lane == 0) shared.last = arrive_last(args.ticket, gridDim.x);
  }
  __syncthreads();
  if (!shared.last) return;
  const int row = warp / kRowWarps;
  if (row >= rows) return;
  choose_row<kRowWarps>(args, logits, row, warp % kRowWarps, lane, shared.rows[row]);
}

}  // namespace

bool route_in_one_kernel(const RouteArgs& args) {
  const KSplit split = split_k(args.router.in);
  return args.rows.max <= kFragmentRows && args.router.out <= kFewExperts && split.slices == 1;
}

void route_decode(cudaStream_t stream, const RouteArgs& args, float* logits) {
  check(args.ticket != nullptr, "route: the ticket is missing");
  const dim3 grid(static_cast<unsigned>(ceil_div(args.router.out + 1, kBlockRows)));
  const auto kernel = args.rows.max <= 1   ? route_decode_kernel<16>
                      : args.rows.max <= 2 ? route_decode_kernel<8>
                      : args.rows.max <= 4 ? route_decode_kernel<4>
                                           : route_decode_kernel<2>;
  launch_pdl(stream, kernel, grid, dim3(32 * kBlockWarps), 0, args, logits);
}

}  // namespace flashnext::cuda
