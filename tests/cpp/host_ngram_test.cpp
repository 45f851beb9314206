// ngram_hash, ngram_gather and ngram_decode against the worked examples of the specification.
#include "cpp/base/errors.h"
#include "tests/cpp/host_op_case.h"

namespace flashnext {
namespace {

using test::sequence;
using test::TestStep;

TEST(NgramHash, GivesTheRowsOfTheSpecification) {
  NgramHashArgs args{};
  const std::int64_t sizes[16] = {20000003, 20000023, 20000033, 20000047, 20000059, 20000063,
                                  20000069, 20000077, 20000081, 20000093, 20000107, 20000147,
                                  20000153, 20000159, 20000161, 20000171};
  args.multipliers[0] = 23703573157769;
  args.multipliers[1] = 20109073645365;
  args.multipliers[2] = 8052911324071;
  args.heads = 16;
  args.separator = 248044;
  std::int64_t offset = 0;
  for (int i = 0; i < 16; ++i) {
    args.sizes[i] = sizes[i];
    args.offsets[i] = offset;
    offset += sizes[i];
  }
  ASSERT_EQ(offset, 320001446);
  // Worked examples B and C of spec/model.md 6.2: C crosses a separator.
  const std::vector<std::vector<std::int32_t>> sequences = {{0, 248319, 1},
                                                            {100, 248044, 200, 300}};
  const std::vector<std::vector<std::int64_t>> want = {
      {768795,    32189829,  51641306,  71063218,  85886852,  104959504, 134316676, 154856127,
       173280301, 194832882, 202840854, 222492280, 256138797, 271010889, 296240796, 304432235,
       17035305,  37104214,  41553187,  64726037,  94893895,  112558302, 129937787, 148091832,
       170263291, 191853921, 208567818, 236579041, 257464514, 279310953, 293473367, 305886554,
       16280486,  29216785,  49430036,  65923059,  89669123,  105050116, 138870659, 152029436,
       169208075, 183140674, 200606032, 220328252, 246732178, 274034922, 296669014, 311336689},
      {5727835,   21884476,  43702108,  66434789,  84094509,  104112171, 134886528, 157314943,
       162363667, 189466439, 200618315, 232121522, 258547276, 266199001, 289022207, 305180972,
       4253433,   32998227,  51781784,  71019232,  86381762,  105777022, 135752146, 157365741,
       163256257, 190066091, 219539887, 238317874, 241821358, 266286771, 287989078, 318102939,
       15114226,  39594710,  55572462,  70127295,  80775559,  118455748, 125723378, 143475569,
       177805529, 191773675, 200937106, 235341796, 255204161, 276293028, 290261926, 302150093,
       6129193,   20484628,  57667260,  77728366,  86357215,  109234597, 123551585, 149309416,
       160807097, 181150422, 210033058, 220469929, 244412116, 268713397, 296893783, 318393237}};
  ThreadPool pool(1);
  host::Context context{pool, exl3::Isa::kScalar};
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    TestStep step = sequence(sequences[s], args.separator);
    std::vector<std::int64_t> ids(sequences[s].size() * 16);
    args.step = step.view();
    args.ids = ids.data();
    host::ngram_hash(args, context);
    EXPECT_EQ(ids, want[s]);
  }
  TestStep bad = sequence({3, -1}, args.separator);
  std::vector<std::int64_t> ids(2 * 16);
  args.step = bad.view();
  args.ids = ids.data();
  EXPECT_THROW(host::ngram_hash(args, context), InputError);
}

TEST(NgramGather, FindsRowsOverShardsAndRefusesOthers) {
  const std::int32_t rows = 2, heads = 3, row_bytes = 5;
  std::vector<std::byte> shard0(1 + 4 * row_bytes), shard1(4 * row_bytes);  // shard 0 is unaligned
  for (int i = 0; i < 4 * row_bytes; ++i) {
    shard0[1 + i] = static_cast<std::byte>(i);
    shard1[i] = static_cast<std::byte>(100 + i);
  }
  const std::byte* shards[2] = {shard0.data() + 1, shard1.data()};
  const std::vector<std::int64_t> ids = {0, 3, 4, 6, 1, 5};
  test::for_each_context([&](host::Context& context) {
    std::vector<std::byte> packed(ids.size() * row_bytes);
    NgramGatherArgs args{{&rows, 1, rows}, ids.data(), shards, packed.data(), 4, 7, heads,
                         row_bytes};
    host::ngram_gather(args, context);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto first = static_cast<int>(ids[i] < 4 ? ids[i] * 5 : 100 + (ids[i] - 4) * 5);
      EXPECT_EQ(static_cast<int>(packed[i * row_bytes]), first);
      EXPECT_EQ(static_cast<int>(packed[i * row_bytes + 4]), first + 4);
    }
    for (const std::int64_t bad : {std::int64_t{7}, std::int64_t{-1}}) {
      auto wrong = ids;
      wrong[4] = bad;
      args.ids = wrong.data();
      EXPECT_THROW(host::ngram_gather(args, context), InputError);
    }
  });
}

TEST(NgramDecode, GivesTheWorkedExampleAndPlainHalves) {
  // spec/exl3.md 5: K = 5, head 0 without bias; head 1 the same row, bias 0.25.
  const std::int32_t rows = 1, heads = 2, width = 160;
  std::vector<std::uint16_t> packed(2 * 51);
  for (int h = 0; h < 2; ++h) {
    packed[h * 51] = 0x2C00;
    packed[h * 51 + 1] = 0x1234;
    packed[h * 51 + 2] = 0x5678;
    packed[h * 51 + 50] = 0xF00D;
  }
  std::vector<std::uint16_t> bias(2 * width);
  for (int i = 0; i < width; ++i) bias[width + i] = f32_to_f16(0.25f);
  const float want[7] = {0.01300049f,  0.11791992f,  -0.05551147f, 0.05697632f,
                         -0.05508423f, -0.01914978f, -0.02676392f};
  test::for_each_context([&](host::Context& context) {
    std::vector<float> e(2 * width);
    host::ngram_decode({{&rows, 1, 1},
                        reinterpret_cast<const std::byte*>(packed.data()),
                        bias.data(),
                        e.data(),
                        heads,
                        width,
                        5,
                        102},
                       context);
    for (int i = 0; i < 7; ++i) {
      EXPECT_NEAR(e[i], want[i], 5e-9);
      EXPECT_NEAR(e[width + i], want[i] + 0.25, 1.3e-4);
    }
    // An unquantised table: rows of plain halves.
    host::ngram_decode({{&rows, 1, 1},
                        reinterpret_cast<const std::byte*>(packed.data()),
                        bias.data(),
                        e.data(),
                        heads,
                        40,
                        0,
                        80},
                       context);
    EXPECT_EQ(e[0], 0.0625f);
    EXPECT_EQ(e[1], f16_to_f32(0x1234));
  });
}

}  // namespace
}  // namespace flashnext
