// Capture and replay on the host device: what is recorded, what must be joined, what is forbidden.
#include "cpp/device/host_device.h"
#include "tests/cpp/host_device_case.h"

namespace flashnext {
namespace {

using test::BadGather;
using test::enqueue_add;
using test::kBytes;
using test::make_device;
using test::message_of;
using test::Vec;

constexpr std::uint64_t kSeeds = 10;

TEST(HostCapture, RecordsInsteadOfRunningAndReplaysAnyNumberOfTimes) {
  auto device = make_device(0);
  Vec one(*device), sum(*device), copy(*device);
  Stream stream(*device);
  one.fill(1);
  sum.fill(0);
  device->begin_capture(stream.id());
  enqueue_add(*device, stream.id(), one, sum, sum);
  device->copy_async(stream.id(), copy.data(), sum.data(), kBytes);
  const GraphId id = device->end_capture(stream.id());
  EXPECT_EQ(device->graph_nodes(id), 2u);
  const Graph graph(*device, id);
  device->synchronize(stream.id());
  EXPECT_EQ(sum.value(), 0.0f);
  for (int i = 0; i < 3; ++i) graph.replay(stream.id());
  EXPECT_EQ(sum.value(), 0.0f);
  device->synchronize(stream.id());
  EXPECT_EQ(sum.value(), 3.0f);
  EXPECT_EQ(copy.value(), 3.0f);
}

// A fork to a second stream and back; `edges` says whether the fork waits for the first sum.
float forked(std::uint64_t seed, bool edges) {
  auto device = make_device(seed);
  Vec one(*device), x(*device), y(*device), z(*device);
  Stream a(*device), b(*device);
  Event start(*device), fork(*device), join(*device);
  one.fill(1);
  Capture capture(*device, a.id());
  device->record(start.id(), a.id());
  enqueue_add(*device, a.id(), one, one, x);  // 2
  device->record(fork.id(), a.id());
  device->wait(b.id(), edges ? fork.id() : start.id());
  enqueue_add(*device, b.id(), x, one, y);  // 3
  device->record(join.id(), b.id());
  device->wait(a.id(), join.id());
  enqueue_add(*device, a.id(), x, y, z);  // 5
  device->zero_async(a.id(), x.data(), kBytes);
  const Graph graph = capture.finish();
  graph.replay(a.id());
  device->synchronize(a.id());
  return z.value();
}

TEST(HostCapture, ReplayKeepsTheEdgesAndNothingElse) {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    EXPECT_EQ(forked(seed, true), 5.0f) << "seed " << seed;
    wrong += forked(seed, false) != 5.0f;
  }
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, static_cast<int>(kSeeds));
}

TEST(HostCapture, AReplayIsOneEntryOfItsStreamForEvents) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    auto device = make_device(seed);
    Vec one(*device), sum(*device), seen(*device);
    Stream a(*device), b(*device), c(*device);
    Event done(*device);
    one.fill(1);
    sum.fill(0);
    Capture capture(*device, a.id());
    for (int i = 0; i < 5; ++i) enqueue_add(*device, a.id(), one, sum, sum);
    const Graph graph = capture.finish();
    graph.replay(c.id());  // any stream may replay; two replays of one graph do not overlap
    device->record(done.id(), c.id());
    device->wait(a.id(), done.id());
    graph.replay(a.id());
    device->record(done.id(), a.id());
    device->wait(b.id(), done.id());
    device->copy_async(b.id(), seen.data(), sum.data(), kBytes);
    device->synchronize(b.id());
    EXPECT_EQ(seen.value(), 10.0f) << "seed " << seed;
  }
}

TEST(HostCapture, WorkOfAnotherStreamMustBeJoinedBack) {
  auto device = make_device(0);
  Vec x(*device), y(*device);
  Stream a(*device), b(*device);
  Event fork(*device);
  Capture capture(*device, a.id());
  device->zero_async(a.id(), x.data(), kBytes);
  device->record(fork.id(), a.id());
  device->wait(b.id(), fork.id());
  device->zero_async(b.id(), y.data(), kBytes);
  const auto text = message_of<LogicError>([&] { const Graph graph = capture.finish(); });
  EXPECT_CONTAINS(text, "unjoined");
  EXPECT_CONTAINS(text, "stream 2");
  // The capture is over and left nothing behind.
  device->zero_async(b.id(), y.data(), kBytes);
  device->synchronize(b.id());
  EXPECT_EQ(y.value(), 0.0f);
}

TEST(HostCapture, AStreamThatJoinedWithoutWorkNeedsNoJoin) {
  auto device = make_device(0);
  Vec x(*device);
  Stream a(*device), b(*device);
  Event fork(*device);
  Capture capture(*device, a.id());
  device->record(fork.id(), a.id());
  device->wait(b.id(), fork.id());
  device->zero_async(a.id(), x.data(), kBytes);
  const Graph graph = capture.finish();
  graph.replay(b.id());
  device->synchronize(b.id());
  EXPECT_EQ(x.value(), 0.0f);
}

TEST(HostCapture, OtherStreamsRunEagerlyMeanwhile) {
  auto device = make_device(0);
  Vec x(*device);
  Stream a(*device), other(*device);
  Capture capture(*device, a.id());
  device->zero_async(other.id(), x.data(), kBytes);
  const Graph graph = capture.finish();
  EXPECT_TRUE(std::isnan(x.value()));
  device->synchronize(other.id());
  EXPECT_EQ(x.value(), 0.0f);
}

TEST(HostCapture, WaitingAndAllocatingAreForbidden) {
  auto device = make_device(0);
  Stream a(*device), b(*device);
  const Graph empty = [&] {
    Capture capture(*device, a.id());
    return capture.finish();
  }();
  {
    Capture capture(*device, a.id());
    EXPECT_CONTAINS(message_of<LogicError>([&] { device->synchronize(a.id()); }), "synchronize");
    EXPECT_THROW(device->synchronize(b.id()), LogicError);
    EXPECT_CONTAINS(message_of<LogicError>([&] { device->allocate(Space::kDevice, 1, "x"); }),
                    "allocate");
    EXPECT_THROW(device->begin_capture(b.id()), LogicError);
    EXPECT_THROW(device->end_capture(b.id()), LogicError);
    EXPECT_THROW(empty.replay(a.id()), LogicError);
  }  // dropped without finish()
  device->synchronize(a.id());
  empty.replay(a.id());
  device->synchronize(a.id());
}

TEST(HostCapture, EventsDoNotCrossTheBorderOfACapture) {
  auto device = make_device(0);
  Stream a(*device), b(*device);
  Event eager(*device), captured(*device), never(*device);
  device->record(eager.id(), b.id());
  Capture capture(*device, a.id());
  EXPECT_CONTAINS(message_of<LogicError>([&] { device->wait(a.id(), eager.id()); }), "outside");
  device->wait(a.id(), never.id());
  device->record(captured.id(), a.id());
  const Graph graph = capture.finish();
  EXPECT_CONTAINS(message_of<LogicError>([&] { device->wait(b.id(), captured.id()); }), "ended");
  {
    Capture second(*device, b.id());
    EXPECT_THROW(device->wait(b.id(), captured.id()), LogicError);
  }
  device->record(captured.id(), a.id());  // a new record makes it an ordinary event again
  device->wait(b.id(), captured.id());
  device->synchronize(b.id());
}

TEST(HostCapture, AnErrorInAReplaySurfacesLikeAnyOther) {
  auto device = make_device(0);
  Stream a(*device);
  Vec x(*device);
  BadGather bad;
  Capture capture(*device, a.id());
  bad.enqueue(*device, a.id());
  device->zero_async(a.id(), x.data(), kBytes);
  Graph graph = capture.finish();
  graph.replay(a.id());
  graph.replay(a.id());
  graph = Graph();  // destroyed while replays are queued
  EXPECT_THROW(device->synchronize(a.id()), InputError);
  EXPECT_TRUE(std::isnan(x.value()));
  EXPECT_THROW(device->synchronize(a.id()), DeviceError);
}

TEST(HostCapture, ADestroyedGraphFinishesItsQueuedReplays) {
  auto device = make_device(0);
  Stream a(*device);
  Vec one(*device), sum(*device);
  one.fill(1);
  sum.fill(0);
  {
    Capture capture(*device, a.id());
    enqueue_add(*device, a.id(), one, sum, sum);
    const Graph graph = capture.finish();
    graph.replay(a.id());
    graph.replay(a.id());
  }
  device->synchronize(a.id());
  EXPECT_EQ(sum.value(), 2.0f);
}

TEST(HostCapture, AGraphThatNamesReleasedMemoryIsNotReplayed) {
  auto device = make_device(0);
  Stream a(*device);
  Graph graph;
  {
    const Vec x(*device, "old buffer");
    Capture capture(*device, a.id());
    device->zero_async(a.id(), x.data(), kBytes);
    graph = capture.finish();
    graph.replay(a.id());
    device->synchronize(a.id());
  }
  EXPECT_CONTAINS(message_of<LogicError>([&] { graph.replay(a.id()); }), "'old buffer'");
}

}  // namespace
}  // namespace flashnext
