// Experts in host memory on the CUDA device: every case of the gate against the host device, and
// what only a device can show: memory that is pinned afterwards, two branches of a graph, times.
#include "cpp/device/resolve.h"
#include "cpp/gate/cases_offload.h"
#include "cpp/gate/plan.h"
#include "tests/cpp/conformance.h"

#include <chrono>
#include <cstdio>
#include <sys/mman.h>

using namespace flashnext;
using namespace flashnext::test;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Offload : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device on this machine";
    cuda = make_cuda_device(0, {});
    host = make_host_device({});
    stream = std::make_unique<Stream>(*cuda);
  }
  void TearDown() override {
    stream.reset();
    blocks.clear();
  }

  void check(const Case& c) {
    SCOPED_TRACE(c.name + ", rows " + std::to_string(c.rows));
    const Results whole = run(*cuda, c);
    expect_close(c, whole, run(*host, c));
    expect_same(c, run(*cuda, c, {.graph = true}), whole, 0, "graph against eager");
  }

  template <class T>
  T* put(const std::vector<T>& values) {
    T* at = room<T>(values.size());
    cuda->copy_async(stream->id(), at, values.data(), values.size() * sizeof(T));
    cuda->synchronize(stream->id());
    return at;
  }
  template <class T>
  T* room(std::size_t n, Space space = Space::kDevice) {
    blocks.emplace_back(*cuda, space, n * sizeof(T), "test");
    return blocks.back().as<T>();
  }
  template <class T>
  std::vector<T> get(const T* at, std::size_t n) {
    std::vector<T> values(n);
    cuda->copy_async(stream->id(), values.data(), at, n * sizeof(T));
    cuda->synchronize(stream->id());
    return values;
  }
  std::unique_ptr<Device> cuda;
  std::unique_ptr<Device> host;
  std::vector<Block> blocks;
  std::unique_ptr<Stream> stream;
};

}  // namespace

TEST_F(Offload, TheGatesCasesPass) {
  std::size_t cases = 0;
  const std::vector<Planned> plan = op_plan();
  for (auto planned = plan.rbegin(); planned != plan.rend(); ++planned) {
    const Case c = planned->make();
    if (c.op < Op::kResolve) break;  // they come last
    check(c);
    ++cases;
  }
  EXPECT_GT(cases, 100u);
}

// Fetched lines of full size out of memory that was pinned after it was filled, and a played link.
TEST_F(Offload, FetchFromMemoryThatIsPinnedLater) {
  constexpr std::int64_t kLine = 1862400;
  constexpr std::int32_t kExperts = 8;
  const std::size_t bytes = (z(kExperts * kLine) + 4095) / 4096 * 4096;
  void* bank = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(bank, MAP_FAILED);
  const std::vector<std::byte> content = Random(3).bytes(z(kExperts * kLine));
  std::memcpy(bank, content.data(), content.size());
  const std::size_t parts = cuda->allocations().size();
  ASSERT_TRUE(cuda->pin(bank, bytes, "bank"));
  EXPECT_EQ(cuda->allocations().size(), parts + 1);
  EXPECT_THROW(cuda->pin(bank, bytes, "bank"), LogicError);

  auto* lines = room<std::byte>(z(4 * kLine));
  const std::vector<std::int32_t> wanted = {5, 0, 7, 5};
  std::vector<Fetch> fetches;
  for (std::int32_t i = 0; i < 4; ++i) {
    fetches.push_back({lines + (3 - i) * kLine, wanted[z(i)], 0});
  }
  FetchArgs a{};
  a.fetches = put(fetches);
  a.count = put(std::vector<std::int32_t>{4});
  a.bank = static_cast<std::byte*>(bank);
  a.counters = put(std::vector<CacheCounters>(1));
  a.line_bytes = kLine;
  a.max_fetches = 80;
  launch(*cuda, stream->id(), a);
  const std::vector<std::byte> got = get(lines, z(4 * kLine));
  for (std::int32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(
        std::memcmp(got.data() + (3 - i) * kLine, content.data() + wanted[z(i)] * kLine, z(kLine)),
        0)
        << i;
  }
  // The same with a link of 5 ms a line. The clock starts with a resolution, or a pace.
  launch(*cuda, stream->id(), PaceArgs{&a.counters->resolved_at, 0});
  a.ns_per_line = 5'000'000;
  launch(*cuda, stream->id(), a);
  EXPECT_GE(get(a.counters, 1)[0].fetch_ns, 20'000'000);

  cuda->unpin(bank);
  EXPECT_EQ(cuda->allocations().size(), parts + 4);  // what the test put there
  munmap(bank, bytes);
}

TEST_F(Offload, PaceHoldsItsStreamBack) {
  auto* start = room<std::int64_t>(1);
  const auto before = Clock::now();
  launch(*cuda, stream->id(), PaceArgs{start, 0});
  launch(*cuda, stream->id(), PaceArgs{start, 20'000'000});
  cuda->synchronize(stream->id());
  EXPECT_GE(seconds_since(before), 0.0199);
}

// Large blocks are registered pages: zero, aligned, reachable from kernels and copies, given back.
TEST_F(Offload, LargePinnedBlocks) {
  constexpr std::size_t kBytes = (std::size_t{300} << 20) + 256;
  const std::size_t parts = cuda->allocations().size();
  const auto start = Clock::now();
  {
    const Block block(*cuda, Space::kPinned, kBytes, "bank");
    std::printf("300 MiB pinned in %.1f ms\n", 1e3 * seconds_since(start));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 256, 0u);
    auto* bytes = block.as<unsigned char>();
    for (std::size_t i = 0; i < kBytes; i += 4096) ASSERT_EQ(bytes[i], 0);
    EXPECT_EQ(bytes[kBytes - 1], 0);
    bytes[kBytes - 256] = 77;
    auto* line = room<std::byte>(256);
    FetchArgs a{};
    a.fetches = put(std::vector<Fetch>{{line, static_cast<std::int32_t>(kBytes / 256 - 1), 0}});
    a.count = put(std::vector<std::int32_t>{1});
    a.bank = block.as<std::byte>();
    a.counters = put(std::vector<CacheCounters>(1));
    a.line_bytes = 256;
    a.max_fetches = 1;
    launch(*cuda, stream->id(), a);
    EXPECT_EQ(get(line, 1)[0], std::byte{77});
    bytes[0] = 5;
    cuda->copy_async(stream->id(), line, block.data(), 256);
    EXPECT_EQ(get(line, 1)[0], std::byte{5});
  }
  EXPECT_EQ(cuda->allocations().size(), parts + 4);  // what the test put there
  EXPECT_THROW(cuda->allocate(Space::kPinned, std::size_t{1} << 48, "too much"), OutOfMemory);
  const Block again(*cuda, Space::kPinned, kBytes, "bank");  // the device is still of use
}

// Lines are fetched on a branch while the main stream goes on; both meet again. Over and over, with
// an answer that depends on the order.
TEST_F(Offload, ABranchOfAGraphFetches) {
  constexpr std::int64_t kLine = 65536;
  constexpr std::int32_t kExperts = 512;
  Stream side(*cuda);
  Event forked(*cuda), joined(*cuda);
  auto* bank = room<std::byte>(z(kExperts * kLine), Space::kPinned);
  for (std::int32_t e = 0; e < kExperts; ++e) {
    std::memset(bank + e * kLine, e % 251, z(kLine));
  }
  constexpr std::int32_t kLines = 16, kSlots = 10;
  auto* pool = put(std::vector<std::byte>(z(kLines * kLine)));  // all of it is read back
  auto* staging = room<std::byte>(z(kSlots * kLine));
  auto* head = room<StepHead>(1, Space::kPinned);
  auto* ids = room<std::int32_t>(z(kSlots), Space::kPinned);
  ResolveArgs r{};
  r.head = room<StepHead>(1);
  auto* ids_there = room<std::int32_t>(z(kSlots));
  r.rows = {&r.head->rows, 1, 1};
  r.ids = ids_there;
  auto* line_of = put(std::vector<std::int32_t>(kExperts, -1));
  r.tables = {line_of,
              put(std::vector<std::int32_t>(kLines, kFreeLine)),
              put(std::vector<std::int32_t>(kLines, 0)),
              put(std::vector<std::int32_t>(kExperts, 0)),
              put(std::vector<std::int32_t>(kExperts, kUnordered)),
              put(std::vector<std::int32_t>{1}),
              nullptr,
              nullptr,
              kExperts,
              kLines};
  r.layout = {{0, 256, 512}, {768, 1024, 1280}, {1536, 1792, 2048}, kLine};
  r.pool = pool;
  r.staging = staging;
  r.experts = room<ExpertRef>(kExperts);
  r.group = room<std::int32_t>(kExperts);
  auto* fetches = room<Fetch>(z(kSlots));
  r.fetches = fetches;
  r.num_fetches = room<std::int32_t>(1);
  r.cpu = room<std::int32_t>(z(kSlots));
  r.num_cpu = room<std::int32_t>(1);
  r.counters = room<CacheCounters>(1);
  r.slots = kSlots;
  FetchArgs f{fetches, r.num_fetches, bank, r.counters, kLine, 0, kSlots};
  auto* clock = room<std::int64_t>(1);
  Capture capture(*cuda, stream->id());
  cuda->copy_async(stream->id(), ids_there, ids, z(kSlots) * 4);
  cuda->copy_async(stream->id(), const_cast<StepHead*>(r.head), head, sizeof *head);
  launch(*cuda, stream->id(), r);
  cuda->record(forked.id(), stream->id());
  cuda->wait(side.id(), forked.id());
  launch(*cuda, side.id(), f);
  cuda->record(joined.id(), side.id());
  cuda->wait(stream->id(), joined.id());
  launch(*cuda, stream->id(), PaceArgs{clock, 0});
  const Graph graph = capture.finish();
  Random random(4);
  for (std::int32_t step = 1; step <= 300; ++step) {
    *head = {1, 0, 0, step};
    for (std::int32_t s = 0; s < kSlots; ++s) ids[s] = (random.below(4) + s * 4 + step / 8) % 512;
    graph.replay(stream->id());
    cuda->synchronize(stream->id());
    const auto where = get(line_of, kExperts);
    const auto lines = get(pool, z(kLines * kLine));
    for (std::int32_t s = 0; s < kSlots; ++s) {
      const std::int32_t line = where[z(ids[s])];
      ASSERT_GE(line, 0) << "step " << step;
      const auto want = static_cast<std::byte>(ids[s] % 251);
      for (const std::int64_t at : {std::int64_t{0}, kLine / 2, kLine - 1}) {
        ASSERT_EQ(lines[z(line * kLine + at)], want) << "step " << step << " slot " << s;
      }
    }
  }
}
