// The gate itself: it passes the host device, covers the op table, and fails a device that is wrong
// in one number, one op or one launch.
#include "cpp/gate/gate.h"

#include "cpp/device/host_device.h"
#include "cpp/gate/cases.h"
#include "cpp/gate/plan.h"
#include "tests/cpp/demo.h"

#include <gtest/gtest.h>
#include <limits>
#include <memory>
#include <set>

namespace flashnext::gate {
namespace {

// A host device that spoils the output of one op, on every launch or only inside graphs.
class WrongDevice final : public Device {
 public:
  WrongDevice(Op op, bool graphs_only) : op_(op), graphs_only_(graphs_only) {}

  std::string_view kind() const noexcept override { return "wrong"; }
  std::string description() const override { return "wrong"; }
  void* allocate(Space space, std::size_t bytes, std::string_view what) override {
    return host_->allocate(space, bytes, what);
  }
  void release(void* block) noexcept override { host_->release(block); }
  void seal() noexcept override { host_->seal(); }
  bool pin(void* data, std::size_t bytes, std::string_view what) override {
    return host_->pin(data, bytes, what);
  }
  void unpin(void* data) noexcept override { host_->unpin(data); }
  std::vector<Allocated> allocations() const override { return host_->allocations(); }
  StreamId create_stream() override { return host_->create_stream(); }
  void destroy_stream(StreamId s) noexcept override { host_->destroy_stream(s); }
  EventId create_event() override { return host_->create_event(); }
  void destroy_event(EventId e) noexcept override { host_->destroy_event(e); }
  void record(EventId e, StreamId s) override { host_->record(e, s); }
  void wait(StreamId s, EventId e) override { host_->wait(s, e); }
  bool reached(EventId e) override { return host_->reached(e); }
  void synchronize(StreamId s) override { host_->synchronize(s); }
  void copy_async(StreamId s, void* to, const void* from, std::size_t n) override {
    host_->copy_async(s, to, from, n);
  }
  void zero_async(StreamId s, void* to, std::size_t n) override { host_->zero_async(s, to, n); }
  void launch(StreamId s, Op op, const void* args, std::size_t bytes) override {
    host_->launch(s, op, args, bytes);
    if (op != op_ || (graphs_only_ && !capturing_)) return;
    if (op == Op::kExl3Linear) {
      host_->zero_async(s, static_cast<const Exl3LinearArgs*>(args)->y[0], 4);
    } else if (op == Op::kRoute) {
      host_->zero_async(s, static_cast<const RouteArgs*>(args)->weights, 4);
    } else if (op == Op::kGdnGate) {
      host_->zero_async(s, static_cast<const GdnGateArgs*>(args)->y, 4);
    } else if (op == Op::kCombine) {
      throw DeviceError("combine: an illegal address was encountered");
    }
  }
  std::size_t workspace_bytes(Op op, const void* args) const override {
    return host_->workspace_bytes(op, args);
  }
  void begin_capture(StreamId s) override {
    host_->begin_capture(s);
    capturing_ = true;
  }
  GraphId end_capture(StreamId s) override {
    capturing_ = false;
    return host_->end_capture(s);
  }
  void abort_capture(StreamId s) noexcept override { host_->abort_capture(s); }
  void replay(GraphId g, StreamId s) override { host_->replay(g, s); }
  void destroy_graph(GraphId g) noexcept override { host_->destroy_graph(g); }

 private:
  std::unique_ptr<Device> host_ = make_host_device({});
  Op op_;
  bool graphs_only_;
  bool capturing_ = false;
};

std::size_t failures(const std::vector<GateResult>& results, const char* op) {
  std::size_t n = 0;
  for (const GateResult& r : results) {
    if (r.passed) continue;
    EXPECT_EQ(r.op, op) << r.name;
    EXPECT_NE(r.detail, "");
    ++n;
  }
  return n;
}

TEST(Gate, CoversEveryOp) {
  std::set<Op> seen;
  std::set<std::string> gates;
  for (const Planned& planned : op_plan()) {
    gates.insert(planned.gate);
    // The large cases add no op of their own.
    if (seen.size() < static_cast<std::size_t>(kNumOps)) seen.insert(planned.make().op);
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(kNumOps));
  EXPECT_EQ(seen.count(Op::kCount), 0u);
  EXPECT_EQ(gates, std::set<std::string>(op_gates().begin(), op_gates().end()));
}

TEST(Gate, PassesTheHostDevice) {
  const auto oracle = make_host_device({.threads = 1, .isa = exl3::Isa::kScalar});
  const auto device = make_host_device({.threads = 2, .seed = 5});
  for (const char* gate : {"functions", "choice"}) {
    const auto results = run_op_gates(*oracle, *device, {.gate = gate});
    EXPECT_FALSE(results.empty());
    for (const GateResult& r : results) EXPECT_TRUE(r.passed) << r.name << ": " << r.detail;
  }
}

TEST(Gate, FailsOneWrongNumber) {
  const auto oracle = make_host_device({});
  WrongDevice route(Op::kRoute, false);
  const auto choice = run_op_gates(*oracle, route, {.gate = "choice"});
  std::size_t routes = 0;
  for (const GateResult& r : choice) routes += r.op == std::string("route") ? 1 : 0;
  EXPECT_EQ(failures(choice, "route"), routes);
  EXPECT_LT(routes, choice.size());
}

TEST(Gate, FailsAGraphThatDiffersFromEager) {
  const auto oracle = make_host_device({});
  WrongDevice device(Op::kRoute, true);
  const auto results = run_op_gates(*oracle, device, {.gate = "choice"});
  EXPECT_GT(failures(results, "route"), 0u);
  EXPECT_NE(results.front().detail.find("graph against eager"), std::string::npos);
}

TEST(Gate, EndsWhenTheDeviceFails) {
  const auto oracle = make_host_device({});
  WrongDevice device(Op::kCombine, false);
  const auto results = run_op_gates(*oracle, device, {.gate = "functions"});
  ASSERT_EQ(results.size(), 1u);
  EXPECT_FALSE(results[0].passed);
  EXPECT_NE(results[0].detail.find("illegal address"), std::string::npos);
}

TEST(Gate, ComparesByBitsOrByNorm) {
  Case c;
  c.rows = 2;
  c.out<float>("exact", 2);
  c.out<float>("close", 2, 1e-6);
  const auto bytes = [](std::vector<float> values) {
    std::vector<std::byte> data(values.size() * 4);
    std::memcpy(data.data(), values.data(), data.size());
    return data;
  };
  const Results want = {bytes({1, 2, 3, 4}), bytes({3, 0, 4, 0})};
  EXPECT_TRUE(compare(c, want, want).passed);
  EXPECT_FALSE(compare(c, {bytes({1, 2, 3, 4.0000005f}), want[1]}, want).passed);
  // |difference| / |want| = 5e-7 * 3 / 5.
  const Comparison near = compare(c, {want[0], bytes({3.0000015f, 0, 4, 0})}, want);
  EXPECT_TRUE(near.passed);
  EXPECT_NEAR(near.max_error, 3e-7, 5e-8);
  EXPECT_FALSE(compare(c, {want[0], bytes({3.00002f, 0, 4, 0})}, want).passed);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(compare(c, {want[0], bytes({nan, 0, 4, 0})}, want).passed);
  EXPECT_FALSE(
      compare(c, {want[0], bytes({nan, 0, 4, 0})}, {want[0], bytes({nan, 0, 4, 0})}).passed);
  EXPECT_EQ(differs(c, {bytes({3, 4}), bytes({4, 0})}, want, 1), "");
  EXPECT_EQ(differs(c, {bytes({3, 5}), bytes({4, 0})}, want, 1), "exact differs");
}

TEST(Gate, SessionOfTheDemoPasses) {
  SessionOptions o = test::demo_options();
  o.lanes = 2;
  o.snapshots = 1;
  o.chunk = 64;
  const auto session = test::open_demo(o);
  std::set<std::string> seen;
  for (const GateResult& r : run_engine_gates(*session)) {
    EXPECT_TRUE(r.passed) << r.gate << ": " << r.name << ": " << r.detail;
    seen.insert(r.gate);
  }
  EXPECT_EQ(seen, std::set<std::string>(engine_gates().begin(), engine_gates().end()));
  EXPECT_EQ(session->engine().length(0), 0);
  session->engine().state().check_integrity();
}

}  // namespace
}  // namespace flashnext::gate
