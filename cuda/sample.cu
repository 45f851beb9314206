// sample: one token an output row, the same token as cpp/sample/sample.h draws.
//
// A cluster of 8 blocks works on a row. Candidates are never sorted: a candidate's place in the
// order (logit descending, id ascending) is one 64-bit key, every filter keeps the keys up to a
// cut, and the candidate at which a running sum of weights passes a target is found by a histogram
// over the distance from the largest logit, then, among the few in the bin it falls into, by ever
// finer ones. Weights are integers, so the order of addition does not matter.
#include "cpp/base/errors.h"
#include "cpp/sample/sample.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

#include <cmath>
#include <cooperative_groups.h>

namespace flashnext::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kBlocks = 8;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 10;
constexpr int kBins = 1 << kDigitBits;
static_assert(kBins == kThreads, "a thread a bin");
constexpr int kListKeys = 4096;
constexpr unsigned kAll = 0xFFFFFFFFu;

using Key = unsigned long long;
using Sum = unsigned long long;

enum class Find { kTopK, kTopP, kDraw };

struct Shared {
  Key list[kListKeys];  // of the first block
  std::uint32_t low[kBins];
  std::uint32_t high[kBins];
  Sum warp_sums[kWarps];
  Key warp_keys[kWarps];
  Key key;         // of this block, read by the others
  Sum bin;         // found by choose()
  Sum ahead;       // likewise: the sum of the bins before it
  int list_count;  // of the first block
};

struct RowView {
  const float* logits;
  int limit;
  bool aligned;  // logits may be read in fours
  int rank;      // of the block in the cluster

  // Calls body(logit, id) for the block's candidates; loads run ahead of it.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    constexpr int kAhead = 4;
    for (int base = 4 * (rank * kThreads + static_cast<int>(threadIdx.x)); base < limit;
         base += 4 * kAhead * kBlocks * kThreads) {
      float v[kAhead][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int id = base + 4 * i * kBlocks * kThreads;
        if (aligned && id + 4 <= limit) {
          const float4 four = *reinterpret_cast<const float4*>(logits + id);
          v[i][0] = four.x;
          v[i][1] = four.y;
          v[i][2] = four.z;
          v[i][3] = four.w;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) v[i][e] = id + e < limit ? logits[id + e] : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int id = base + 4 * i * kBlocks * kThreads + e;
          if (id < limit) body(v[i][e], id);
        }
      }
    }
  }
};

// Ascending keys are the order of the candidates; a number's key is never 0.
__device__ __forceinline__ Key key_of(float logit, int id) {
  const std::uint32_t bits = __float_as_uint(logit + 0.0f);  // -0 and 0 are equal
  const std::uint32_t ascending = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return (static_cast<Key>(~ascending) << 32) | static_cast<Key>(id);
}
__device__ __forceinline__ int id_of(Key key) { return static_cast<int>(key & kAll); }
__device__ __forceinline__ float logit_of(Key key) {
  const std::uint32_t ascending = ~static_cast<std::uint32_t>(key >> 32);
  return __uint_as_float((ascending >> 31) != 0 ? ascending & 0x7FFFFFFFu : ~ascending);
}

__device__ Key block_min(Shared& shared, Key key) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const Key other = __shfl_xor_sync(kAll, key, d);
    key = other < key ? other : key;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warp_keys[threadIdx.x / 32] = key;
  __syncthreads();
  static_assert(kWarps == 32, "a lane a warp");
  key = shared.warp_keys[threadIdx.x % 32];
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const Key other = __shfl_xor_sync(kAll, key, d);
    key = other < key ? other : key;
  }
  return key;
}

__device__ Key cluster_min(cg::cluster_group& cluster, Shared& shared, Key key) {
  key = block_min(shared, key);
  if (threadIdx.x == 0) shared.key = key;
  cluster.sync();
  for (int b = 0; b < kBlocks; ++b) {
    const Key other = cluster.map_shared_rank(&shared, b)->key;
    key = other < key ? other : key;
  }
  cluster.sync();
  return key;
}

// 64-bit addition in two native 32-bit ones: whoever makes the low word wrap carries.
__device__ __forceinline__ void add_to_bin(Shared& shared, int bin, Sum weight) {
  const auto low = static_cast<std::uint32_t>(weight);
  auto high = static_cast<std::uint32_t>(weight >> 32);
  if (low != 0) {
    const std::uint32_t old = atomicAdd(&shared.low[bin], low);
    if (old + low < old) ++high;
  }
  if (high != 0) atomicAdd(&shared.high[bin], high);
}

// `mine` is the sum of bin threadIdx.x: the total, and through shared.bin and shared.ahead the bin
// in which the running sum first exceeds target_of(total). Returns the target.
template <class TargetOf>
__device__ Sum choose(Shared& shared, Sum mine, const TargetOf& target_of) {
  const int tid = static_cast<int>(threadIdx.x);
  Sum running = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Sum other = __shfl_up_sync(kAll, running, d);
    if (tid % 32 >= d) running += other;
  }
  if (tid % 32 == 31) shared.warp_sums[tid / 32] = running;
  __syncthreads();
  Sum total = 0;
  for (int w = 0; w < kWarps; ++w) {
    running += w < tid / 32 ? shared.warp_sums[w] : 0;
    total += shared.warp_sums[w];
  }
  const Sum target = target_of(total);
  if (running > target && running - mine <= target) {
    shared.bin = static_cast<Sum>(tid);
    shared.ahead = running - mine;
  }
  __syncthreads();
  return target;
}

struct Query {
  Find what;
  Key cut;  // keys beyond it take no part
  float largest;
  float scale;  // bins a unit of distance from the largest logit
  SampleParams params;

  __device__ Sum weight(float logit) const {
    return what == Find::kTopK ? 1 : sample::weight_of(logit, largest, params.temperature);
  }
  // Does not fall with the order of the candidates.
  __device__ int bin(float logit) const {
    const float at = (largest - logit) * scale;
    return at < static_cast<float>(kBins - 1) ? static_cast<int>(at) : kBins - 1;
  }
  __device__ Sum target(Sum total) const {
    if (what == Find::kTopK) return static_cast<Sum>(params.top_k - 1);
    if (what == Find::kDraw) {
      return sample::draw_below(sample::random_bits(params.seed, params.position), total);
    }
    const Sum enough = sample::top_p_sum(total, params.top_p);
    return enough > 0 ? enough - 1 : 0;
  }
};

__device__ __forceinline__ void clear_bins(Shared& shared) {
  shared.low[threadIdx.x] = 0;
  shared.high[threadIdx.x] = 0;
}
__device__ __forceinline__ Sum bin_sum(const Shared& shared, int bin) {
  return (static_cast<Sum>(shared.high[bin]) << 32) + shared.low[bin];
}
__device__ Sum cluster_bin_sum(cg::cluster_group& cluster, Shared& shared) {
  Sum sum = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    sum += bin_sum(*cluster.map_shared_rank(&shared, b), static_cast<int>(threadIdx.x));
  }
  return sum;
}

// Among the n keys of this block's list: the one at which the running sum first exceeds target.
__device__ Key find_in_list(Shared& shared, const Query& query, int n, Sum target) {
  const int tid = static_cast<int>(threadIdx.x);
  for (;;) {
    Key mine[kListKeys / kThreads];
    Key least = ~Key{0};
    Key most = 0;
#pragma unroll
    for (int i = 0; i < kListKeys / kThreads; ++i) {
      const int at = tid + i * kThreads;
      mine[i] = at < n ? shared.list[at] : 0;
      if (at < n) {
        least = mine[i] < least ? mine[i] : least;
        most = mine[i] > most ? mine[i] : most;
      }
    }
    least = block_min(shared, least);
    most = ~block_min(shared, ~most);
    if (least == most) return least;
    const int bits = 64 - __clzll(static_cast<long long>(most - least));
    const int shift = bits > kDigitBits ? bits - kDigitBits : 0;
    clear_bins(shared);
    if (tid == 0) shared.list_count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kListKeys / kThreads; ++i) {
      if (mine[i] != 0) {
        add_to_bin(shared, static_cast<int>((mine[i] - least) >> shift),
                   query.weight(logit_of(mine[i])));
      }
    }
    __syncthreads();
    choose(shared, bin_sum(shared, tid), [&](Sum) { return target; });
    if (shift == 0) return least + shared.bin;
    target -= shared.ahead;
#pragma unroll
    for (int i = 0; i < kListKeys / kThreads; ++i) {
      if (mine[i] != 0 && (mine[i] - least) >> shift == shared.bin) {
        shared.list[atomicAdd(&shared.list_count, 1)] = mine[i];
      }
    }
    __syncthreads();
    n = shared.list_count;
    __syncthreads();
  }
}

// The same among all candidates of bin `bin`, for bins that no list holds: digits of the key.
__device__ Key find_by_digits(cg::cluster_group& cluster, Shared& shared, const RowView& row,
                              const Query& query, int bin, Sum target) {
  Key prefix = 0;
  for (int shift = 60; shift >= 0; shift -= kDigitBits) {
    clear_bins(shared);
    __syncthreads();
    row.for_each([&](float logit, int id) {
      const Key key = key_of(logit, id);
      if (key > query.cut || query.bin(logit) != bin || (key >> shift) >> kDigitBits != prefix) {
        return;
      }
      add_to_bin(shared, static_cast<int>((key >> shift) & (kBins - 1)), query.weight(logit));
    });
    cluster.sync();
    choose(shared, cluster_bin_sum(cluster, shared), [&](Sum) { return target; });
    prefix = (prefix << kDigitBits) | shared.bin;
    target -= shared.ahead;
    cluster.sync();  // the bins and the choice have been read
  }
  return prefix;
}

// The key at which the running sum of weights, over keys <= cut in order, first exceeds the target.
__device__ __noinline__ Key find(cg::cluster_group& cluster, Shared& shared, const RowView& row,
                                 const Query& query) {
  clear_bins(shared);
  if (threadIdx.x == 0) shared.list_count = 0;
  __syncthreads();
  row.for_each([&](float logit, int id) {
    if (key_of(logit, id) > query.cut) return;
    add_to_bin(shared, query.bin(logit), query.weight(logit));
  });
  cluster.sync();
  Sum target = choose(shared, cluster_bin_sum(cluster, shared),
                      [&](Sum total) { return query.target(total); });
  target -= shared.ahead;
  const int bin = static_cast<int>(shared.bin);
  Shared* first = cluster.map_shared_rank(&shared, 0);
  row.for_each([&](float logit, int id) {
    const Key key = key_of(logit, id);
    if (key > query.cut || query.bin(logit) != bin) return;
    const int at = atomicAdd(&first->list_count, 1);
    if (at < kListKeys) first->list[at] = key;
  });
  cluster.sync();
  const int count = first->list_count;
  cluster.sync();  // the count has been read
  Key key;
  if (count <= kListKeys) {
    if (row.rank == 0) {
      key = find_in_list(shared, query, count, target);
      if (threadIdx.x == 0) shared.key = key;
    }
    cluster.sync();
    key = first->key;
    cluster.sync();
  } else {
    key = find_by_digits(cluster, shared, row, query, bin, target);
  }
  return key;
}

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(const SampleArgs args, int aligned) {
  __shared__ Shared shared;
  pdl_trigger();
  pdl_wait();
  const int output = static_cast<int>(blockIdx.y);
  if (output >= args.step.head->outputs) return;  // the whole cluster
  cg::cluster_group cluster = cg::this_cluster();
  const RowView row{args.logits + static_cast<std::size_t>(output) * args.vocab, args.limit,
                    aligned != 0, static_cast<int>(cluster.block_rank())};
  const SampleParams params = args.step.sampling[output];
  std::int32_t* token = args.tokens + output;
  const bool writes = row.rank == 0 && threadIdx.x == 0;

  // A thread sees its candidates by ascending id, so the first of equal logits stays.
  float top = -INFINITY;
  float low = INFINITY;
  int top_id = -1;
  bool nan = false;
  row.for_each([&](float logit, int id) {
    nan = nan || logit != logit;
    low = logit < low ? logit : low;
    if (logit > top || top_id < 0) {
      top = logit;
      top_id = id;
    }
  });
  // NaN anywhere wins, with key 0.
  Key best = nan ? 0 : top_id < 0 ? ~Key{0} : key_of(top, top_id);
  Key worst = key_of(low, 0);
  best = cluster_min(cluster, shared, best);
  const float largest = logit_of(best);
  if (best == 0 || largest - largest != 0.0f) {
    if (writes) *token = sample::kBadLogits;
    return;
  }
  if (!(params.temperature > 0.0f)) {
    if (writes) *token = id_of(best);
    return;
  }

  // Bins cover the distances that have weight, or those that occur when they are fewer.
  const float spread = largest - logit_of(~cluster_min(cluster, shared, ~worst));
  const float weighty = 28.0f * params.temperature;  // beyond 40 ln 2 temperatures weights are 0
  const auto scale_of = [](float range) {
    return range > 0.0f ? static_cast<float>(kBins - 1) / range : 0.0f;
  };
  Query query{Find::kTopK, ~Key{0}, largest, scale_of(spread), params};
  if (params.top_k > 0 && params.top_k < args.limit) query.cut = find(cluster, shared, row, query);
  query.scale = scale_of(weighty < spread ? weighty : spread);
  if (params.top_p < 1.0f) {
    query.what = Find::kTopP;
    query.cut = params.top_p > 0.0f ? find(cluster, shared, row, query) : best;
  }
  query.what = Find::kDraw;
  if (params.min_p > 0.0f) {
    // The first candidate below the floor ends the list; one without weight is in no list.
    const Sum floor = sample::fixed_point(params.min_p < 1.0f ? params.min_p : 1.0f);
    Key end = ~Key{0};
    row.for_each([&](float logit, int id) {
      const Key key = key_of(logit, id);
      if (key > query.cut || key == best) return;
      const Sum weight = query.weight(logit);
      if (weight != 0 && weight < floor) end = key < end ? key : end;
    });
    end = cluster_min(cluster, shared, end);
    if (end <= query.cut) query.cut = end - 1;
  }
  const Key drawn = find(cluster, shared, row, query);
  if (writes) *token = id_of(drawn);
}

}  // namespace

std::size_t workspace_bytes(const SampleArgs&) { return 0; }

void sample(cudaStream_t stream, const SampleArgs& args) {
  check(args.limit >= 1 && args.limit <= args.vocab, "sample: limit of the ids");
  if (args.step.max_outputs <= 0) return;
  const int aligned =
      args.vocab % 4 == 0 && reinterpret_cast<std::uintptr_t>(args.logits) % 16 == 0 ? 1 : 0;
  launch_pdl(stream, sample_kernel, dim3(kBlocks, static_cast<unsigned>(args.step.max_outputs)),
             dim3(kThreads), 0, args, aligned);
}

}  // namespace flashnext::cuda
