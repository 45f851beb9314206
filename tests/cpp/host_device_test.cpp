// Asynchrony, events, errors and memory of the host device.
#include "cpp/device/host_device.h"

#include "tests/cpp/host_device_case.h"

#include <random>

namespace flashnext {
namespace {

using test::BadGather;
using test::enqueue_add;
using test::kBytes;
using test::make_device;
using test::message_of;
using test::Vec;

constexpr std::uint64_t kSeeds = 10;

TEST(HostDevice, NothingRunsBeforeSomebodyWaits) {
  auto device = make_device(0);
  Vec a(*device), b(*device), c(*device);
  Stream stream(*device);
  a.fill(1);
  b.fill(2);
  enqueue_add(*device, stream.id(), a, b, c);
  EXPECT_TRUE(std::isnan(c.value()));
  a.fill(5);  // arguments are copied, what they point to is read when the work runs
  device->synchronize(stream.id());
  EXPECT_EQ(c.value(), 7.0f);
}

TEST(HostDevice, AMissingWaitShowsUnderSomeSeedAndTheRightEdgeUnderNone) {
  for (const bool edge : {false, true}) {
    int wrong = 0;
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      auto device = make_device(seed);
      Vec one(*device), x(*device), y(*device);
      Stream a(*device), b(*device);
      Event ready(*device);
      one.fill(1);
      enqueue_add(*device, a.id(), one, one, x);
      device->record(ready.id(), a.id());
      if (edge) device->wait(b.id(), ready.id());
      device->copy_async(b.id(), y.data(), x.data(), kBytes);
      device->synchronize(b.id());
      wrong += y.value() != 2.0f;
      device->synchronize(a.id());
    }
    if (edge) {
      EXPECT_EQ(wrong, 0);
    } else {
      EXPECT_GT(wrong, 0);
      EXPECT_LT(wrong, static_cast<int>(kSeeds));
    }
  }
}

TEST(HostDevice, AWriteBeforeAnUnorderedReadShowsToo) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto device = make_device(seed);
    Vec x(*device), y(*device);
    Stream reader(*device), writer(*device);
    x.fill(1);
    device->copy_async(reader.id(), y.data(), x.data(), kBytes);
    device->zero_async(writer.id(), x.data(), kBytes);  // must wait for the reader, and does not
    device->synchronize(writer.id());
    device->synchronize(reader.id());
    wrong += y.value() != 1.0f;
  }
  EXPECT_GT(wrong, 0);
}

TEST(HostDevice, WaitOnAnEventThatWasNeverRecordedIsNothing) {
  auto device = make_device(0);
  Vec x(*device);
  Stream a(*device);
  Event never(*device);
  device->wait(a.id(), never.id());
  device->zero_async(a.id(), x.data(), kBytes);
  device->synchronize(a.id());
  EXPECT_EQ(x.value(), 0.0f);
}

TEST(HostDevice, ALaterRecordReplacesAnEarlierOne) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto device = make_device(seed);
    Vec one(*device), x(*device), y(*device);
    Stream a(*device), b(*device);
    Event e(*device);
    one.fill(1);
    device->zero_async(a.id(), x.data(), kBytes);
    device->record(e.id(), a.id());
    enqueue_add(*device, a.id(), one, one, x);
    device->record(e.id(), a.id());
    device->wait(b.id(), e.id());
    device->copy_async(b.id(), y.data(), x.data(), kBytes);
    device->synchronize(b.id());
    EXPECT_EQ(y.value(), 2.0f);
  }
}

TEST(HostDevice, AWaitHoldsTheRecordMadeBeforeItAndNoLaterOne) {
  int later_work_ran = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto device = make_device(seed);
    Vec x(*device), y(*device), z(*device);
    Stream a(*device), b(*device);
    Event e(*device);
    device->zero_async(a.id(), x.data(), kBytes);
    device->record(e.id(), a.id());
    device->wait(b.id(), e.id());
    device->copy_async(b.id(), y.data(), x.data(), kBytes);
    device->zero_async(a.id(), z.data(), kBytes);
    device->record(e.id(), a.id());
    device->synchronize(b.id());
    EXPECT_EQ(y.value(), 0.0f);
    later_work_ran += z.value() == 0.0f;
  }
  EXPECT_LT(later_work_ran, static_cast<int>(kSeeds));
  EXPECT_GT(later_work_ran, 0);  // other ready work may run, too
}

// Random sums over a few vectors on three streams, with an edge for every conflict.
TEST(HostDevice, RightEdgesGiveTheSameBitsUnderEverySeedAndInAnyMixOfWaits) {
  constexpr int kVecs = 6, kStreams = 3, kWork = 120;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto device = make_device(seed, seed % 2 == 0 ? 1 : 2);
    std::vector<Vec> vecs;
    std::vector<Stream> streams;
    std::vector<Event> events;
    std::vector<float> want(kVecs);
    for (int v = 0; v < kVecs; ++v) {
      vecs.emplace_back(*device);
      want[v] = 0.37f * static_cast<float>(v + 1);
      vecs[v].fill(want[v]);
    }
    for (int s = 0; s < kStreams; ++s) streams.emplace_back(*device);
    for (int i = 0; i < kWork; ++i) events.emplace_back(*device);
    std::vector<std::vector<int>> users(kVecs);  // work that read or wrote a vector
    std::mt19937 rng(99);                        // the same program for every seed
    for (int i = 0; i < kWork; ++i) {
      const int a = static_cast<int>(rng() % kVecs), b = static_cast<int>(rng() % kVecs),
                out = static_cast<int>(rng() % kVecs);
      const StreamId stream = streams[rng() % kStreams].id();
      for (const int v : {a, b, out}) {
        for (const int earlier : users[v]) device->wait(stream, events[earlier].id());
      }
      enqueue_add(*device, stream, vecs[a], vecs[b], vecs[out]);
      device->record(events[i].id(), stream);
      for (const int v : {a, b, out}) users[v].push_back(i);
      want[out] = want[a] + want[b];
      if (rng() % 16 == 0) device->synchronize(streams[rng() % kStreams].id());
    }
    for (const Stream& stream : streams) device->synchronize(stream.id());
    for (int v = 0; v < kVecs; ++v) EXPECT_EQ(vecs[v].value(), want[v]) << "seed " << seed;
  }
}

TEST(HostDevice, ManyLaunchesKeepTheirArguments) {
  auto device = make_device(3);
  Stream stream(*device);
  Vec one(*device), sum(*device);
  one.fill(1);
  sum.fill(0);
  for (int round = 0; round < 2; ++round) {  // the second round uses the chunks of the first
    for (int i = 0; i < 5000; ++i) enqueue_add(*device, stream.id(), one, sum, sum);
    device->synchronize(stream.id());
  }
  EXPECT_EQ(sum.value(), 10000.0f);
}

TEST(HostDevice, AnErrorOfWorkSurfacesOnceAsItIsThenAsDeviceError) {
  auto device = make_device(0);
  Vec x(*device);
  Stream a(*device), b(*device);
  BadGather bad;
  bad.enqueue(*device, a.id());
  device->zero_async(a.id(), x.data(), kBytes);
  EXPECT_CONTAINS(message_of<InputError>([&] { device->synchronize(a.id()); }), "row id 99");
  EXPECT_TRUE(std::isnan(x.value())) << "work behind the failure must not run";
  for (int i = 0; i < 2; ++i) {
    EXPECT_CONTAINS(message_of<DeviceError>([&] { device->synchronize(b.id()); }), "row id 99");
  }
  EXPECT_THROW(device->zero_async(b.id(), x.data(), kBytes), DeviceError);
  EXPECT_THROW(bad.enqueue(*device, b.id()), DeviceError);
  EXPECT_THROW(device->allocate(Space::kDevice, 1, "late"), DeviceError);
}

TEST(HostDevice, DestroyingAStreamRunsItsWork) {
  auto device = make_device(0);
  Vec x(*device);
  {
    Stream a(*device);
    device->zero_async(a.id(), x.data(), kBytes);
  }
  EXPECT_EQ(x.value(), 0.0f);
}

TEST(HostDevice, UnknownHandlesAreLogicErrors) {
  auto device = make_device(0);
  Stream stream(*device);
  Event event(*device);
  const StreamId bad = stream.id() + 7;
  EXPECT_CONTAINS(message_of<LogicError>([&] { device->synchronize(bad); }), "unknown stream 8");
  EXPECT_THROW(device->synchronize(0), LogicError);
  EXPECT_THROW(device->zero_async(bad, &event, 0), LogicError);
  EXPECT_THROW(device->record(event.id() + 1, stream.id()), LogicError);
  EXPECT_THROW(device->record(event.id(), bad), LogicError);
  EXPECT_THROW(device->wait(stream.id(), event.id() + 1), LogicError);
  EXPECT_THROW(device->replay(1, stream.id()), LogicError);
  EXPECT_THROW(device->begin_capture(bad), LogicError);
  EXPECT_THROW(device->end_capture(stream.id()), LogicError);
  StreamId gone;
  {
    Stream other(*device);
    gone = other.id();
  }
  EXPECT_THROW(device->synchronize(gone), LogicError);
  device->destroy_event(77);  // cannot throw: reported by the next wait
  EXPECT_CONTAINS(message_of<LogicError>([&] { device->synchronize(stream.id()); }), "event 77");
}

TEST(HostDevice, RefusesArgumentsOfAnotherSizeAndOpsOutsideTheTable) {
  auto device = make_device(0);
  Stream stream(*device);
  EmbedArgs args{};
  EXPECT_CONTAINS(
      message_of<LogicError>([&] { device->launch(stream.id(), Op::kMix, &args, sizeof args); }),
      "'mix'");
  EXPECT_THROW(device->launch(stream.id(), Op::kCount, &args, sizeof args), LogicError);
  std::vector<float> x(8);
  EXPECT_THROW(device->copy_async(stream.id(), x.data() + 1, x.data(), 8), LogicError);
}

TEST(HostDeviceMemory, IsAlignedPoisonedAndCounted) {
  auto device = make_device(0);
  Block a(*device, Space::kDevice, 100, "weights"), b(*device, Space::kPinned, 0, "nothing");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % 256, 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % 256, 0u);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(a.as<std::uint8_t>()[i], 0xFF);
  {
    const Block c(*device, Space::kPageable, 7, "scratch");
    ASSERT_EQ(device->allocations().size(), 3u);
  }
  const auto list = device->allocations();
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[0].what, "weights");
  EXPECT_EQ(list[0].bytes, 100u);
  EXPECT_EQ(list[0].space, Space::kDevice);
  EXPECT_EQ(list[1].space, Space::kPinned);
}

TEST(HostDeviceMemory, ALimitNamesSpacePartBytesPartsAndSum) {
  HostDeviceOptions options;
  options.threads = 1;
  options.memory_limit = 1000;
  auto device = make_host_device(options);
  EXPECT_EQ(device->available(Space::kDevice), 1000u);
  const Block a(*device, Space::kDevice, 600, "dense weights");
  EXPECT_EQ(device->available(Space::kPinned), 400u);  // one limit over all spaces
  Block b(*device, Space::kPinned, 300, "bank");
  try {
    device->allocate(Space::kDevice, 101, "kv pages");
    FAIL() << "no exception";
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.space(), "device");
    EXPECT_EQ(e.bytes(), 101u);
    const std::string text = e.what();
    for (const char* part : {"device memory", "'kv pages' needs 101 bytes", "limit is 1000",
                             "'dense weights' 600 (device)", "'bank' 300 (pinned)", "900",
                             "sum with this part 1001"}) {
      EXPECT_CONTAINS(text, part);
    }
  }
  b = Block(*device, Space::kPinned, 100, "smaller");  // 100 beside 300, then 300 is released
}

TEST(HostDeviceMemory, AnyAllocationCanBeMadeToFailAndLeavesNothingBehind) {
  for (std::int64_t n = 0; n < 3; ++n) {
    HostDeviceOptions options;
    options.threads = 1;
    options.fail_allocation = n;
    auto device = make_host_device(options);
    std::vector<Block> blocks;
    EXPECT_THROW(
        {
          for (int i = 0; i < 3; ++i) blocks.emplace_back(*device, Space::kDevice, 64, "part");
        },
        OutOfMemory);
    EXPECT_EQ(blocks.size(), static_cast<std::size_t>(n));
    EXPECT_EQ(device->allocations().size(), static_cast<std::size_t>(n));
    blocks.emplace_back(*device, Space::kDevice, 64, "again");  // only that call fails
  }
}

TEST(HostDeviceMemory, AfterSealAllocationIsALogicError) {
  auto device = make_device(0);
  Block before(*device, Space::kDevice, 8, "before");
  device->seal();
  EXPECT_CONTAINS(message_of<LogicError>([&] { device->allocate(Space::kDevice, 8, "late part"); }),
                  "late part");
  before = Block();
  EXPECT_TRUE(device->allocations().empty());
}

TEST(HostDeviceMemory, ReleaseOfMemoryThatQueuedWorkUsesIsReported) {
  for (const bool op : {true, false}) {
    auto device = make_device(0);
    Vec a(*device), out(*device);
    a.fill(1);
    Stream stream(*device);
    {
      const Vec b(*device, "short-lived");
      if (op) {
        enqueue_add(*device, stream.id(), a, b, out);
      } else {
        device->copy_async(stream.id(), out.data() + 8, b.data() + 8, 32);
      }
    }
    const auto text = message_of<LogicError>([&] { device->synchronize(stream.id()); });
    EXPECT_CONTAINS(text, "'short-lived'");
    EXPECT_CONTAINS(text, op ? "mtp_join" : "copy");
  }
}

TEST(HostDeviceMemory, ReleaseOfAnUnknownAddressIsReported) {
  auto device = make_device(0);
  Stream stream(*device);
  Vec a(*device);
  device->release(nullptr);
  device->synchronize(stream.id());
  device->release(a.data() + 1);
  EXPECT_THROW(device->synchronize(stream.id()), LogicError);
}

TEST(HostDevice, SaysWhatItIs) {
  HostDeviceOptions options;
  options.threads = 2;
  options.isa = exl3::Isa::kScalar;
  auto device = make_host_device(options);
  EXPECT_EQ(device->kind(), "host");
  EXPECT_EQ(device->description(), "host (2 threads, scalar)");
  for (int i = 0; i < kNumOps; ++i) EXPECT_STRNE(to_string(static_cast<Op>(i)), "unknown");
}

}  // namespace
}  // namespace flashnext
