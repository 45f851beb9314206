// The ops of experts in host memory on the host device: what they hand over, wait for and give up.
#include "cpp/device/host_device.h"
#include "cpp/device/host_ops.h"
#include "cpp/device/resolve.h"
#include "cpp/gate/cases_offload.h"

#include <algorithm>
#include <chrono>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>

namespace flashnext {
namespace {

using gate::Case;
using gate::Results;
using gate::z;

template <class T>
std::vector<T> values(const Case& c, const Results& results, const std::string& name) {
  std::size_t at = 0;
  for (const gate::Buffer& b : c.buffers) {
    if (!b.output) continue;
    if (b.name == name) {
      std::vector<T> v(results[at].size() / sizeof(T));
      std::memcpy(v.data(), results[at].data(), results[at].size());
      return v;
    }
    ++at;
  }
  ADD_FAILURE() << "no output " << name;
  return {};
}

template <class T>
std::vector<T> input(const Case& c, const std::string& name) {
  for (const gate::Buffer& b : c.buffers) {
    if (b.name != name) continue;
    std::vector<T> v(b.data.size() / sizeof(T));
    std::memcpy(v.data(), b.data.data(), b.data.size());
    return v;
  }
  ADD_FAILURE() << "no buffer " << name;
  return {};
}

// y[pair] = (expert + 1) x[row] for the pairs whose expert was handed over, and no others.
void check_postings(std::int32_t rows, std::int32_t slots) {
  constexpr std::int32_t kDim = 64, kSteps = 5;
  const Case c = gate::mail_case(Op::kCpuPost, rows, slots, kDim);
  const auto ids = input<std::int32_t>(c, "ids");
  const auto cpu = input<std::int32_t>(c, "cpu");
  const auto num_cpu = input<std::int32_t>(c, "num_cpu");
  const auto x = input<float>(c, "x");
  EXPECT_EQ(num_cpu[1], 0);
  for (const bool graph : {false, true}) {
    const auto device = make_host_device({.threads = 2, .seed = 3});
    const Results results = gate::run(*device, c, {.graph = graph});
    const auto y = values<float>(c, results, "y");
    const auto jobs = values<MailJob>(c, results, "jobs");
    const auto heads = values<MailboxHead>(c, results, "mailbox");
    for (std::int32_t step = 0; step < kSteps; ++step) {
      const auto* first = cpu.data() + step * rows * slots;
      std::int32_t posted = 0;
      for (std::int32_t pair = 0; pair < rows * slots; ++pair) {
        const std::int32_t id = ids[z(step * rows * slots + pair)];
        const bool handed = std::count(first, first + num_cpu[z(step)], id) > 0;
        posted += handed ? 1 : 0;
        for (std::int32_t i = 0; i < kDim; ++i) {
          const float xi = x[z((step * rows + pair / slots) * kDim + i)];
          const float want = handed ? static_cast<float>(id + 1) * xi : 0.0f;
          ASSERT_EQ(y[z((step * rows * slots + pair) * kDim + i)], want) << step << " " << pair;
        }
      }
      if (num_cpu[z(step)] == 0) continue;
      const MailboxHead& head = heads[z(step)];
      EXPECT_EQ(head.num_jobs, posted);
      EXPECT_EQ(head.layer, 7 + step);
      EXPECT_EQ(head.posted, head.done);
      EXPECT_EQ(head.stalled, 0u);
      // Experts in the order of the list, the pairs of one side by side and ascending.
      for (std::int32_t i = 1; i < posted; ++i) {
        const MailJob a = jobs[z(step * rows * slots + i - 1)];
        const MailJob b = jobs[z(step * rows * slots + i)];
        const auto place = [&](std::int32_t e) {
          return std::find(first, first + num_cpu[z(step)], e) - first;
        };
        EXPECT_TRUE(place(a.expert) < place(b.expert) || (a.expert == b.expert && a.pair < b.pair));
      }
    }
    EXPECT_EQ(values<MailSequence>(c, results, "sequence")[0].posted,
              4u);  // one step posted nothing
  }
}

TEST(HostOffload, PostedPairsComeBackAndNoOthers) {
  check_postings(5, 4);
  check_postings(kDecodeRows, 10);
}

TEST(HostOffload, ASilentProcessorIsNamedOnceAndNeverWaitedForAgain) {
  const Case c = gate::stall_case(3, 4, 64);
  const auto device = make_host_device({});
  const auto start = std::chrono::steady_clock::now();
  const Results results = gate::run(*device, c);
  const auto passed = std::chrono::steady_clock::now() - start;
  EXPECT_GE(passed, std::chrono::milliseconds(3));
  for (const MailboxHead& head : values<MailboxHead>(c, results, "mailbox")) {
    EXPECT_EQ(head.posted, 1u);
    EXPECT_EQ(head.done, 0u);
    EXPECT_EQ(head.stalled, 1u);
    EXPECT_EQ(head.stalled_layer, 7);
    EXPECT_EQ(head.layer, 7);
  }
  EXPECT_EQ(values<MailSequence>(c, results, "sequence")[0].posted, 1u);
}

TEST(HostOffload, FetchCopiesTheLinesThatAreCountedAndNoMore) {
  const auto device = make_host_device({.threads = 2});
  for (const std::int32_t count : {0, 1, 7}) {
    const Case c = gate::fetch_case(count, 512);
    const auto lines = values<std::byte>(c, gate::run(*device, c), "lines");
    const auto zero = [](std::byte b) { return b == std::byte{0}; };
    EXPECT_TRUE(std::all_of(lines.begin(), lines.begin() + 512, zero));
    for (std::int32_t i = 1; i <= count; ++i) {
      EXPECT_FALSE(std::all_of(lines.begin() + i * 512, lines.begin() + (i + 1) * 512, zero));
    }
  }
}

TEST(HostOffload, FetchReadsTheExpertsLineAndKeepsThePaceOfTheLink) {
  ThreadPool pool(2);
  host::Context context{pool, exl3::Isa::kScalar};
  std::vector<std::byte> bank(5 * 256), to(3 * 256);
  for (std::size_t i = 0; i < bank.size(); ++i) bank[i] = static_cast<std::byte>(i / 256 + 1);
  const Fetch fetches[] = {{to.data() + 256, 4, 0}, {to.data(), 2, 0}, {to.data() + 512, 0, 0}};
  const std::int32_t count = 2;
  CacheCounters counters{};
  counters.resolved_at = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::steady_clock::now().time_since_epoch())
                             .count();
  FetchArgs args{fetches, &count, bank.data(), &counters, 256, 2'000'000, 3};
  host::fetch(args, context);
  EXPECT_EQ(to[0], std::byte{3});
  EXPECT_EQ(to[255], std::byte{3});
  EXPECT_EQ(to[256], std::byte{5});
  EXPECT_EQ(to[512], std::byte{0});
  EXPECT_GE(counters.fetch_ns, 4'000'000);
  EXPECT_LT(counters.fetch_ns, 2'000'000'000);
}

TEST(HostOffload, PaceHoldsAStreamBack) {
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  std::int64_t start = 0;
  host::pace({&start, 0}, context);
  EXPECT_GT(start, 0);
  const auto before = std::chrono::steady_clock::now();
  host::pace({&start, 5'000'000}, context);
  EXPECT_GE(std::chrono::steady_clock::now() - before, std::chrono::milliseconds(4));
  const auto again = std::chrono::steady_clock::now();
  host::pace({&start, 5'000'000}, context);  // that time has passed
  EXPECT_LT(std::chrono::steady_clock::now() - again, std::chrono::seconds(1));
}

// The op writes what the rule says where its consumers look, and nothing of other experts.
TEST(HostOffload, ResolveFillsTheTablesOfTheStep) {
  constexpr std::int32_t kExperts = 8, kLines = 2;
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  std::vector<std::int32_t> line_of(kExperts, -1), expert_of = {3, 5}, stamp = {4, 2};
  line_of[3] = 0;
  line_of[5] = 1;
  // Of the misses 2 was seen longest ago; 4 has never been, and is not asked for.
  std::vector<std::int32_t> seen = {1, 8, 2, 7, 0, 8, 3, 3};
  const std::vector<std::int32_t> order(kExperts, kUnordered), cpu_of = {0, 0, 0, 1};
  const std::int32_t rule = 1;
  const StepHead head{2, 0, 0, 9};
  const std::vector<std::int32_t> ids = {3, 1, 2, 3, 7, 1, -5, -5, -5};  // two rows of three
  std::vector<std::byte> pool_lines(2 * 2304), staging(9 * 2304);
  std::vector<ExpertRef> experts(kExperts);
  std::vector<std::int32_t> group(kExperts, 77), cpu(9, 77);
  std::vector<Fetch> fetches(9);
  std::int32_t num_fetches = 77, num_cpu = 77;
  CacheCounters counters;
  std::memset(&counters, 0xFF, sizeof counters);
  ResolveArgs args{};
  args.rows = {&head.rows, 1, 3};
  args.head = &head;
  args.ids = ids.data();
  args.tables = {line_of.data(), expert_of.data(), stamp.data(), seen.data(), order.data(),
                 &rule,          cpu_of.data(),    nullptr,      kExperts,    kLines};
  args.layout = {{0, 256, 512}, {768, 1024, 1280}, {1536, 1792, 2048}, 2304};
  args.pool = pool_lines.data();
  args.staging = staging.data();
  args.experts = experts.data();
  args.group = group.data();
  args.fetches = fetches.data();
  args.num_fetches = &num_fetches;
  args.cpu = cpu.data();
  args.num_cpu = &num_cpu;
  args.counters = &counters;
  args.slots = 3;
  host::resolve(args, context);
  // 3 is held in line 0; of the misses 1, 2, 7 the processor takes 2; 1 takes line 1, 7 is staged.
  EXPECT_EQ(group, (std::vector<std::int32_t>{77, 1, 2, 0, 77, 77, 77, 1}));
  EXPECT_EQ(line_of, (std::vector<std::int32_t>{-1, 1, -1, 0, -1, -1, -1, -1}));
  EXPECT_EQ(expert_of, (std::vector<std::int32_t>{3, 1}));
  EXPECT_EQ(stamp, (std::vector<std::int32_t>{9, 9}));
  EXPECT_EQ(seen, (std::vector<std::int32_t>{1, 9, 9, 9, 0, 8, 3, 9}));
  EXPECT_EQ(num_fetches, 2);
  EXPECT_EQ(fetches[0].expert, 1);
  EXPECT_EQ(fetches[0].to, pool_lines.data() + 2304);
  EXPECT_EQ(fetches[1].expert, 7);
  EXPECT_EQ(fetches[1].to, staging.data());
  EXPECT_EQ(num_cpu, 1);
  EXPECT_EQ(cpu[0], 2);
  EXPECT_EQ(experts[3].trellis[1], pool_lines.data() + 256);
  EXPECT_EQ(experts[1].svh[2], pool_lines.data() + 2304 + 2048);
  EXPECT_EQ(experts[7].suh[0], staging.data() + 768);
  for (const std::size_t other : {0u, 2u, 4u, 5u, 6u})
    EXPECT_EQ(experts[other].trellis[0], nullptr);
  EXPECT_EQ(counters.hits, 1);
  EXPECT_EQ(counters.fetched, 2);
  EXPECT_EQ(counters.installed, 1);
  EXPECT_EQ(counters.on_cpu, 1);
  EXPECT_EQ(counters.fetch_ns, 0);
  EXPECT_EQ(counters.wait_ns, 0);
  EXPECT_GT(counters.resolved_at, 0);
}

}  // namespace
}  // namespace flashnext
