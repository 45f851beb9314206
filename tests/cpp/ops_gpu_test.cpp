// Every op of these families on the CUDA device against the host device, and against itself: rows
// alone and together, a larger bucket, a captured graph.
#include "cpp/gate/gate.h"
#include "tests/cpp/conformance.h"

#include <algorithm>
#include <cmath>
#include <memory>

using namespace flashnext;
using namespace flashnext::test;

namespace {

class Ops : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (cuda_device_count() == 0) return;
    cuda = make_cuda_device(0, {});
    host = make_host_device({});
  }
  static void TearDownTestSuite() {
    cuda.reset();
    host.reset();
  }
  void SetUp() override {
    if (cuda == nullptr) GTEST_SKIP() << "no CUDA device on this machine";
  }

  // The whole case on both devices, and on CUDA in every other way.
  static void check(const Case& c) {
    SCOPED_TRACE(c.name + ", rows " + std::to_string(c.rows));
    const Results whole = run(*cuda, c);
    expect_close(c, whole, run(*host, c));
    expect_same(c, run(*cuda, c, {.graph = true}), whole, 0, "graph against eager");
    if (!c.by_row()) return;
    for (std::int32_t first : {0, c.rows / 2, c.rows - 1}) {
      expect_same(c, run(*cuda, c, {.first = first, .count = 1}), whole, first, "alone");
    }
    if (c.rows >= 3) {
      expect_same(c, run(*cuda, c, {.first = 1, .count = 2}), whole, 1, "two rows");
      // Forms of few rows read what lies beyond the rows of the step, here NaN, and write none of
      // it.
      expect_same(c, run(*cuda, c, {.first = 1, .count = 2, .max_rows = 4}), whole, 1,
                  "two rows in a bucket of 4");
      expect_same(c, run(*cuda, c, {.first = 2, .count = 1, .max_rows = 8}), whole, 2,
                  "one row in a bucket of 8");
      expect_same(c, run(*cuda, c, {.first = 0, .count = 3, .max_rows = 3 * c.rows + 70}), whole, 0,
                  "three rows in a large bucket");
    }
  }

  static std::unique_ptr<Device> cuda;
  static std::unique_ptr<Device> host;
};

std::unique_ptr<Device> Ops::cuda;
std::unique_ptr<Device> Ops::host;

constexpr std::int32_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 200};

}  // namespace

// What `flashnext gate` runs: every op of the table.
TEST_F(Ops, TheGatePasses) {
  for (const GateResult& r : run_op_gates(*host, *cuda)) {
    EXPECT_TRUE(r.passed) << r.gate << ": " << r.name << ", rows " << r.rows << ": " << r.detail;
  }
}

TEST_F(Ops, Streams) {
  for (const Dims& d : {kTiny, kReal}) {
    for (std::int32_t rows : kRows) {
      check(embed_case(d, rows));
      check(residual_case(d, rows));
    }
  }
}

TEST_F(Ops, MixTiny) {
  for (std::int32_t rows : kRows) {
    for (MixKind kind : {MixKind::kPlain, MixKind::kPending, MixKind::kPicked}) {
      check(mix_case(kTiny, rows, kind));
    }
  }
  check(mix_case(kTiny, 2500, MixKind::kPending));  // more than one group
}

TEST_F(Ops, MixReal) {
  // Up to 32 rows in groups of 8; more in tiles.
  for (std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 27, 64, 200}) {
    check(mix_case(kReal, rows, MixKind::kPending));
  }
  for (std::int32_t rows : {1, 2, 4, 5, 8, 9}) {
    check(mix_case(kReal, rows, MixKind::kPlain));
    check(mix_case(kReal, rows, MixKind::kPicked));
  }
  check(mix_case(kReal, 1000, MixKind::kPlain));
}

TEST_F(Ops, MixOfOtherShapes) {
  // Ragged chunks, a hidden row of more than two chunks, other numbers of streams.
  for (std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 70}) {
    check(mix_case({"2 streams", 2032, 2, 24, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"8 streams", 336, 8, 520, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"1 stream", 48, 1, 8, 0, 0, 0, 0, 0}, rows, MixKind::kPlain));
  }
  // Two kernels: streams of one, two and three pieces, three to eight slices, hidden rows of one,
  // two and three chunks.
  for (std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8}) {
    check(mix_case({"4 short streams", 1280, 4, 160, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"8 short streams", 1280, 8, 24, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"2 long streams", 3840, 2, 328, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"1 stream of 3", 3840, 1, 320, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"wide rank", 2560, 4, 408, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
  }
}

TEST_F(Ops, Dense) {
  for (std::int32_t rows : kRows) {
    check(dense_case("router", 2560, {512, 1}, rows));
    check(dense_case("ab", 2560, {48, 48}, rows));
    check(dense_case("tiny", 256, {32, 1, 6, 6}, rows));
    check(dense_case("odd", 1288, {37}, rows));
  }
  check(dense_case("many slices", 6400, {100, 7}, 5));
  check(dense_case("many slices", 6400, {100, 7}, 90));
  check(dense_case("key", 2560, {10240, 2560}, 3));
  check(dense_case("router", 2560, {512, 1}, 8300));  // more than one group
}

TEST_F(Ops, RouteAndCombineAreBitEqualToTheHost) {
  for (const Dims& d : {kTiny, kReal}) {
    for (std::int32_t rows : kRows) {
      for (RouteKind kind : {RouteKind::kFine, RouteKind::kTies, RouteKind::kForced}) {
        check(route_case(d, rows, true, kind));
        check(route_case(d, rows, false, kind));
      }
      check(combine_case(d, rows));
    }
  }
}

TEST_F(Ops, RouteOfOtherShapes) {
  for (RouteKind kind : {RouteKind::kFine, RouteKind::kTies, RouteKind::kForced}) {
    for (std::int32_t rows : {1, 2, 3, 4, 5, 8, 9}) {
      check(route_case({"700 experts", 256, 0, 0, 700, 40, 0, 0, 0}, rows, true, kind));
      check(route_case({"ragged", 1984, 0, 0, 37, 33, 0, 0, 0}, rows, true, kind));
      check(route_case({"two slices", 3840, 0, 0, 40, 4, 0, 0, 0}, rows, false, kind));
      check(route_case({"64 of 512", 64, 0, 0, 512, 64, 0, 0, 0}, rows, true, kind));
    }
  }
}

TEST_F(Ops, RouteReachesEveryExpert) {
  // One expert stands out a row: each must be found first, in its row, by many rows and by few.
  Case c = route_case(kReal, 512, true, RouteKind::kFine);
  auto* x = reinterpret_cast<float*>(c.buffers[0].data.data());
  auto* router = reinterpret_cast<std::uint16_t*>(c.buffers[1].data.data());
  std::fill_n(router, z(kReal.experts) * z(kReal.dim), std::uint16_t{0});
  for (std::size_t e = 0; e < 512; ++e) router[e * 2560 + 5 * e] = 0x3C00;  // 1
  for (std::size_t r = 0; r < 512; ++r) x[r * 2560 + 5 * ((r * 131) % 512)] = 50.0f;
  for (std::int32_t step : {512, 8, 4, 2, 1}) {
    for (std::int32_t first = 0; first < 512; first += step) {
      const Results got = run(*cuda, c, {.first = first, .count = step});
      for (std::size_t r = 0; r < z(step); ++r) {
        std::int32_t id;
        std::memcpy(&id, got[0].data() + r * 10 * 4, 4);
        ASSERT_EQ(id, static_cast<std::int32_t>(((z(first) + r) * 131) % 512))
            << "steps of " << step;
      }
    }
  }
}

TEST_F(Ops, RoutesInARowShareTicketAndWorkspace) {
  // 40 launches on different rows, as the layers of a model, in a graph that is replayed.
  const Case c = route_case(kReal, 40, true, RouteKind::kFine);
  const Results want = run(*host, c);
  for (std::int32_t step : {1, 2, 4, 8}) {
    Stream stream(*cuda);
    const StepHead head{step, 0, 0, 0};
    Upload head_at(*cuda, stream.id(), &head, sizeof head);
    std::vector<Upload> at;
    for (const Buffer& b : c.buffers) {
      at.emplace_back(*cuda, stream.id(), b.data.data(), b.data.size());
    }
    RouteArgs a{};
    a.rows = {&static_cast<StepHead*>(head_at.data())->rows, 1, step};
    a.router = {static_cast<std::uint16_t*>(at[1].data()), kReal.dim, kReal.experts};
    a.shared_gate = {static_cast<std::uint16_t*>(at[2].data()), kReal.dim, 1};
    a.top_k = kReal.top_k;
    a.normalise = 1;
    a.ticket = static_cast<std::int32_t*>(at[7].data());
    Block workspace(*cuda, Space::kDevice, cuda->workspace_bytes(Op::kRoute, &a), "workspace");
    a.workspace = {workspace.data(), workspace.bytes()};
    cuda->synchronize(stream.id());
    Capture capture(*cuda, stream.id());
    for (std::int32_t first = 0; first < c.rows; first += step) {
      a.x = static_cast<float*>(at[0].data()) + first * kReal.dim;
      a.ids = static_cast<std::int32_t*>(at[4].data()) + first * kReal.top_k;
      a.weights = static_cast<float*>(at[5].data()) + first * kReal.top_k;
      a.gate = static_cast<float*>(at[6].data()) + first;
      launch(*cuda, stream.id(), a);
    }
    const Graph graph = capture.finish();
    for (int i = 0; i < 3; ++i) {
      cuda->zero_async(stream.id(), at[4].data(), c.buffers[4].data.size());
      graph.replay(stream.id());
      EXPECT_EQ(at[4].read(*cuda, stream.id()), want[0]) << "ids, steps of " << step;
      EXPECT_EQ(at[5].read(*cuda, stream.id()), want[1]) << "weights, steps of " << step;
      EXPECT_EQ(at[7].read(*cuda, stream.id()), want[3]) << "ticket, steps of " << step;
    }
  }
}

TEST_F(Ops, NgramIsBitEqualToTheHost) {
  for (std::int32_t rows : kRows) check(ngram_hash_case(rows));
  for (std::int32_t bits = 0; bits <= 8; ++bits) {
    check(ngram_decode_case(5, bits, true));
    check(ngram_decode_case(3, bits, false));
  }
}

TEST_F(Ops, PleAndDraftHead) {
  for (const Dims& d : {kTiny, kReal}) {
    for (std::int32_t rows : {1, 3, 8, 64}) {
      check(ple_gate_case(d, rows));
      check(mtp_norm_case(d, rows, true));
      check(mtp_norm_case(d, rows, false));
      check(mtp_join_case(d, rows));
    }
    check(ple_conv_case(d, {1}));
    check(ple_conv_case(d, {4, 1, 8, 2, 20, 3}));
    check(window_push_case(d, 9, {1, 1, 1}));
    check(window_push_case(d, 9, {4, 1, 8, 9, 20, 3}));
    check(window_push_case(d, 3, {1, 2, 3, 4, 5}));
  }
}

TEST_F(Ops, SampleDrawsTheHostsToken) {
  check(sample_case(kTiny, 100, 1500, false));
  check(sample_case(kTiny, 100, 1536, true));
  check(sample_case(kReal, 40, 248000, false));
  check(sample_case(kReal, 20, 248320, true));
}

TEST_F(Ops, NgramGatherCopiesRowsAtAnyAlignment) {
  Random random(21);
  constexpr std::int64_t kShardRows = 50;
  constexpr int kShards = 3;
  for (std::int32_t row_bytes : {102, 61, 320}) {
    for (std::size_t shift : {0u, 1u, 2u}) {
      const std::vector<std::byte> table =
          random.bytes(z(kShards * kShardRows) * z(row_bytes) + shift);
      std::vector<std::int64_t> ids(33 * 16);
      for (std::int64_t& id : ids) id = random.below(kShards * kShardRows);
      Stream stream(*cuda);
      // In mapped pinned memory, as the engine keeps it.
      Block pinned(*cuda, Space::kPinned, table.size(), "table");
      std::memcpy(pinned.data(), table.data(), table.size());
      const std::byte* shards[kShards];
      for (int s = 0; s < kShards; ++s) {
        shards[s] = pinned.as<std::byte>() + shift + z(s * kShardRows) * z(row_bytes);
      }
      const StepHead head{33, 0, 0, 0};
      Upload head_at(*cuda, stream.id(), &head, sizeof head);
      Upload shards_at(*cuda, stream.id(), shards, sizeof shards);
      Upload ids_at(*cuda, stream.id(), ids.data(), ids.size() * 8);
      std::vector<std::byte> want(ids.size() * z(row_bytes));
      Upload packed(*cuda, stream.id(), want.data(), want.size());
      NgramGatherArgs a{{&static_cast<StepHead*>(head_at.data())->rows, 1, 40},
                        static_cast<std::int64_t*>(ids_at.data()),
                        static_cast<const std::byte* const*>(shards_at.data()),
                        static_cast<std::byte*>(packed.data()),
                        kShardRows,
                        kShards * kShardRows,
                        16,
                        row_bytes};
      launch(*cuda, stream.id(), a);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        std::memcpy(want.data() + i * z(row_bytes), table.data() + shift + z(ids[i]) * z(row_bytes),
                    z(row_bytes));
      }
      EXPECT_EQ(packed.read(*cuda, stream.id()), want) << row_bytes << " bytes, shift " << shift;
    }
  }
}
