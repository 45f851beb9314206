// guess: what is copied ahead, by one block.
//
// A thread a (row, slot) pair, in the order of slots, then of rows. It counts when its expert is
// wanted and no earlier pair has the same one; ballots tell how many do so before it.
#include "cpp/base/errors.h"
#include "cuda/device_clock.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace flashnext::cuda {

namespace {

constexpr int kMaxPairs = 128;
constexpr int kWarps = kMaxPairs / 32;
constexpr unsigned kAll = 0xFFFFFFFFu;

// Read past L1, since it all changes between steps.
__global__ void __launch_bounds__(kMaxPairs) guess_kernel(const GuessArgs args) {
  __shared__ __align__(16) std::int32_t wanted[kMaxPairs];  // expert of a pair in order, or -1
  __shared__ std::uint32_t chosen[kWarps];                  // a bit a pair
  const int t = static_cast<int>(threadIdx.x);
  pdl_trigger();
  pdl_wait();
  const int rows = args.rows.scale * __ldcg(args.rows.count);
  const int id = t < args.rows.max * args.slots ? __ldcg(args.ids + t) : 0;
  int most = __ldcg(args.most);
  most = most < 0 ? 0 : most > kMaxGuesses ? kMaxGuesses : most;
  const int pairs = rows * args.slots;
  if (t < pairs) {
    const std::int32_t line = __ldcg(args.line_of + id);
    const std::int32_t reachable = args.reachable == nullptr ? 1 : __ldcg(args.reachable + id);
    const int row = t / args.slots;
    wanted[(t - row * args.slots) * rows + row] = line < 0 && reachable != 0 ? id : -1;
  } else {
    wanted[t] = -1;
  }
  __syncthreads();
  const std::int32_t mine = wanted[t];
  bool counts = mine >= 0;
#pragma unroll 2
  for (int j = 0; j < t; j += 4) {
    const int4 ids = reinterpret_cast<const int4*>(wanted)[j / 4];
    counts &= ids.x != mine && (ids.y != mine || j + 1 >= t) && (ids.z != mine || j + 2 >= t) &&
              (ids.w != mine || j + 3 >= t);
  }
  const unsigned bits = __ballot_sync(kAll, counts);
  if (t % 32 == 0) chosen[t / 32] = bits;
  __syncthreads();
  int nth = __popc(bits & ((1u << (t % 32)) - 1u));
  int all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int n = __popc(chosen[w]);
    if (w < t / 32) nth += n;
    all += n;
  }
  if (counts && nth < most) args.fetches[nth] = {args.lines + nth * args.line_bytes, mine, 0};
  if (t != 0) return;
  const int n = all < most ? all : most;
  *args.num_fetches = n;
  *args.counters = {0, 0, 0, 0, n, 0, 0, 0, device_clock()};
}

}  // namespace

void guess(cudaStream_t stream, const GuessArgs& args) {
  check(args.rows.max >= 1 && args.slots >= 1 && args.rows.max * args.slots <= kMaxPairs,
        "guess: rows and slots");
  check(args.line_bytes > 0 && args.line_bytes % 16 == 0, "guess: bytes of a line");
  launch_pdl(stream, guess_kernel, dim3(1), dim3(kMaxPairs), 0, args);
}

}  // namespace flashnext::cuda
