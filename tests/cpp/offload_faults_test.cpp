// What may go wrong with experts in host memory, and what is left then: the same text, a message,
// and a session that goes on.
#include "cpp/device/host_device.h"
#include "cpp/session/memory_plan.h"
#include "cpp/session/offload.h"
#include "tests/cpp/offload_cases.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <unistd.h>

namespace flashnext {
namespace {

using namespace test;

const std::vector<float>& reference() {
  static const std::vector<float> logits = plain_logits(demo_options());
  return logits;
}

// What Session::open() builds, on a device that pins no more than it is told.
struct Parts {
  explicit Parts(std::size_t pin_limit, std::int64_t deadline_ns = 5'000'000'000)
      : checkpoint(Checkpoint::open(demo_path())) {
    HostDeviceOptions host;
    host.threads = 2;
    host.pin_limit = pin_limit;
    device = make_host_device(host);
    WeightOptions w;
    w.rope_positions = 512;
    w.experts = false;
    weights.emplace(Weights::load(checkpoint, *device, w));
    bank.emplace(Bank::fill(checkpoint, *device, {std::uint64_t{1} << 30, 2}));
    cache::CacheOptions c;
    c.lines = kDemoExperts / 4;
    c.trunk_layers = checkpoint.shape().layers;
    c.decode_rows = decode_rows(1);
    c.cpu = true;
    c.cpu_options.threads = 2;
    c.cpu_deadline_ns = deadline_ns;
    const ModelShape& s = checkpoint.shape();
    cache.emplace(*device, *bank, cache_shape(checkpoint, *bank), s.hidden, s.expert_inner, 32258,
                  c);
    EngineOptions e;
    e.window = 512;
    engine.emplace(*device, checkpoint, *weights, e, &*cache);
    cache->fill(nullptr, {}, {});
  }

  std::vector<float> logits(std::size_t n) {
    const std::vector<std::int32_t> ids = sample_ids(n, 1);
    std::vector<float> all;
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_TRUE(engine->reserve(0, 1));
      const LaneRows rows{0, std::span(ids).subspan(i, 1), LaneRows::Logits::kAll, {}};
      const float* row = engine->step({&rows, 1}, true).front().logits;
      all.insert(all.end(), row, row + engine->vocab());
    }
    return all;
  }

  Checkpoint checkpoint;
  std::unique_ptr<Device> device;
  std::optional<Weights> weights;
  std::optional<Bank> bank;
  std::optional<cache::ExpertCache> cache;
  std::optional<Engine> engine;
};

std::vector<float> first(std::size_t positions) {
  const auto size = static_cast<std::ptrdiff_t>(positions * 1536);
  return {reference().begin(), reference().begin() + size};
}

TEST(OffloadFaults, PinningRefusedHalfWay) {
  Parts all(std::numeric_limits<std::size_t>::max());
  const std::uint64_t pinned = all.bank->report().pinned_bytes;
  for (const std::uint64_t limit : {std::uint64_t{0}, pinned / 2}) {
    Parts some(limit);
    EXPECT_LT(some.bank->report().pinned_bytes, pinned);
    EXPECT_FALSE(some.bank->report().note.empty());
    expect_same(some.logits(40), first(40), "pinned up to " + std::to_string(limit));
    std::uint64_t on_cpu = 0;
    for (const cache::LayerStats& s : some.cache->stats()) on_cpu += s.on_cpu;
    EXPECT_GT(on_cpu, 0u) << "what is not pinned is the processor's";
    some.engine->check_cache();
  }
}

TEST(OffloadFaults, ExpertsThatOnlyTheStalledProcessorReaches) {
  Parts parts(0, 20'000'000);
  parts.cache->cpu()->stall(true);
  try {
    parts.logits(8);
    FAIL() << "nobody computed the misses";
  } catch (const StalledError& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("rank 0, layer "), std::string::npos) << text;
    EXPECT_NE(text.find("sequence "), std::string::npos) << text;
  }
}

class Faulty final : public cache::Policy {
 public:
  enum class Kind { kThrows, kBadIds, kSlow };
  explicit Faulty(Kind kind) : kind_(kind) {}
  std::string name() const override { return "faulty"; }
  std::vector<std::vector<std::int32_t>> initial(const cache::CacheShape& shape,
                                                 std::span<const std::uint64_t>) override {
    return std::vector<std::vector<std::int32_t>>(static_cast<std::size_t>(shape.layers), {0, 1});
  }
  cache::PlanOutput plan(const cache::PolicyInput&) override {
    if (kind_ == Kind::kThrows) throw std::runtime_error("no idea");
    if (kind_ == Kind::kSlow) std::this_thread::sleep_for(std::chrono::milliseconds(600));
    cache::PlanOutput out;
    if (kind_ == Kind::kBadIds) out.promote.push_back({0, 100000});
    return out;
  }

 private:
  Kind kind_;
};

TEST(OffloadFaults, PoliciesThatMisbehaveAreReplaced) {
  for (const Faulty::Kind kind :
       {Faulty::Kind::kThrows, Faulty::Kind::kBadIds, Faulty::Kind::kSlow}) {
    SessionOptions o = offloaded(demo_options(), kDemoExperts / 4);
    o.policy = std::make_shared<Faulty>(kind);
    o.plan_every = 8;
    const auto session = open_demo(o);
    expect_same(session->logits(sample_ids(40, 1), 1), first(40), "faulty policy");
    const auto& fault = session->cache()->planner().fault();
    ASSERT_TRUE(fault.has_value());
    EXPECT_NE(fault->message().find("faulty"), std::string::npos) << fault->message();
    EXPECT_EQ(session->cache()->planner().policy_name(), "recency");
    session->check_cache();
  }
}

// Requests end anywhere, with promotions under way; the next ones get what they always get.
TEST(OffloadFaults, CancelledWithCopiesUnderWay) {
  SessionOptions o = offloaded(demo_options(), kDemoTopK + 2);
  o.lanes = 2;
  o.policy = std::make_shared<WildPolicy>();
  o.plan_every = 1;
  o.cpu_misses = "1";
  o.cpu_threads = 1;
  const auto session = open_demo(o);
  SessionOptions plain = demo_options();
  plain.lanes = 2;
  const auto resident = open_demo(plain);
  std::vector<Request> requests(2);
  for (std::uint32_t i = 0; i < 2; ++i) {
    requests[i].prompt = sample_ids(30 + i, i + 1);
    requests[i].max_new_tokens = 300;  // the cancel comes long before
  }
  const std::vector<Completion> want = resident->generate(requests, {});
  for (int stop = 1; stop <= 5; ++stop) {
    GenerateHooks hooks;
    int tokens = 0;
    hooks.on_token = [&](std::size_t, std::int32_t) {
      if (++tokens == stop) session->cancel();
      return false;
    };
    const std::vector<Completion> cut = session->generate(requests, hooks);
    EXPECT_EQ(cut[0].finish, Finish::kCancelled);
    std::vector<Request> again = requests;
    for (Request& r : again) r.max_new_tokens = 12;
    const std::vector<Completion> got = session->generate(again, {});
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(got[i].tokens, std::vector(want[i].tokens.begin(), want[i].tokens.begin() + 12))
          << stop;
    }
    session->check_cache();
  }
}

TEST(OffloadFaults, BudgetOneLineShort) {
  SessionOptions o = offloaded(demo_options(), kDemoExperts / 2);
  const Checkpoint checkpoint = Checkpoint::open(demo_path());
  const auto device = make_host_device({});
  const MemoryPlan plan = plan_memory(checkpoint, o, *device);
  const std::uint64_t needed = plan.device_bytes + plan.host_bytes - plan.bank_bytes;
  o.memory_limit = needed - plan.slice;
  try {
    open_demo(o);
    FAIL() << "a line a layer does not fit";
  } catch (const OutOfMemory& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("expert lines"), std::string::npos) << text;
    EXPECT_NE(text.find(std::to_string(needed)), std::string::npos) << text;
  }
  // Left to choose, the session takes as many lines as fit.
  o.cache_lines = 0;
  const auto session = open_demo(o);
  EXPECT_LT(session->cache()->shape().lines, kDemoExperts / 2);
  expect_same(session->logits(sample_ids(30, 1), 1), first(30), "fewer lines");
}

TEST(OffloadFaults, ProfilesThatAreNoneOfOurs) {
  const std::string path = (std::filesystem::temp_directory_path() /
                            ("flashnext_faults_profile_" + std::to_string(::getpid()) + ".bin"))
                               .string();
  const auto write = [&path](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  };
  SessionOptions o = offloaded(demo_options(), kDemoExperts / 4);
  o.profile = path;
  for (const std::string& bytes : {std::string("not a profile"), std::string(),
                                   std::string("FNPROFIL") + std::string(5000, 'x')}) {
    write(bytes);
    {
      const auto session = open_demo(o);
      const std::vector<std::string> notes = session->notes();
      const bool told = std::any_of(notes.begin(), notes.end(), [&path](const std::string& note) {
        return note.find(path) != std::string::npos;
      });
      EXPECT_TRUE(told);
      expect_same(session->logits(sample_ids(20, 1), 1), first(20), "without a profile");
    }
    EXPECT_EQ(std::filesystem::file_size(path), bytes.size())
        << "somebody else's file was replaced";
  }
  // A file of ours is kept up to date, and read again.
  std::filesystem::remove(path);
  { open_demo(o)->logits(sample_ids(20, 1), 1); }
  ASSERT_TRUE(std::filesystem::exists(path));
  const auto again = open_demo(o);
  for (const std::string& note : again->notes()) EXPECT_EQ(note.find(path), std::string::npos);
  std::filesystem::remove(path);
}

TEST(OffloadFaults, ManyRequestsLeaveMemoryAsItIs) { check_no_leak(demo_options(), 1000); }

}  // namespace
}  // namespace flashnext
