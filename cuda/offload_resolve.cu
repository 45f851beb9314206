// resolve: cpp/device/resolve.h, bit for bit, by one block.
//
// A thread a (row, slot) pair: it is the expert's first appearance when no earlier pair has the
// same id, which a table of the first pair of every expert tells. Where an expert goes follows from
// how many experts of each kind come before it, which ballots count; which misses are the
// processor's, from how many were seen before. Victims are needed only when something is installed:
// of all lines, those with the smallest keys, found by counting for every line how many go before
// it.
#include "cpp/base/errors.h"
#include "cpp/device/resolve.h"
#include "cuda/device_clock.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/rows.h"

namespace flashnext::cuda {

namespace {

constexpr int kThreads = 512;
static_assert(kMaxPairs <= kThreads, "a thread a pair");
constexpr int kFewPairs = 128;   // of which less is kept and compared
constexpr int kMaxTable = 4096;  // experts, lines
constexpr int kStaticSmem = 48 * 1024;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr std::uint64_t kNever = ~std::uint64_t{0};  // key of a line that is not to be given up

// Order of eviction: smaller goes first, then the lower line. Free lines come before all others.
__device__ __forceinline__ std::uint64_t victim_key(std::int32_t order, std::int32_t stamp) {
  const auto high = static_cast<std::uint32_t>(order) ^ 0x80000000u;
  const auto low = static_cast<std::uint32_t>(stamp) ^ 0x80000000u;
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

__device__ __forceinline__ bool goes_before(std::uint64_t a, std::int32_t a_line, std::uint64_t b,
                                            std::int32_t b_line) {
  return a < b || (a == b && a_line < b_line);
}

// How many of the first `capacity` lines may stand as candidates at once.
int candidate_room(const ResolveArgs& args, int groups) {
  const int lines = args.tables.lines;
  if (lines <= groups) return groups;
  const int most = args.rows.max * args.slots * ceil_div(lines, groups);
  const int room = most < lines ? most : lines;
  return room > kThreads ? room : kThreads;
}

// Lines that may be given up, and how many of them go before each.
struct Candidates {
  std::uint64_t* key;
  std::int32_t* line;
  std::int32_t* place;  // zero before find_places
};

// place[i] = how many of the n candidates go before candidate i.
__device__ void find_places(const Candidates& c, int n) {
  const int parts = n <= kThreads / 4 ? 4 : n <= kThreads / 2 ? 2 : 1;
  const int span = kThreads / parts;
  const int chunk = (n + parts - 1) / parts;
  const int first = static_cast<int>(threadIdx.x) / span * chunk;
  const int end = first + chunk < n ? first + chunk : n;
  for (int i = static_cast<int>(threadIdx.x) % span; i < n; i += span) {
    const std::uint64_t key = c.key[i];
    const std::int32_t line = c.line[i];
    int before = 0;
#pragma unroll 4
    for (int j = first; j < end; ++j) {
      before += goes_before(c.key[j], c.line[j], key, line) ? 1 : 0;
    }
    if (parts == 1) {
      c.place[i] = before;
    } else if (before > 0) {
      atomicAdd(&c.place[i], before);
    }
  }
}

// kPairs: room for the step's, a multiple of 32; also the groups of lines in choose_candidates().
template <int kPairs>
struct Shared {
  std::int32_t cpu_of[kPairs + 1];
  std::int32_t victims[kPairs];
  alignas(16) std::int32_t seen[kPairs];  // of a fetchable pair; -1 of the others
  std::uint32_t used[kMaxTable / 32];     // a bit a line
  // A bit a pair: first appearance of an expert that has a line; that has none and is reachable;
  // that has none and is not; of the fetchable ones, those that are fetched.
  std::uint32_t hits[kPairs / 32], fetchable[kPairs / 32], unreachable[kPairs / 32];
  std::uint32_t fetched[kPairs / 32];
  std::int32_t usable;      // lines that may be given up
  std::int32_t candidates;  // of those, the ones in question
  std::uint64_t bound;      // the last of them
  std::int32_t bound_line;
};

template <int kWords>
__device__ __forceinline__ int total(const std::uint32_t (&bits)[kWords]) {
  int n = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) n += __popc(bits[w]);
  return n;
}

// Set bits before the pair.
template <int kWords>
__device__ __forceinline__ int before(const std::uint32_t (&bits)[kWords], int pair) {
  int n = 0;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const std::uint32_t mask = w < pair / 32 ? kAll : w == pair / 32 ? (1u << (pair % 32)) - 1u : 0;
    n += __popc(bits[w] & mask);
  }
  return n;
}

// How many of the fetchable pairs are fetched before this one is, when time allows for few of them:
// those that were seen later, and of those seen at once the earlier ones.
__device__ __forceinline__ int seen_later(const std::int32_t* all, int pairs, int pair) {
  const std::int32_t mine = all[pair];
  int later = 0;
#pragma unroll 2
  for (int j = 0; j < pairs; j += 4) {
    const int4 seen = reinterpret_cast<const int4*>(all)[j / 4];
    later += (seen.x > mine || (seen.x == mine && j < pair)) ? 1 : 0;
    later += (seen.y > mine || (seen.y == mine && j + 1 < pair)) ? 1 : 0;
    later += (seen.z > mine || (seen.z == mine && j + 2 < pair)) ? 1 : 0;
    later += (seen.w > mine || (seen.w == mine && j + 3 < pair)) ? 1 : 0;
  }
  return later;
}

// With more lines than groups (line % kPairs): the `wanted`-th smallest of the groups' smallest
// keys bounds the victims from above, and only lines up to it become candidates.
template <int kPairs, int kPerThread>
__device__ void choose_candidates(Shared<kPairs>& shared, const Candidates& c,
                                  const std::uint64_t (&keys)[kPerThread], int wanted) {
  const int t = static_cast<int>(threadIdx.x);
  std::uint64_t least = keys[0];
  std::int32_t least_line = t;
#pragma unroll
  for (int q = 1; q < kPerThread; ++q) {
    if (keys[q] < least) {
      least = keys[q];
      least_line = t + kThreads * q;
    }
  }
  c.key[t] = least;
  c.line[t] = least_line;
  __syncthreads();
  if (t < kPairs) {
#pragma unroll
    for (int i = kPairs; i < kThreads; i += kPairs) {
      if (goes_before(c.key[t + i], c.line[t + i], least, least_line)) {
        least = c.key[t + i];
        least_line = c.line[t + i];
      }
    }
    c.key[t] = least;
    c.line[t] = least_line;
  }
  __syncthreads();
  find_places(c, kPairs);
  __syncthreads();
  if (t < kPairs && c.place[t] == wanted - 1) {
    shared.bound = least;
    shared.bound_line = least_line;
  }
  __syncthreads();
  if (t < kPairs) c.place[t] = 0;
#pragma unroll
  for (int q = 0; q < kPerThread; ++q) {
    const std::int32_t line = t + kThreads * q;
    if (keys[q] == kNever || goes_before(shared.bound, shared.bound_line, keys[q], line)) continue;
    const int at = atomicAdd(&shared.candidates, 1);
    c.key[at] = keys[q];
    c.line[at] = line;
  }
}

// shared.victims = the lines to be given up, in order; -1 where there is none. All threads take
// part.
template <int kPairs, int kPerThread>
__device__ void find_victims(Shared<kPairs>& shared, const Candidates& c, int lines,
                             const std::uint64_t (&keys)[kPerThread], int wanted) {
  const int t = static_cast<int>(threadIdx.x);
  int usable = 0;
#pragma unroll
  for (int q = 0; q < kPerThread; ++q) usable += keys[q] != kNever ? 1 : 0;
  usable = static_cast<int>(__reduce_add_sync(kAll, static_cast<unsigned>(usable)));
  if (t % 32 == 0 && usable > 0) atomicAdd(&shared.usable, usable);
  int n = lines;
  if (lines <= kPairs) {
    if (t < lines) {
      c.key[t] = keys[0];
      c.line[t] = t;
    }
    __syncthreads();
  } else {
    choose_candidates(shared, c, keys, wanted);
    __syncthreads();
    n = shared.candidates;
  }
  find_places(c, n);
  __syncthreads();
  for (int i = t; i < n; i += kThreads) {
    if (c.key[i] != kNever && c.place[i] < wanted) shared.victims[c.place[i]] = c.line[i];
  }
  __syncthreads();
}

// Nothing is read early: the uploads of tables may be kernels themselves, and still under way when
// this one starts.
template <int kPairs, int kPerThread>
__global__ void __launch_bounds__(kThreads) resolve_kernel(const ResolveArgs args, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared<kPairs> shared;
  const CacheTables& tables = args.tables;
  const Candidates c{reinterpret_cast<std::uint64_t*>(memory),
                     reinterpret_cast<std::int32_t*>(memory) + 2 * room,
                     reinterpret_cast<std::int32_t*>(memory) + 3 * room};
  std::int32_t* order = reinterpret_cast<std::int32_t*>(memory) + 4 * room;  // (experts)
  // (experts) line, or -1 - seen of an expert that has none: it is asked for only then.
  std::int32_t* line_of = order + tables.experts;
  std::int32_t* first = line_of + tables.experts;  // (experts) pair that has it first, or kPairs
  const int t = static_cast<int>(threadIdx.x);
  const int max_pairs = args.rows.max * args.slots;
  pdl_trigger();
#pragma unroll 1
  for (int i = t; i < room; i += kThreads) c.place[i] = 0;
#pragma unroll 1
  for (int i = t; i < tables.experts; i += kThreads) first[i] = kPairs;
  if (t < kPairs) shared.victims[t] = -1;
  if (t < kMaxTable / 32) shared.used[t] = 0;
  if (t < kPairs / 32) shared.hits[t] = shared.fetchable[t] = shared.unreachable[t] = 0;
  if (t == 0) shared.usable = shared.candidates = shared.cpu_of[0] = 0;
  __syncthreads();
  pdl_wait();

  // Everything that may be needed is asked for before the first answer is used; past L1, since it
  // changes between steps.
  const bool installs = __ldcg(tables.rule) != 0;
  const std::int32_t rows = __ldcg(args.rows.count);
  const std::int32_t sequence = __ldcg(&args.head->sequence);
  const std::int32_t id = t < max_pairs ? __ldcg(args.ids + t) : 0;
  const bool shares = tables.cpu_of != nullptr && t < max_pairs;
  const std::int32_t share_of = shares ? __ldcg(tables.cpu_of + t + 1) : 0;
  std::int32_t held[kPerThread], stamp[kPerThread];  // of line t + kThreads * q
  // Of expert t + kThreads * q.
  std::int32_t expert_line[kPerThread], expert_seen[kPerThread], expert_order[kPerThread];
#pragma unroll
  for (int q = 0; q < kPerThread; ++q) {
    const int at = t + kThreads * q;
    held[q] = at < tables.lines ? __ldcg(tables.expert_of + at) : kFillingLine;
    stamp[q] = at < tables.lines ? __ldcg(tables.stamp + at) : 0;
    expert_line[q] = at < tables.experts ? __ldcg(tables.line_of + at) : 0;
    expert_seen[q] = at < tables.experts ? __ldcg(tables.seen + at) : 0;
    expert_order[q] = at < tables.experts ? __ldcg(tables.order + at) : 0;
  }
  const int pairs = args.slots * rows * args.rows.scale;
  if (t < pairs) atomicMin(&first[id], t);
  if (t < max_pairs) shared.cpu_of[t + 1] = share_of;
#pragma unroll
  for (int q = 0; q < kPerThread; ++q) {
    const int at = t + kThreads * q;
    if (at >= tables.experts) continue;
    line_of[at] = expert_line[q] >= 0 ? expert_line[q] : -1 - expert_seen[q];
    order[at] = expert_order[q];
  }
  __syncthreads();

  std::int32_t expert = -1;  // of this thread's pair when it is the first of its expert
  std::int32_t line = -1;
  bool fetchable = false;  // it has no line, and may be fetched
  if (t < kPairs) {
    if (t < pairs && first[id] == t) {
      expert = id;
      line = line_of[expert];
      if (line >= 0) {
        atomicOr(&shared.used[line / 32], 1u << (line % 32));
      } else {
        fetchable = tables.reachable == nullptr || __ldcg(tables.reachable + expert) != 0;
      }
    }
    shared.seen[t] = fetchable ? -1 - line : -1;
    const unsigned hits = __ballot_sync(kAll, expert >= 0 && line >= 0);
    const unsigned near = __ballot_sync(kAll, fetchable);
    const unsigned far = __ballot_sync(kAll, expert >= 0 && line < 0 && !fetchable);
    if (t % 32 == 0) {
      shared.hits[t / 32] = hits;
      shared.fetchable[t / 32] = shared.fetched[t / 32] = near;
      shared.unreachable[t / 32] = far;
    }
  }
  __syncthreads();

  const int candidates = total(shared.fetchable);
  const int share = shared.cpu_of[candidates];
  const int to_cpu = share < 0 ? 0 : share < candidates ? share : candidates;
  const int fetched = candidates - to_cpu;
  if (to_cpu > 0) {
    if (t < kPairs) {
      const bool goes = fetchable && seen_later(shared.seen, pairs, t) < fetched;
      const unsigned chosen = __ballot_sync(kAll, goes);
      if (t % 32 == 0) shared.fetched[t / 32] = chosen;
    }
    __syncthreads();
  }
  const int wanted = installs ? fetched : 0;
  if (wanted > 0) {
    std::uint64_t keys[kPerThread];
#pragma unroll
    for (int q = 0; q < kPerThread; ++q) {
      const int mine = t + kThreads * q;
      if (held[q] == kFreeLine) {
        keys[q] = static_cast<std::uint64_t>(mine);
      } else if (held[q] == kFillingLine || stamp[q] == sequence ||
                 ((shared.used[mine / 32] >> (mine % 32)) & 1u) != 0) {
        keys[q] = kNever;
      } else {
        keys[q] = victim_key(order[held[q]], stamp[q]);
      }
    }
    find_victims(shared, c, tables.lines, keys, wanted);
  }
  const int installed = shared.usable < wanted ? shared.usable : wanted;

  if (expert >= 0) {
    std::int32_t group = kGroupHit;
    const std::byte* at = nullptr;
    if (line >= 0) {
      tables.stamp[line] = sequence;
      at = args.pool + line * args.layout.bytes;
    } else {
      const int nth = before(shared.fetched, t);
      if (((shared.fetched[t / 32] >> (t % 32)) & 1u) != 0) {
        group = kGroupFetched;
        std::byte* to = nullptr;
        if (nth < installed) {
          const std::int32_t victim = shared.victims[nth];
          const std::int32_t old = __ldcg(tables.expert_of + victim);
          if (old != kFreeLine) tables.line_of[old] = -1;
          tables.expert_of[victim] = expert;
          tables.line_of[expert] = victim;
          tables.stamp[victim] = sequence;
          to = args.pool + victim * args.layout.bytes;
        } else {
          to = args.staging + (nth - installed) * args.layout.bytes;
        }
        args.fetches[nth] = {to, expert, 0};
        at = to;
      } else {
        group = kGroupCpu;
        const int others = before(shared.unreachable, t) + before(shared.fetchable, t) - nth;
        args.cpu[others] = expert;
      }
    }
    tables.seen[expert] = sequence;
    if (group != kGroupCpu) args.experts[expert] = expert_in_line(args.layout, at);
    args.group[expert] = group;
  }
  if (t == 0) {
    const int on_cpu = total(shared.unreachable) + to_cpu;
    *args.num_fetches = fetched;
    *args.num_cpu = on_cpu;
    *args.counters = {total(shared.hits), fetched, installed, on_cpu, 0, 0, device_clock()};
  }
}

}  // namespace

void resolve(cudaStream_t stream, const ResolveArgs& args) {
  const CacheTables& tables = args.tables;
  check(args.rows.max >= 1 && args.slots >= 1 && args.rows.max * args.slots <= kMaxPairs,
        "resolve: rows and slots");
  check(tables.experts >= 1 && tables.experts <= kMaxTable, "resolve: number of experts");
  check(tables.lines >= 0 && tables.lines <= kMaxTable, "resolve: number of lines");
  const bool few = args.rows.max * args.slots <= kFewPairs;
  const bool small = tables.lines <= kThreads && tables.experts <= kThreads;
  constexpr int kMost = kMaxTable / kThreads;
  const auto kernel =
      few ? (small ? resolve_kernel<kFewPairs, 1> : resolve_kernel<kFewPairs, kMost>)
          : (small ? resolve_kernel<kMaxPairs, 1> : resolve_kernel<kMaxPairs, kMost>);
  const int room = candidate_room(args, few ? kFewPairs : kMaxPairs);
  const int bytes = 16 * room + 12 * tables.experts;
  if (bytes + static_cast<int>(sizeof(Shared<kMaxPairs>)) > kStaticSmem) allow_smem(kernel, bytes);
  launch_pdl(stream, kernel, dim3(1), dim3(kThreads), static_cast<std::size_t>(bytes), args, room);
}

}  // namespace flashnext::cuda
