// The memory plan: what it counts, what it decides, and what it refuses with.
#include "cpp/session/memory_plan.h"

#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/host_device.h"
#include "cpp/device/plan_device.h"
#include "tests/cpp/demo.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <map>

namespace flashnext {
namespace {

using namespace test;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr HostRoom kRam{std::uint64_t{64} << 30, std::uint64_t{2} << 30};

// A card of so many bytes, with the scratch of the host device.
class Card {
 public:
  explicit Card(std::uint64_t bytes)
      : host_(make_host_device({})),
        plan_("cuda", "a card", bytes,
              [this](Op op, const void* args) { return host_->workspace_bytes(op, args); }) {}
  const Device& operator*() const { return plan_; }

 private:
  std::unique_ptr<Device> host_;
  PlanDevice plan_;
};

const Checkpoint& demo() {
  static const Checkpoint checkpoint = Checkpoint::open(demo_path());
  return checkpoint;
}

std::uint64_t bytes_of(const MemoryPlan& plan, std::string_view what) {
  std::uint64_t sum = 0;
  for (const MemoryPart& part : plan.parts) {
    if (part.what == what) sum += part.bytes;
  }
  return sum;
}

// Bytes of all lines, from the members' sizes: each is a multiple of 256 in the demo's layers.
std::uint64_t line_bytes(const Checkpoint& c, const std::string& prefix) {
  std::uint64_t bytes = 0;
  for (const char* name : {"0.gate_proj", "0.up_proj", "0.down_proj"}) {
    const Exl3Weight& w = c.linear(prefix + name);
    const auto in = static_cast<std::uint64_t>(w.in), out = static_cast<std::uint64_t>(w.out);
    for (const std::uint64_t part :
         {in * out / 256 * static_cast<std::uint64_t>(w.words) * 2, in * 2, out * 2}) {
      bytes += (part + 255) / 256 * 256;
    }
  }
  return bytes;
}

// Of the trunk's layers.
std::uint64_t slice_bytes(const Checkpoint& c) {
  std::uint64_t sum = 0;
  for (std::int32_t l = 0; l < c.shape().layers; ++l) {
    sum += line_bytes(c, "model.language_model.layers." + std::to_string(l) + ".mlp.experts.");
  }
  return sum;
}

SessionOptions options() {
  SessionOptions o = demo_options();
  o.window = 512;
  o.chunk = 64;
  return o;
}

MemoryPlan plan(std::uint64_t card, const SessionOptions& o, const HostRoom& ram = kRam) {
  const Card stand_in(card);
  return plan_memory(demo(), o, *stand_in, ram);
}

TEST(MemoryPlan, AutoIsResidentWhereAllFits) {
  const MemoryPlan p = plan(4096 * kMiB, options());
  EXPECT_FALSE(p.offload);
  EXPECT_TRUE(p.weights.experts);
  EXPECT_TRUE(p.weights.embedding);
  EXPECT_EQ(bytes_of(p, "expert lines"), 0u);
  // One byte less than it needs is not enough.
  EXPECT_FALSE(plan(p.device_bytes, options()).offload);
  EXPECT_TRUE(plan(p.device_bytes - 1, options()).offload);
}

TEST(MemoryPlan, OffloadMovesExpertsAndEmbedding) {
  const MemoryPlan resident = plan(4096 * kMiB, options());
  SessionOptions o = options();
  o.experts = "offload";
  o.cache_lines = demo().shape().top_k;
  const MemoryPlan p = plan(4096 * kMiB, o);
  EXPECT_TRUE(p.offload);
  EXPECT_EQ(p.lines, demo().shape().top_k);
  EXPECT_EQ(p.slice, slice_bytes(demo()));
  const auto lines = static_cast<std::uint64_t>(demo().shape().experts);
  const auto layers = static_cast<std::uint64_t>(demo().shape().layers);
  const std::uint64_t embedding = demo().plain("model.language_model.embed_tokens.weight").bytes;
  EXPECT_EQ(bytes_of(resident, "weights") - bytes_of(p, "weights"),
            slice_bytes(demo()) * lines + layers * lines * sizeof(ExpertRef) + embedding);
  EXPECT_EQ(bytes_of(p, "token embedding"), embedding);
  EXPECT_EQ(bytes_of(p, "expert lines"), slice_bytes(demo()) * static_cast<std::uint64_t>(p.lines));
  EXPECT_EQ(p.bank.pinned_bytes, slice_bytes(demo()) * lines);
  EXPECT_GE(bytes_of(p, "routed experts"), p.bank.pinned_bytes);  // whole pages
}

TEST(MemoryPlan, TakesAsManyLinesAsFit) {
  SessionOptions o = options();
  o.experts = "offload";
  o.cache_lines = demo().shape().top_k;
  const MemoryPlan least = plan(4096 * kMiB, o);
  o.cache_lines = 0;
  EXPECT_EQ(plan(4096 * kMiB, o).lines, demo().shape().experts);
  std::int32_t last = 0;
  for (int more = 0; more <= 20; more += 4) {
    // Room for `more` lines, and for what the system is left.
    const std::uint64_t room = least.device_bytes + static_cast<std::uint64_t>(more) * least.slice;
    const MemoryPlan p = plan(room + room / 60, o);
    EXPECT_LE(p.device_bytes, room + room / 60);
    EXPECT_NEAR(p.lines, least.lines + more, 1) << more;
    EXPECT_GE(p.lines, last);
    last = p.lines;
  }
}

TEST(MemoryPlan, OneByteShortOfTheLeastIsRefusedWithTheSum) {
  SessionOptions o = options();
  o.experts = "offload";
  o.cache_lines = demo().shape().top_k;
  const MemoryPlan least = plan(4096 * kMiB, o);
  EXPECT_EQ(plan(least.device_bytes, o).lines, least.lines);
  for (const std::int32_t asked : {o.cache_lines, 0}) {
    o.cache_lines = asked;
    try {
      plan(least.device_bytes - 1, o);
      FAIL() << "a byte too few was enough";
    } catch (const OutOfMemory& e) {
      EXPECT_EQ(e.bytes(), least.device_bytes);
      const std::string message = e.what();
      for (const std::string& part :
           {std::string("weights"), std::string("KV pages"), std::string("expert lines"),
            std::to_string(least.device_bytes), std::to_string(least.slice)}) {
        EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
      }
    }
  }
}

TEST(MemoryPlan, RamBoundsTheBank) {
  SessionOptions o = options();
  o.experts = "offload";
  const std::uint64_t all =
      slice_bytes(demo()) * static_cast<std::uint64_t>(demo().shape().experts);
  const auto lines = static_cast<std::uint64_t>(demo().shape().experts * demo().shape().layers);
  const auto bank = [&](std::uint64_t free, std::uint64_t reserve, std::uint64_t limit) {
    o.host_limit = limit;
    const MemoryPlan p = plan(4096 * kMiB, o, {free, reserve});
    EXPECT_EQ(p.bank.pinned_bytes + p.bank.mapped_bytes, all);
    EXPECT_LE(p.bank.pinned_bytes, p.bank_limit);
    EXPECT_LE(p.host_bytes, free);
    return p.bank.pinned_bytes;
  };
  const std::uint64_t plenty = 4096 * kMiB;
  EXPECT_EQ(bank(plenty, 0, 0), all);
  EXPECT_EQ(bank(plenty, plenty, 0), 0u);     // all is reserved
  EXPECT_EQ(bank(plenty, plenty, all), all);  // but a limit that is given counts
  EXPECT_EQ(bank(plenty, 0, all - 1) / 1000, (all - all / lines) / 1000);  // a line less
  o.host_limit = 0;
  try {
    plan(4096 * kMiB, o, {1000, 0});
    FAIL() << "1000 bytes of RAM were enough";
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.space(), "host");
    EXPECT_NE(std::string(e.what()).find("token embedding"), std::string::npos) << e.what();
  }
}

TEST(MemoryPlan, TheDraftHeadIsPaidForWhereItIsWanted) {
  const auto& kinds = demo().shape().layer_kinds;
  const auto attention =
      static_cast<std::uint64_t>(std::count(kinds.begin(), kinds.end(), LayerKind::kAttention));
  const auto experts = static_cast<std::uint64_t>(demo().shape().experts);
  const std::uint64_t line = line_bytes(demo(), "mtp.layers.0.mlp.experts.");
  for (const char* place : {"resident", "offload"}) {
    SessionOptions o = options();
    o.experts = place;
    o.cache_lines = demo().shape().top_k;
    const MemoryPlan without = plan(4096 * kMiB, o);
    o.mtp = true;
    const MemoryPlan with = plan(4096 * kMiB, o);
    EXPECT_EQ(bytes_of(with, "KV pages") * attention,
              bytes_of(without, "KV pages") * (attention + 1));
    EXPECT_EQ(bytes_of(with, "step values") > bytes_of(without, "step values"), true);
    EXPECT_GT(bytes_of(with, "recurrent state"), bytes_of(without, "recurrent state"));
    const std::uint64_t weights = bytes_of(with, "weights") - bytes_of(without, "weights");
    EXPECT_GT(weights, without.offload ? 0 : line * experts);
    EXPECT_LT(weights, (without.offload ? 0 : line * experts) + 4 * kMiB);
    if (!without.offload) continue;
    EXPECT_EQ(with.slice - without.slice, line);
    EXPECT_EQ(with.bank.pinned_bytes - without.bank.pinned_bytes, line * experts);
  }
}

TEST(MemoryPlan, TheKvPoolIsSizedInBytes) {
  SessionOptions o = options();
  const std::uint64_t page = page_bytes(demo().shape(), false);
  o.lanes = 4;
  const MemoryPlan whole = plan(4096 * kMiB, o);
  EXPECT_EQ(whole.kv_page_bytes, page);
  EXPECT_EQ(whole.kv_pages, 8 + 3 * 2 + 1);
  EXPECT_EQ(bytes_of(whole, "KV pages"), 15 * page);
  o.kv_bytes = 9 * page + 1;
  const MemoryPlan least = plan(4096 * kMiB, o);
  EXPECT_EQ(least.kv_pages, 9);
  EXPECT_EQ(whole.device_bytes - least.device_bytes, 6 * page);
  o.kv_bytes = std::uint64_t{1} << 40;  // as many as were asked for, or none
  EXPECT_THROW(plan(4096 * kMiB, o), OutOfMemory);
}

TEST(MemoryPlan, RefusesOptionsByName) {
  const auto refused = [](auto change, const char* name) {
    SessionOptions o = options();
    change(o);
    try {
      plan(4096 * kMiB, o);
      FAIL() << name << " was accepted";
    } catch (const InputError& e) {
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  };
  refused([](SessionOptions& o) { o.experts = "disk"; }, "experts");
  refused([](SessionOptions& o) { o.cache_lines = 1; }, "cache_lines");
  refused([](SessionOptions& o) { o.cache_lines = 1000; }, "cache_lines");
  refused([](SessionOptions& o) { o.kv_bytes = 1; }, "kv_bytes");
  EXPECT_THROW(resolve_window(demo().shape(), -1), InputError);
  EXPECT_EQ(resolve_window(demo().shape(), 0), std::min(32768, demo().shape().max_positions));
}

// What was planned is what a session takes.
TEST(MemoryPlan, IsWhatASessionAllocates) {
  for (const char* experts : {"resident", "offload"}) {
    SessionOptions o = options();
    o.experts = experts;
    o.mtp = o.experts == "offload";
    o.host_limit = 1024 * kMiB;
    HostDeviceOptions two;
    two.threads = o.threads;
    const MemoryPlan p = plan_memory(demo(), o, *make_host_device(two), this_host());
    const auto session = open_demo(o);
    std::map<std::string, std::uint64_t> taken, planned;
    for (const Allocated& a : session->device().allocations()) taken[a.what] += a.bytes;
    for (const MemoryPart& part : p.parts) planned[part.what] += part.bytes;
    EXPECT_EQ(taken, planned) << experts;
  }
}

// The published shape: the card and the RAM that the design speaks of.
TEST(MemoryPlan, ThePublishedModelOn16GiB) {
  const Checkpoint c = Checkpoint::synthetic(flash_next_shape(), {1, kMiB});
  SessionOptions o;
  o.window = 32768;
  const Card card(15 * 1024 * kMiB);
  const MemoryPlan p = plan_memory(c, o, *card, kRam);
  EXPECT_TRUE(p.offload);
  EXPECT_EQ(p.slice, std::uint64_t{48} * 1'862'400);
  EXPECT_EQ(p.bank.pinned_bytes, std::uint64_t{48} * 512 * 1'862'400);
  EXPECT_EQ(p.bank.mapped_bytes, 0u);
  EXPECT_GT(p.lines, 60);
  EXPECT_LT(p.lines, 160);
  EXPECT_LE(p.device_bytes, 15 * 1024 * kMiB);
  EXPECT_GT(p.ngram_bytes, std::uint64_t{30} << 30);
}

}  // namespace
}  // namespace flashnext
