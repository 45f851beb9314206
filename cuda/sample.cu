// sample: one token an output row, the same token as cpp/sample/sample.h draws.
//
// A cluster of 8 blocks works on a row. Candidates are never sorted: a candidate's place in the
// order (logit descending, id ascending) is one 64-bit key, every filter keeps the keys up to a
// cut, and the candidate at which a running sum of weights passes a target is found by histograms
// over ten bits of the key at a time. Weights are integers, so the order of addition does not
// matter.
#include "cpp/base/errors.h"
#include "cpp/sample/sample.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

#include <cooperative_groups.h>

namespace flashnext::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8;
constexpr int kThreads = 1024;
constexpr int kDigitBits = 10;
constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == kThreads, "a thread a bin");
constexpr int kMaxIdBits = 31;

using Key = unsigned long long;
using Sum = unsigned long long;

struct Shared {
  Sum bins[kBins];
  Sum warp_sums[kThreads / 32];
  Key warp_keys[kThreads / 32];
  Key key;       // of this block, read by the others
  int nan;       // likewise
  Sum found[3];  // bin, sum before it, total
};

struct RowView {
  const float* logits;
  int limit;
  int id_bits;
  int rank;  // of the block in the cluster

  // Calls body(logit, id) for the block's candidates.
  template <class Body>
  __device__ void for_each(const Body& body) const {
    for (int id = rank * kThreads + static_cast<int>(threadIdx.x); id < limit;
         id += kBlocks * kThreads) {
      body(logits[id], id);
    }
  }
  // Ascending keys are the order of the candidates.
  __device__ Key key(float logit, int id) const {
    const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
    const std::uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    return (static_cast<Key>(~ascending) << id_bits) | static_cast<Key>(id);
  }
  __device__ int id_of(Key key) const { return static_cast<int>(key & ((Key{1} << id_bits) - 1)); }
};

// The smallest of all keys that the cluster's threads bring.
__device__ Key cluster_min(cg::cluster_group& cluster, Shared& shared, Key key) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const Key other = __shfl_xor_sync(0xFFFFFFFFu, key, d);
    key = other < key ? other : key;
  }
  if (threadIdx.x % 32 == 0) shared.warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) {
      key = shared.warp_keys[w] < key ? shared.warp_keys[w] : key;
    }
    shared.key = key;
  }
  cluster.sync();
  for (int b = 0; b < kBlocks; ++b) {
    const Key other = cluster.map_shared_rank(&shared, b)->key;
    key = b == 0 || other < key ? other : key;
  }
  cluster.sync();
  return key;
}

// The key at which the running sum of weights, over keys <= cut in order, first exceeds target.
// weigh (logit, id) gives a candidate's weight; target_of(total) the target, less than total.
template <class Weigh, class TargetOf>
__device__ Key find(cg::cluster_group& cluster, Shared& shared, const RowView& row, Key cut,
                    const Weigh& weigh, const TargetOf& target_of) {
  const int tid = static_cast<int>(threadIdx.x);
  int shift = (32 + row.id_bits + kDigitBits - 1) / kDigitBits * kDigitBits;
  Key prefix = 0;  // the digits found so far
  Sum target = 0;
  bool first = true;
  while (shift > 0) {
    shift -= kDigitBits;
    shared.bins[tid] = 0;
    __syncthreads();
    row.for_each([&](float logit, int id) {
      const Key key = row.key(logit, id);
      if (key > cut || (key >> shift) >> kDigitBits != prefix) return;
      const Sum weight = weigh(logit, id);
      if (weight != 0) atomicAdd(&shared.bins[(key >> shift) & (kBins - 1)], weight);
    });
    cluster.sync();
    Sum mine = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) mine += cluster.map_shared_rank(&shared, b)->bins[tid];
    // Inclusive sums over the bins; every block does the same.
    Sum running = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const Sum other = __shfl_up_sync(0xFFFFFFFFu, running, d);
      if (tid % 32 >= d) running += other;
    }
    if (tid % 32 == 31) shared.warp_sums[tid / 32] = running;
    __syncthreads();
    Sum ahead = 0;
    Sum total = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      ahead += w < tid / 32 ? shared.warp_sums[w] : 0;
      total += shared.warp_sums[w];
    }
    running += ahead;
    if (first) target = target_of(total);
    first = false;
    if (running > target && running - mine <= target) {
      shared.found[0] = static_cast<Sum>(tid);
      shared.found[1] = running - mine;
    }
    cluster.sync();  // also: the others have read this block's bins
    prefix = (prefix << kDigitBits) | shared.found[0];
    target -= shared.found[1];
  }
  return prefix;
}

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(const SampleArgs args, int id_bits) {
  __shared__ Shared shared;
  pdl_trigger();
  pdl_wait();
  const int output = static_cast<int>(blockIdx.y);
  if (output >= args.step.head->outputs) return;  // the whole cluster
  cg::cluster_group cluster = cg::this_cluster();
  const RowView row{args.logits + static_cast<std::size_t>(output) * args.vocab, args.limit,
                    id_bits, static_cast<int>(cluster.block_rank())};
  const SampleParams params = args.step.sampling[output];
  std::int32_t* token = args.tokens + output;
  const bool writes = row.rank == 0 && threadIdx.x == 0;

  Key best = ~Key{0};
  bool nan = false;
  row.for_each([&](float logit, int id) {
    nan = nan || logit != logit;
    const Key key = row.key(logit, id);
    best = key < best ? key : best;
  });
  // NaN anywhere shows as key 0, which no number has: the largest, +inf, has bits 007FFFFF.
  best = cluster_min(cluster, shared, nan ? 0 : best);
  const int best_id = row.id_of(best);
  const float largest = best != 0 ? row.logits[best_id] : 0.0f;
  if (best == 0 || largest - largest != 0.0f) {
    if (writes) *token = sample::kBadLogits;
    return;
  }
  if (!(params.temperature > 0.0f)) {
    if (writes) *token = best_id;
    return;
  }

  const auto weigh = [&](float logit, int) -> Sum {
    return sample::weight_of(logit, largest, params.temperature);
  };
  Key cut = ~Key{0};
  if (params.top_k > 0 && params.top_k < args.limit) {
    cut = find(
        cluster, shared, row, cut, [](float, int) -> Sum { return 1; },
        [&](Sum) { return static_cast<Sum>(params.top_k - 1); });
  }
  if (params.top_p < 1.0f) {
    if (params.top_p > 0.0f) {
      cut = find(cluster, shared, row, cut, weigh, [&](Sum total) -> Sum {
        const Sum enough = sample::top_p_sum(total, params.top_p);
        return enough > 0 ? enough - 1 : 0;
      });
    } else {
      cut = best;
    }
  }
  if (params.min_p > 0.0f) {
    // The first candidate below the floor ends the list; one without weight is in no list.
    const Sum floor = sample::fixed_point(params.min_p < 1.0f ? params.min_p : 1.0f);
    Key end = ~Key{0};
    row.for_each([&](float logit, int id) {
      const Sum weight = weigh(logit, id);
      const Key key = row.key(logit, id);
      if (weight != 0 && weight < floor && key != best) end = key < end ? key : end;
    });
    end = cluster_min(cluster, shared, end);
    cut = end <= cut ? end - 1 : cut;
  }
  const Key drawn = find(cluster, shared, row, cut, weigh, [&](Sum total) {
    return static_cast<Sum>(
        sample::draw_below(sample::random_bits(params.seed, params.position), total));
  });
  if (writes) *token = row.id_of(drawn);
}

}  // namespace

std::size_t workspace_bytes(const SampleArgs&) { return 0; }

void sample(cudaStream_t stream, const SampleArgs& args) {
  check(args.limit >= 1 && args.limit <= args.vocab, "sample: limit of the ids");
  if (args.step.max_outputs <= 0) return;
  int id_bits = 1;
  while (id_bits < kMaxIdBits && (args.limit - 1) >> id_bits != 0) ++id_bits;
  launch_pdl(stream, sample_kernel, dim3(kBlocks, static_cast<unsigned>(args.step.max_outputs)),
             dim3(kThreads), 0, args, id_bits);
}

}  // namespace flashnext::cuda
