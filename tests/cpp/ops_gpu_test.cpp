// Every op of these families on the CUDA device against the host device, and against itself: rows
// alone and together, a larger bucket, a captured graph.
#include "cpp/gate/gate.h"
#include "tests/cpp/conformance.h"

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
  for (std::int32_t rows : {1, 3, 8, 64, 200}) check(mix_case(kReal, rows, MixKind::kPending));
  // Every form of few rows, with and without a pending update.
  for (std::int32_t rows : {1, 2, 4, 5, 8, 9}) {
    check(mix_case(kReal, rows, MixKind::kPlain));
    check(mix_case(kReal, rows, MixKind::kPicked));
  }
  check(mix_case(kReal, 1000, MixKind::kPlain));
}

TEST_F(Ops, MixOfOtherShapes) {
  // Ragged chunks, a hidden row of more than two chunks, other numbers of streams.
  for (std::int32_t rows : {1, 8, 70}) {
    check(mix_case({"2 streams", 2032, 2, 24, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"8 streams", 336, 8, 520, 0, 0, 0, 0, 0}, rows, MixKind::kPending));
    check(mix_case({"1 stream", 48, 1, 8, 0, 0, 0, 0, 0}, rows, MixKind::kPlain));
  }
  // Two kernels: streams of one, two and three pieces, three to eight slices, hidden rows of one,
  // two and three chunks.
  for (std::int32_t rows : {1, 3, 8}) {
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
      check(route_case(d, rows, true, false));
      check(route_case(d, rows, false, true));
      check(combine_case(d, rows));
    }
  }
  check(route_case({"700 experts", 0, 0, 0, 700, 40, 0, 0, 0}, 9, true, true));
}

TEST_F(Ops, RouteReachesEveryExpert) {
  // One logit stands out a row: each expert must be found first, in its row.
  Case c = route_case(kReal, 512, true, false);
  auto* logits = reinterpret_cast<float*>(c.buffers[0].data.data());
  for (std::size_t r = 0; r < 512; ++r) logits[r * 512 + (r * 131) % 512] = 50.0f;
  const Results got = run(*cuda, c);
  for (std::size_t r = 0; r < 512; ++r) {
    std::int32_t id;
    std::memcpy(&id, got[0].data() + r * 10 * 4, 4);
    ASSERT_EQ(id, static_cast<std::int32_t>((r * 131) % 512));
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
