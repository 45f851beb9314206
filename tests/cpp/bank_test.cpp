// The bank: every line against the checkpoint's tensors, and what happens where RAM, locked memory,
// files or patience end.
#include "cpp/bank/bank.h"

#include "cpp/bank/host_ram.h"
#include "cpp/checkpoint/synthetic.h"
#include "cpp/device/host_device.h"
#include "cpp/device/plan_device.h"
#include "tests/cpp/checkpoint_writer.h"

#include <cstring>
#include <gtest/gtest.h>
#include <numeric>
#include <stdexcept>

namespace flashnext {
namespace {

using namespace testing_checkpoint;

std::unique_ptr<Device> host_device(std::size_t pin_limit = static_cast<std::size_t>(-1)) {
  HostDeviceOptions o;
  o.threads = 1;
  o.pin_limit = pin_limit;
  return make_host_device(o);
}

std::vector<std::string> prefixes(const Checkpoint& c) {
  std::vector<std::string> all;
  for (std::int32_t l = 0; l < c.shape().layers; ++l) {
    all.push_back("model.language_model.layers." + std::to_string(l) + ".mlp.experts.");
  }
  if (c.has_mtp()) all.push_back("mtp.layers.0.mlp.experts.");
  return all;
}

// The bytes of all nine members, as the checkpoint has them.
void expect_contents(const Bank& bank, const Checkpoint& c) {
  static const char* const kNames[3] = {".gate_proj", ".up_proj", ".down_proj"};
  const auto names = prefixes(c);
  ASSERT_EQ(bank.layers().size(), names.size());
  const auto same = [](const std::byte* a, const std::byte* b, std::int64_t n) {
    return std::memcmp(a, b, static_cast<std::size_t>(n)) == 0;
  };
  for (std::size_t l = 0; l < names.size(); ++l) {
    const Bank::Layer& layer = bank.layers()[l];
    ASSERT_EQ(layer.host.size(), static_cast<std::size_t>(c.shape().experts));
    for (std::size_t e = 0; e < layer.host.size(); ++e) {
      const bool in_ram =
          layer.lines != nullptr && layer.host[e].trellis[0] >= layer.lines &&
          layer.host[e].trellis[0] < layer.lines + layer.layout.bytes * std::ssize(layer.host);
      const std::byte* line = layer.lines + static_cast<std::int64_t>(e) * layer.layout.bytes;
      for (std::size_t i = 0; i < 3; ++i) {
        const Exl3Weight& w = c.linear(names[l] + std::to_string(e) + kNames[i]);
        const ExpertRef& ref = layer.host[e];
        ASSERT_EQ(layer.words[i], w.words);
        const std::int64_t trellis = std::int64_t{w.in} * w.out / 256 * w.words * 2;
        ASSERT_TRUE(same(ref.trellis[i], w.trellis, trellis)) << names[l] << e << kNames[i];
        ASSERT_TRUE(same(ref.suh[i], w.suh, w.in * 2)) << names[l] << e << kNames[i];
        ASSERT_TRUE(same(ref.svh[i], w.svh, w.out * 2)) << names[l] << e << kNames[i];
        if (!in_ram) {
          ASSERT_EQ(ref.trellis[i], w.trellis);
          ASSERT_EQ(layer.pinned[e], 0);
          continue;
        }
        ASSERT_EQ(ref.trellis[i], line + layer.layout.trellis[i]);
        ASSERT_EQ(ref.suh[i], line + layer.layout.suh[i]);
        ASSERT_EQ(ref.svh[i], line + layer.layout.svh[i]);
      }
    }
  }
}

std::uint64_t all_bytes(const Bank& bank) {
  std::uint64_t sum = 0;
  for (const Bank::Layer& layer : bank.layers()) {
    sum += static_cast<std::uint64_t>(layer.layout.bytes) * layer.host.size();
  }
  return sum;
}

std::int64_t pinned_lines(const Bank::Layer& layer) {
  return std::accumulate(layer.pinned.begin(), layer.pinned.end(), std::int64_t{0});
}

constexpr std::uint64_t kPlenty = std::uint64_t{4} << 30;

TEST(LineLayout, OfThePublishedPack) {
  const std::int32_t words[3] = {48, 48, 48};
  const LineLayout l = line_layout(2560, 640, words);
  EXPECT_EQ(l.bytes, 1'862'400);
  const std::int64_t trellis = 2560 * 640 * 3 / 8;
  EXPECT_EQ(l.trellis[0], 0);
  EXPECT_EQ(l.trellis[1], trellis);
  EXPECT_EQ(l.trellis[2], 2 * trellis);
  EXPECT_EQ(l.suh[0], 3 * trellis);
  EXPECT_EQ(l.suh[1], 3 * trellis + 5120);
  EXPECT_EQ(l.suh[2], 3 * trellis + 10240);
  EXPECT_EQ(l.svh[0], 3 * trellis + 11520);
  EXPECT_EQ(l.svh[1], 3 * trellis + 12800);
  EXPECT_EQ(l.svh[2], 3 * trellis + 14080);
}

TEST(LineLayout, EveryMemberBeginsAt256) {
  const std::int32_t words[3] = {24, 40, 32};
  const LineLayout l = line_layout(128, 384, words);
  // 128 x 384: 192 tiles of 48, 80 and 64 bytes; scales of 256, 256 and 768 bytes.
  EXPECT_EQ(l.trellis[1], 192 * 48);
  EXPECT_EQ(l.trellis[2], 192 * (48 + 80));
  EXPECT_EQ(l.suh[0], 192 * (48 + 80 + 64));
  EXPECT_EQ(l.bytes, l.suh[0] + 256 + 256 + 768 + 768 + 768 + 256);
  const std::int32_t odd[3] = {24, 24, 24};
  const LineLayout m = line_layout(128, 128, odd);  // trellises of 3072 = 12 * 256
  EXPECT_EQ(m.trellis[1], 3072);
  EXPECT_EQ(m.bytes % 256, 0);
}

TEST(Bank, EveryLineOfTheDemoModel) {
  const Checkpoint c = Checkpoint::open(demo_model());
  for (const int threads : {1, 4}) {
    const auto device = host_device();
    const Bank bank = Bank::fill(c, *device, {kPlenty, threads, true});
    expect_contents(bank, c);
    EXPECT_EQ(bank.report().pinned_bytes, all_bytes(bank));
    EXPECT_EQ(bank.report().pageable_bytes + bank.report().mapped_bytes, 0u);
    EXPECT_EQ(bank.report().note, "");
    for (const Bank::Layer& layer : bank.layers()) {
      EXPECT_EQ(pinned_lines(layer), c.shape().experts);
    }
  }
}

TEST(Bank, EveryLineOfASyntheticModel) {
  const Checkpoint c = Checkpoint::synthetic(tiny_shape(2), {3, std::size_t{1} << 20});
  const auto device = host_device();
  const Bank bank = Bank::fill(c, *device, {kPlenty, 2, true});
  expect_contents(bank, c);
}

// Files whose data begins at odd bytes, members of an expert apart in two files, packed signs.
TEST(Bank, AnyAlignmentAndAnyPlace) {
  CheckpointWriter writer;
  const std::string prefix = "model.language_model.layers.0.mlp.experts.1.";
  StoredTensor& packed = writer.tensors[prefix + "up_proj.su"];
  const auto in = writer.tensors.at(prefix + "up_proj.suh").shape[0];
  packed = {"I16", {in / 16}, ""};
  packed.bytes = CheckpointWriter::noise("signs", bytes_of(packed));
  writer.tensors.erase(prefix + "up_proj.suh");
  writer.tensors.at(prefix + "gate_proj.trellis").file = "model-2.safetensors";
  const TempFolder folder;
  writer.write(folder);
  const Checkpoint c = Checkpoint::open(folder.path());
  const auto device = host_device();
  const Bank bank = Bank::fill(c, *device, {kPlenty, 2, true});
  expect_contents(bank, c);
}

TEST(Bank, ViewedFilesAreCopied) {
  const CheckpointWriter writer;
  const auto files = writer.files();
  std::vector<TensorFiles::Buffer> buffers;
  for (const auto& [name, bytes] : files) {
    buffers.push_back({name, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
  }
  const ModelShape shape = parse_config(writer.config.nested(), "config.json");
  const Checkpoint c = Checkpoint::bind(shape, TensorFiles::view(buffers));
  const auto device = host_device();
  expect_contents(Bank::fill(c, *device, {kPlenty, 1, true}), c);
}

TEST(Bank, RefusedPinsLeaveTheRestPageable) {
  const Checkpoint c = Checkpoint::open(demo_model());
  std::uint64_t total = 0;
  {
    const auto device = host_device();
    total = all_bytes(Bank::fill(c, *device, {kPlenty, 2, true}));
  }
  const auto device = host_device(total / 2);
  {
    const Bank bank = Bank::fill(c, *device, {kPlenty, 2, true});
    expect_contents(bank, c);
    const BankReport& r = bank.report();
    EXPECT_GT(r.pinned_bytes, 0u);
    EXPECT_LE(r.pinned_bytes, total / 2);
    EXPECT_EQ(r.pinned_bytes + r.pageable_bytes, total);
    EXPECT_EQ(r.mapped_bytes, 0u);
    EXPECT_NE(r.note.find(std::to_string(r.pageable_bytes)), std::string::npos) << r.note;
    EXPECT_NE(r.note.find("ulimit -l"), std::string::npos) << r.note;
    // Whole layers, the first ones.
    std::uint64_t pinned = 0;
    bool ended = false;
    for (const Bank::Layer& layer : bank.layers()) {
      const std::int64_t n = pinned_lines(layer);
      EXPECT_TRUE(n == 0 || n == std::ssize(layer.host));
      EXPECT_FALSE(ended && n > 0);
      ended = ended || n == 0;
      pinned += static_cast<std::uint64_t>(n * layer.layout.bytes);
    }
    EXPECT_EQ(pinned, r.pinned_bytes);
    EXPECT_FALSE(device->allocations().empty());
  }
  EXPECT_TRUE(device->allocations().empty()) << "the bank left memory pinned";
}

TEST(Bank, NothingPinned) {
  const Checkpoint c = Checkpoint::open(demo_model());
  const auto device = host_device(0);
  const Bank bank = Bank::fill(c, *device, {kPlenty, 2, true});
  expect_contents(bank, c);
  EXPECT_EQ(bank.report().pinned_bytes, 0u);
  EXPECT_EQ(bank.report().pageable_bytes, all_bytes(bank));
}

TEST(Bank, RamLimitLeavesTheRestInTheFiles) {
  const Checkpoint c = Checkpoint::open(demo_model());
  const auto device = host_device();
  const Bank none = Bank::fill(c, *device, {1, 2, true});
  expect_contents(none, c);
  EXPECT_EQ(none.report().mapped_bytes, all_bytes(none));
  EXPECT_EQ(none.report().pinned_bytes, 0u);
  for (const Bank::Layer& layer : none.layers()) EXPECT_EQ(layer.lines, nullptr);

  const std::uint64_t total = all_bytes(none);
  const std::uint64_t limit = total / 2 + 1000;
  const Bank half = Bank::fill(c, *device, {limit, 2, true});
  expect_contents(half, c);
  const BankReport& r = half.report();
  EXPECT_LE(r.pinned_bytes, limit);
  EXPECT_EQ(r.pinned_bytes + r.mapped_bytes, total);
  // No line that would fit is left out, and layers are treated alike.
  std::int64_t low = 1 << 30, high = 0;
  for (const Bank::Layer& layer : half.layers()) {
    EXPECT_GT(r.pinned_bytes + static_cast<std::uint64_t>(layer.layout.bytes), limit);
    low = std::min(low, pinned_lines(layer));
    high = std::max(high, pinned_lines(layer));
  }
  EXPECT_LE(high - low, 1);
  EXPECT_NE(r.note.find(std::to_string(r.mapped_bytes)), std::string::npos) << r.note;
  EXPECT_NE(r.note.find("host_limit"), std::string::npos) << r.note;
}

TEST(Bank, LeavesTheMtpHeadOutUnlessAsked) {
  const Checkpoint c = Checkpoint::open(demo_model());
  const auto device = host_device();
  const Bank trunk = Bank::fill(c, *device, {kPlenty, 2});
  const Bank all = Bank::fill(c, *device, {kPlenty, 2, true});
  ASSERT_EQ(trunk.layers().size(), static_cast<std::size_t>(c.shape().layers));
  ASSERT_EQ(all.layers().size(), trunk.layers().size() + 1);
  const Bank::Layer& head = all.layers().back();
  EXPECT_EQ(all.report().pinned_bytes - trunk.report().pinned_bytes,
            static_cast<std::uint64_t>(head.layout.bytes) * head.host.size());
}

TEST(Bank, PlanSaysWhatFillDoes) {
  const Checkpoint c = Checkpoint::open(demo_model());
  for (const std::uint64_t limit : {std::uint64_t{1}, std::uint64_t{5'000'000}, kPlenty}) {
    const auto device = host_device();
    PlanDevice plan(*device);
    const Bank planned = Bank::plan(c, plan, {limit, 1, true});
    const Bank filled = Bank::fill(c, *device, {limit, 1, true});
    EXPECT_EQ(planned.report().pinned_bytes, filled.report().pinned_bytes);
    EXPECT_EQ(planned.report().mapped_bytes, filled.report().mapped_bytes);
    EXPECT_EQ(planned.report().note, filled.report().note);
    ASSERT_EQ(planned.layers().size(), filled.layers().size());
    for (std::size_t i = 0; i < planned.layers().size(); ++i) {
      EXPECT_EQ(planned.layers()[i].pinned, filled.layers()[i].pinned);
      EXPECT_EQ(planned.layers()[i].layout.bytes, filled.layers()[i].layout.bytes);
    }
    std::uint64_t in_plan = 0, in_fill = 0;
    for (const Allocated& a : plan.allocations()) in_plan += a.bytes;
    for (const Allocated& a : device->allocations()) in_fill += a.bytes;
    EXPECT_EQ(in_plan, in_fill);
  }
}

TEST(Bank, ProgressCountsBytesUpToTheTotal) {
  const Checkpoint c = Checkpoint::open(demo_model());
  const auto device = host_device();
  std::uint64_t last = 0, end = 0;
  const Bank bank = Bank::fill(c, *device, {kPlenty, 2, true},
                               [&](std::string_view stage, std::uint64_t done, std::uint64_t all) {
                                 EXPECT_EQ(stage, "experts");
                                 EXPECT_GE(done, last);
                                 last = done;
                                 end = all;
                               });
  EXPECT_EQ(end, all_bytes(bank));
  EXPECT_EQ(last, end);
}

TEST(Bank, ProgressMayStopIt) {
  const Checkpoint c = Checkpoint::open(demo_model());
  for (const int calls : {1, 2, 4}) {
    const auto device = host_device();
    int left = calls;
    const auto stop = [&](std::string_view, std::uint64_t, std::uint64_t) {
      if (--left == 0) throw std::runtime_error("stopped");
    };
    EXPECT_THROW(Bank::fill(c, *device, {kPlenty, 3, true}, stop), std::runtime_error);
    EXPECT_TRUE(device->allocations().empty()) << "memory stayed pinned";
    // The device and the checkpoint are as before.
    expect_contents(Bank::fill(c, *device, {kPlenty, 2, true}), c);
  }
}

TEST(Bank, AFileThatShrinksIsNamed) {
  const CheckpointWriter writer;
  const TempFolder folder;
  writer.write(folder);
  const Checkpoint c = Checkpoint::open(folder.path());
  std::filesystem::resize_file(folder.path() + "/model.safetensors", 1000);
  const auto device = host_device();
  try {
    Bank::fill(c, *device, {kPlenty, 2, true});
    FAIL() << "a file without data was read";
  } catch (const CheckpointError& e) {
    expect_parts(e.what(), {"model.safetensors", "shorter"});
  }
  EXPECT_TRUE(device->allocations().empty());
}

TEST(HostRam, ReadsMeminfo) {
  const char* text =
      "MemTotal:  100 kB\nXMemAvailable: 1 kB\nMemAvailable:\t  3000 kB\nSwap: 1 kB\n";
  EXPECT_EQ(meminfo_bytes(text, "MemAvailable"), 3000u * 1024);
  EXPECT_EQ(meminfo_bytes(text, "MemTotal"), 100u * 1024);
  EXPECT_EQ(meminfo_bytes(text, "MemFree"), 0u);
  EXPECT_GT(free_ram(), 0u);
  EXPECT_GE(ram_reserve(), std::uint64_t{2} << 30);
}

}  // namespace
}  // namespace flashnext
