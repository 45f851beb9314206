// Guessed experts on the CUDA device: a layer's chain of ops in a graph of three branches against
// the host device, and what a fetch from ahead costs. The gate's cases run in offload_gpu_test.cpp.
#include "cpp/gate/case.h"
#include "tests/cpp/gpu_rig.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace flashnext {
namespace {

using gate::Random;
using gate::z;

class GuessGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device on this machine";
  }
};

constexpr std::int32_t kExperts = 96, kLines = 24, kSlots = 6, kMaxRows = 4;
constexpr std::int32_t kPairs = kMaxRows * kSlots;
constexpr std::int64_t kLine = 16384;

std::byte value_of(std::int32_t expert) { return static_cast<std::byte>(expert * 5 + 7); }

// Guess, copies ahead, resolution and fetch of one layer, as a graph of three branches that is
// replayed.
class Chain {
 public:
  struct Inputs {
    StepHead head;
    std::int32_t most;
    std::int32_t ids[kPairs], guessed[kPairs];
  };
  struct Outputs {
    std::vector<std::int32_t> line_of, fetched, ahead;  // fetched, ahead: experts
    std::vector<std::byte> pool, staging, lines;
    CacheCounters counters;
  };

  explicit Chain(std::unique_ptr<Device> device)
      : device_(std::move(device)), main_(*device_), side_(*device_), ahead_of_(*device_) {
    auto* bank = room<std::byte>(z(kExperts * kLine), Space::kPinned);
    for (std::int32_t e = 0; e < kExperts; ++e) {
      std::fill_n(bank + e * kLine, kLine, value_of(e));
    }
    in_ = room<Inputs>(1, Space::kPinned);
    auto* in = room<Inputs>(1);
    pool_ = room<std::byte>(z(kLines * kLine));
    staging_ = room<std::byte>(z(kPairs * kLine));
    lines_ = room<std::byte>(z(kMaxGuesses * kLine));

    GuessArgs guess{};
    guess.rows = {&in->head.rows, 1, kMaxRows};
    guess.ids = in->guessed;
    guess.line_of = line_of_ = put(std::vector<std::int32_t>(kExperts, -1));
    guess.most = &in->most;
    guess.lines = lines_;
    guess.fetches = ahead_ = room<Fetch>(kMaxGuesses);
    guess.num_fetches = num_ahead_ = room<std::int32_t>(1);
    guess.counters = room<CacheCounters>(1);
    guess.line_bytes = kLine;
    guess.experts = kExperts;
    guess.slots = kSlots;

    FetchArgs copies{};
    copies.fetches = ahead_;
    copies.count = num_ahead_;
    copies.bank = bank;
    copies.counters = guess.counters;
    copies.line_bytes = kLine;
    copies.max_fetches = kMaxGuesses;

    ResolveArgs resolve{};
    resolve.rows = guess.rows;
    resolve.head = &in->head;
    resolve.ids = in->ids;
    resolve.tables.line_of = line_of_;
    resolve.tables.expert_of = put(std::vector<std::int32_t>(kLines, kFreeLine));
    resolve.tables.stamp = put(std::vector<std::int32_t>(kLines, 0));
    resolve.tables.seen = put(std::vector<std::int32_t>(kExperts, 0));
    resolve.tables.order = put(std::vector<std::int32_t>(kExperts, kUnordered));
    resolve.tables.rule = put(std::vector<std::int32_t>{1});
    resolve.tables.experts = kExperts;
    resolve.tables.lines = kLines;
    resolve.layout = {{0, 256, 512}, {768, 1024, 1280}, {1536, 1792, 2048}, kLine};
    resolve.pool = pool_;
    resolve.staging = staging_;
    resolve.experts = room<ExpertRef>(kExperts);
    resolve.group = room<std::int32_t>(kExperts);
    resolve.fetches = fetches_ = room<Fetch>(kPairs);
    resolve.num_fetches = num_fetches_ = room<std::int32_t>(1);
    resolve.cpu = room<std::int32_t>(kPairs);
    resolve.num_cpu = room<std::int32_t>(1);
    resolve.counters = counters_ = room<CacheCounters>(1);
    resolve.slots = kSlots;

    FetchArgs fetch = copies;
    fetch.fetches = fetches_;
    fetch.count = num_fetches_;
    fetch.counters = counters_;
    fetch.max_fetches = kPairs;
    fetch.ahead = ahead_;
    fetch.num_ahead = num_ahead_;
    fetch.ahead_counters = guess.counters;

    const Event start(*device_), chosen(*device_), copied(*device_), resolved(*device_),
        fetched(*device_);
    Capture capture(*device_, main_.id());
    device_->copy_async(main_.id(), in, in_, sizeof *in);
    edge(start, main_, ahead_of_);
    launch(*device_, ahead_of_.id(), guess);
    edge(chosen, ahead_of_, main_);  // the copies go on
    launch(*device_, ahead_of_.id(), copies);
    launch(*device_, main_.id(), resolve);
    edge(resolved, main_, side_);
    edge(copied, ahead_of_, side_);
    launch(*device_, side_.id(), fetch);
    edge(fetched, side_, main_);
    graph_ = capture.finish();
  }

  Outputs step(const Inputs& inputs) {
    *in_ = inputs;
    graph_.replay(main_.id());
    Outputs out;
    out.line_of = get(line_of_, kExperts);
    out.fetched = experts_of(fetches_, num_fetches_);
    out.ahead = experts_of(ahead_, num_ahead_);
    out.pool = get(pool_, z(kLines * kLine));
    out.staging = get(staging_, z(kPairs * kLine));
    out.lines = get(lines_, z(kMaxGuesses * kLine));
    out.counters = get(counters_, 1)[0];
    return out;
  }

 private:
  template <class T>
  T* room(std::size_t n, Space space = Space::kDevice) {
    blocks_.emplace_back(*device_, space, n * sizeof(T), "test");
    if (space == Space::kDevice) {
      device_->zero_async(main_.id(), blocks_.back().data(), n * sizeof(T));
      device_->synchronize(main_.id());
    }
    return blocks_.back().template as<T>();
  }
  template <class T>
  T* put(const std::vector<T>& values) {
    T* at = room<T>(values.size());
    device_->copy_async(main_.id(), at, values.data(), values.size() * sizeof(T));
    device_->synchronize(main_.id());
    return at;
  }
  template <class T>
  std::vector<T> get(const T* at, std::size_t n) {
    std::vector<T> values(n);
    device_->copy_async(main_.id(), values.data(), at, n * sizeof(T));
    device_->synchronize(main_.id());
    return values;
  }
  std::vector<std::int32_t> experts_of(const Fetch* list, const std::int32_t* count) {
    std::vector<std::int32_t> experts;
    for (const Fetch& f : get(list, z(get(count, 1)[0]))) experts.push_back(f.expert);
    return experts;
  }
  void edge(const Event& event, const Stream& from, const Stream& to) {
    device_->record(event.id(), from.id());
    device_->wait(to.id(), event.id());
  }

  std::unique_ptr<Device> device_;
  std::vector<Block> blocks_;
  Stream main_, side_, ahead_of_;
  Graph graph_;
  Inputs* in_;
  std::int32_t *line_of_, *num_ahead_, *num_fetches_;
  std::byte *pool_, *staging_, *lines_;
  Fetch *ahead_, *fetches_;
  CacheCounters* counters_;
};

}  // namespace

// Over and over with the same lines and lists, so that a missing wait or an old line in a cache
// shows.
TEST_F(GuessGpu, AChainOfALayerIsTheHosts) {
  Chain host(make_host_device({}));
  Chain cuda(make_cuda_device(0, {}));
  Random random(6);
  std::int64_t guessed = 0, in = 0, fetched = 0;
  for (std::int32_t step = 1; step <= 300; ++step) {
    Chain::Inputs inputs{};
    inputs.head = {1 + random.below(kMaxRows), 0, 0, step};
    inputs.most = random.below(kMaxGuesses + 1);
    for (std::int32_t i = 0; i < kPairs; ++i) {
      const std::int32_t slot = i % kSlots;
      inputs.ids[i] = slot * 16 + random.below(16);
      const bool right = random.below(3) > 0;
      inputs.guessed[i] = right ? inputs.ids[i] : slot * 16 + random.below(16);
    }
    const Chain::Outputs want = host.step(inputs);
    const Chain::Outputs got = cuda.step(inputs);
    ASSERT_EQ(got.ahead, want.ahead) << "step " << step;
    ASSERT_EQ(got.fetched, want.fetched) << "step " << step;
    ASSERT_EQ(got.line_of, want.line_of) << "step " << step;
    ASSERT_EQ(got.lines, want.lines) << "step " << step;
    ASSERT_EQ(got.staging, want.staging) << "step " << step;
    ASSERT_EQ(got.pool, want.pool) << "step " << step;
    ASSERT_EQ(std::memcmp(&got.counters, &want.counters, offsetof(CacheCounters, fetch_ns)), 0)
        << "step " << step;
    for (std::int32_t e = 0; e < kExperts; ++e) {
      const std::int32_t line = got.line_of[z(e)];
      if (line < 0) continue;
      const std::byte* at = got.pool.data() + line * kLine;
      const auto right = [&](std::byte b) { return b == value_of(e); };
      ASSERT_TRUE(std::all_of(at, at + kLine, right)) << "step " << step << " expert " << e;
    }
    guessed += got.counters.guessed;
    in += got.counters.guessed_in;
    fetched += got.counters.fetched;
  }
  EXPECT_GT(in, 100);
  EXPECT_GT(guessed, in);
  EXPECT_GT(fetched, in);
}

// Of lines of full size: what lies ahead is not waited for at the pace of the link.
TEST_F(GuessGpu, LinesFromAheadTakeTheDevicesTimeNotTheLinks) {
  constexpr std::int64_t kFull = 1862400;
  test::Rig rig = test::Rig::cuda();
  const Block bank(rig.device(), Space::kPinned, z(kMaxGuesses * kFull), "bank");
  const std::vector<std::byte> content = Random(8).bytes(z(kMaxGuesses * kFull));
  std::memcpy(bank.data(), content.data(), content.size());
  auto* there = rig.put(Random(9).bytes(z(kMaxGuesses * kFull)));
  auto* to = rig.room<std::byte>(z(kMaxGuesses * kFull));
  const std::vector<std::byte> near = rig.get(there, z(kMaxGuesses * kFull));
  std::vector<Fetch> fetches, ahead;
  for (std::int32_t i = 0; i < kMaxGuesses; ++i) {
    fetches.push_back({to + i * kFull, i, 0});
    ahead.push_back({there + i * kFull, (i + 3) % kMaxGuesses, 0});  // line i: of expert i + 3
  }
  auto* counters = rig.room<CacheCounters>(2);
  FetchArgs a{};
  a.fetches = rig.put(fetches);
  a.bank = bank.as<std::byte>();
  a.counters = counters;
  a.line_bytes = kFull;
  a.max_fetches = 80;
  a.ahead = rig.put(ahead);
  a.ahead_counters = counters + 1;
  a.count = rig.put(std::vector<std::int32_t>{kMaxGuesses});
  auto* num_ahead = rig.room<std::int32_t>(1);
  a.num_ahead = num_ahead;
  std::int64_t spent[kMaxGuesses + 1];
  for (const std::int32_t n : {0, 4, 8}) {
    rig.set(num_ahead, std::vector<std::int32_t>{n});
    spent[n] = std::int64_t{1} << 60;
    for (int i = 0; i < 10; ++i) {
      rig.set(counters, std::vector<CacheCounters>(2));
      launch(rig.device(), rig.stream(), PaceArgs{&counters->resolved_at, 0});
      rig.run(a);
      const CacheCounters c = rig.get(counters, 1)[0];
      EXPECT_EQ(c.guessed, n);
      EXPECT_EQ(c.guessed_in, n);
      spent[n] = std::min(spent[n], c.fetch_ns);
    }
    const std::vector<std::byte> got = rig.get(to, z(kMaxGuesses * kFull));
    for (std::int32_t e = 0; e < kMaxGuesses; ++e) {
      const std::int32_t line = (e + kMaxGuesses - 3) % kMaxGuesses;
      const std::byte* want = line < n ? near.data() + line * kFull : content.data() + e * kFull;
      EXPECT_EQ(std::memcmp(got.data() + e * kFull, want, z(kFull)), 0) << n << " ahead, " << e;
    }
    std::printf("8 lines, %d of them ahead: %.1f us\n", n, 1e-3 * static_cast<double>(spent[n]));
  }
  EXPECT_LT(spent[8], spent[0] / 2);
  EXPECT_LT(spent[4], spent[0] * 3 / 4);

  // On a played link of 40 ms a line: two come over it, after copies that ended 30 ms after the
  // resolution.
  constexpr std::int64_t kMs = 1'000'000;
  rig.set(num_ahead, std::vector<std::int32_t>{6});
  std::vector<CacheCounters> times(2);
  rig.set(counters, times);
  a.ns_per_line = 40 * kMs;
  launch(rig.device(), rig.stream(), PaceArgs{&counters->resolved_at, 0});
  rig.run(a);  // the copies ended long ago
  times[0] = rig.get(counters, 1)[0];
  EXPECT_GE(times[0].fetch_ns, 80 * kMs);
  EXPECT_LT(times[0].fetch_ns, 120 * kMs);
  times[0].fetch_ns = 0;
  launch(rig.device(), rig.stream(), PaceArgs{&counters->resolved_at, 0});
  times[0].resolved_at = rig.get(counters, 1)[0].resolved_at;
  times[1].resolved_at = times[0].resolved_at - 5 * kMs;
  times[1].fetch_ns = 35 * kMs;
  rig.set(counters, times);
  rig.run(a);
  const std::int64_t late = rig.get(counters, 1)[0].fetch_ns;
  EXPECT_GE(late, 110 * kMs);
  EXPECT_LT(late, 150 * kMs);
}

}  // namespace flashnext
