// The CUDA device itself: memory and its budget, streams, events, capture, errors.
#include "tests/cpp/conformance.h"

#include <cstdint>

using namespace flashnext;
using namespace flashnext::test;

namespace {

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device on this machine";
  }
  static std::unique_ptr<Device> open(std::size_t budget = SIZE_MAX) {
    CudaDeviceOptions options;
    options.memory_budget = budget;
    return make_cuda_device(0, options);
  }
};

template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// streams[i] = fh[i] + fe[i]: an op whose result is easy to know.
struct Adder {
  static constexpr std::int32_t kDim = 1 << 20;
  Device& device;
  StepHead* head;
  void operator()(StreamId stream, const float* a, const float* b, float* sum) const {
    launch(device, stream, MtpJoinArgs{{&head->rows, 1, 1}, a, b, sum, 1, kDim});
  }
};

}  // namespace

TEST_F(CudaDeviceTest, DescribesItself) {
  const auto device = open();
  EXPECT_EQ(device->kind(), "cuda");
  EXPECT_NE(device->description().find("compute capability"), std::string::npos);
  const std::vector<CudaDeviceInfo> all = cuda_devices();
  ASSERT_GE(all.size(), 1u);
  EXPECT_TRUE(all[0].compiled);
  EXPECT_GT(all[0].memory_bytes, std::size_t{1} << 30);
  EXPECT_THROW(make_cuda_device(static_cast<int>(all.size()), {}), InputError);
  EXPECT_THROW(make_cuda_device(-1, {}), InputError);
}

TEST_F(CudaDeviceTest, BudgetNamesThePartsAndTheSum) {
  const auto device = open(10'000'000);
  const Block first(*device, Space::kDevice, 4'000'000, "weights");
  const Block second(*device, Space::kDevice, 3'000'000, "kv pages");
  const Block pinned(*device, Space::kPinned, 64'000'000, "bank");  // not under the budget
  const std::string message =
      message_of([&] { device->allocate(Space::kDevice, 3'000'001, "scratch"); });
  for (const char* part :
       {"scratch", "3000001", "weights 4000000", "kv pages 3000000", "10000001", "10000000"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  }
  EXPECT_THROW(device->allocate(Space::kDevice, 3'000'001, "scratch"), OutOfMemory);
  EXPECT_EQ(device->allocations().size(), 3u);
  const Block fits(*device, Space::kDevice, 3'000'000, "scratch");  // exactly what is left
}

TEST_F(CudaDeviceTest, ReleasedMemoryCountsNoMore) {
  const auto device = open(1000);
  for (int i = 0; i < 100; ++i) const Block block(*device, Space::kDevice, 1000, "again");
  EXPECT_TRUE(device->allocations().empty());
}

TEST_F(CudaDeviceTest, TheCardsOwnLimitLeavesTheDeviceUsable) {
  const auto device = open();
  EXPECT_THROW(device->allocate(Space::kDevice, std::size_t{1} << 45, "too much"), OutOfMemory);
  const Block block(*device, Space::kDevice, 1 << 20, "fits");
  Stream stream(*device);
  device->zero_async(stream.id(), block.data(), block.bytes());
  device->synchronize(stream.id());
}

TEST_F(CudaDeviceTest, EveryBlockIsAligned) {
  const auto device = open();
  for (const Space space : {Space::kDevice, Space::kPinned, Space::kPageable}) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}}) {
      const Block block(*device, space, bytes, "aligned");
      ASSERT_NE(block.data(), nullptr);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 256, 0u);
    }
  }
}

TEST_F(CudaDeviceTest, NothingIsAllocatedAfterSeal) {
  const auto device = open();
  device->seal();
  for (const Space space : {Space::kDevice, Space::kPinned, Space::kPageable}) {
    EXPECT_THROW(device->allocate(space, 16, "late"), LogicError);
  }
}

TEST_F(CudaDeviceTest, ZeroAndCopiesReachEverySpace) {
  const auto device = open();
  Stream stream(*device);
  const Block a(*device, Space::kPageable, 4096, "a");
  const Block b(*device, Space::kDevice, 4096, "b");
  const Block c(*device, Space::kPinned, 4096, "c");
  std::memset(a.data(), 7, 4096);
  device->copy_async(stream.id(), b.data(), a.data(), 4096);
  device->zero_async(stream.id(), b.as<char>() + 100, 50);
  device->copy_async(stream.id(), c.data(), b.data(), 4096);
  device->synchronize(stream.id());
  for (int i = 0; i < 4096; ++i) ASSERT_EQ(c.as<char>()[i], i >= 100 && i < 150 ? 0 : 7) << i;
}

// Small copies from pinned memory run as kernels: every size and offset, and a replay must see what
// the host has written since.
TEST_F(CudaDeviceTest, SmallCopiesFromPinnedMemory) {
  const auto device = open();
  Stream stream(*device);
  constexpr std::size_t kBytes = 100'000;
  const Block from(*device, Space::kPinned, kBytes, "from");
  const Block to(*device, Space::kDevice, kBytes, "to");
  const Block back(*device, Space::kPinned, kBytes, "back");
  const auto fill = [&](int seed) {
    for (std::size_t i = 0; i < kBytes; ++i) {
      from.as<unsigned char>()[i] = static_cast<unsigned char>(i * 7 + i / 251 + std::size_t(seed));
    }
  };
  for (const std::size_t bytes : {1u, 15u, 16u, 4080u, 4096u, 4112u, 65536u, 65552u, 99'968u}) {
    for (const std::size_t at : {0u, 16u, 32u, 8u}) {
      if (at + bytes > kBytes) continue;
      fill(static_cast<int>(bytes + at));
      device->zero_async(stream.id(), to.data(), kBytes);
      device->copy_async(stream.id(), to.as<char>() + at, from.as<char>() + at, bytes);
      device->copy_async(stream.id(), back.data(), to.data(), kBytes);
      device->synchronize(stream.id());
      for (std::size_t i = 0; i < kBytes; ++i) {
        const bool copied = i >= at && i < at + bytes;
        ASSERT_EQ(back.as<unsigned char>()[i], copied ? from.as<unsigned char>()[i] : 0)
            << "byte " << i << " of " << bytes << " at " << at;
      }
    }
  }
  Capture scope(*device, stream.id());
  device->copy_async(stream.id(), to.data(), from.data(), 4096);
  device->copy_async(stream.id(), back.data(), to.data(), 4096);
  const Graph graph = scope.finish();
  for (int seed = 0; seed < 20; ++seed) {
    fill(seed);
    graph.replay(stream.id());
    device->synchronize(stream.id());
    ASSERT_EQ(std::memcmp(back.data(), from.data(), 4096), 0) << "replay " << seed;
  }
}

// Two streams joined by events, eagerly and captured: s1 = a + b; on the other stream s2 = s1 + b;
// back on the first s3 = s2 + s1. Every edge is needed.
TEST_F(CudaDeviceTest, EventsOrderStreamsEagerlyAndInGraphs) {
  const auto device = open();
  Stream main(*device);
  Stream side(*device);
  Event forked(*device);
  Event joined(*device);
  std::vector<float> ones(Adder::kDim, 1.0f);
  const StepHead head{1, 0, 0, 0};
  Upload head_at(*device, main.id(), &head, sizeof head);
  Upload a(*device, main.id(), ones.data(), ones.size() * 4);
  Upload s1(*device, main.id(), ones.data(), ones.size() * 4);
  Upload s2(*device, main.id(), ones.data(), ones.size() * 4);
  Upload s3(*device, main.id(), ones.data(), ones.size() * 4);
  const Adder add{*device, static_cast<StepHead*>(head_at.data())};
  const auto f = [](const Upload& u) { return static_cast<float*>(u.data()); };
  const auto enqueue = [&] {
    for (int round = 0; round < 3; ++round) {
      add(main.id(), f(a), f(a), f(s1));
      device->record(forked.id(), main.id());
      device->wait(side.id(), forked.id());
      add(side.id(), f(s1), f(a), f(s2));
      device->record(joined.id(), side.id());
      device->wait(main.id(), joined.id());
      add(main.id(), f(s2), f(s1), f(s3));
      add(main.id(), f(s3), f(s3), f(a));  // the next round starts from 10 a
    }
  };
  const auto expect_values = [&](float value) {
    const std::vector<std::byte> bytes = a.read(*device, main.id());
    for (std::size_t i = 0; i < ones.size(); ++i) {
      float v;
      std::memcpy(&v, bytes.data() + 4 * i, 4);
      ASSERT_EQ(v, value) << i;
    }
  };
  device->synchronize(main.id());
  enqueue();
  device->synchronize(main.id());
  expect_values(1000.0f);
  Capture capture(*device, main.id());
  enqueue();
  const Graph graph = capture.finish();
  expect_values(1000.0f);  // recorded, not run
  graph.replay(main.id());
  device->synchronize(main.id());
  expect_values(1e6f);
}

TEST_F(CudaDeviceTest, AnAbandonedCaptureRunsNothing) {
  const auto device = open();
  Stream stream(*device);
  const Block block(*device, Space::kPinned, 64, "block");
  std::memset(block.data(), 5, 64);
  {
    Capture capture(*device, stream.id());
    device->zero_async(stream.id(), block.data(), 64);
  }
  device->synchronize(stream.id());
  EXPECT_EQ(block.as<char>()[0], 5);
  device->zero_async(stream.id(), block.data(), 64);
  device->synchronize(stream.id());
  EXPECT_EQ(block.as<char>()[0], 0);
}

TEST_F(CudaDeviceTest, MistakesOfTheCallerAreLogicErrors) {
  const auto device = open();
  Stream stream(*device);
  EmbedArgs args{};
  EXPECT_THROW(device->launch(stream.id(), Op::kEmbed, &args, sizeof args - 4), LogicError);
  EXPECT_THROW(device->launch(stream.id(), Op::kCount, &args, sizeof args), LogicError);
  EXPECT_THROW(device->launch(stream.id() + 100, Op::kEmbed, &args, sizeof args), LogicError);
  EXPECT_THROW(device->replay(12345, stream.id()), LogicError);
  device->synchronize(stream.id());  // none of them harmed the device
}

TEST_F(CudaDeviceTest, TheFirstFailureIsNamedByEveryLaterCall) {
  const auto device = open();
  Stream stream(*device);
  EXPECT_THROW(device->end_capture(stream.id()), DeviceError);
  for (int i = 0; i < 2; ++i) {
    const std::string message = message_of([&] { device->synchronize(stream.id()); });
    EXPECT_NE(message.find("cudaStreamEndCapture"), std::string::npos) << message;
  }
  EXPECT_THROW(device->allocate(Space::kDevice, 16, "late"), DeviceError);
  EXPECT_THROW(device->create_stream(), DeviceError);
  EXPECT_THROW(device->zero_async(stream.id(), nullptr, 1), DeviceError);
}

// Last: it leaves the process without a usable context.
TEST_F(CudaDeviceTest, ZLastABadAddressPoisonsTheDevice) {
  const auto device = open();
  Stream stream(*device);
  const StepHead head{1, 0, 0, 0};
  Upload head_at(*device, stream.id(), &head, sizeof head);
  const Adder add{*device, static_cast<StepHead*>(head_at.data())};
  float* nowhere = reinterpret_cast<float*>(std::uintptr_t{0x100});
  add(stream.id(), nowhere, nowhere, nowhere);
  const std::string first = message_of([&] { device->synchronize(stream.id()); });
  EXPECT_NE(first.find("cudaStreamSynchronize"), std::string::npos) << first;
  EXPECT_NE(first.find("cudaErrorIllegalAddress"), std::string::npos) << first;
  const std::string later = message_of([&] { add(stream.id(), nowhere, nowhere, nowhere); });
  EXPECT_NE(later.find("cudaStreamSynchronize"), std::string::npos) << later;
}
