// The expert op on the GPU against the host, bit for bit: decode and prefill, repeated and single
// experts, the shared expert, groups of experts, real dimensions with ten of 512.
#include "exl3_gpu_case.h"

#include <algorithm>
#include <numeric>
#include <string>

namespace flashnext {
namespace {

using namespace exl3_case;

struct Bank {
  std::vector<Weight> gate, up, down;
  Twin<ExpertRef> refs;
  std::vector<ExpertRef> host_refs;
  std::int32_t dim, inner, words[3];

  // `distinct` weights under num_experts ids.
  Bank(std::int32_t num_experts, std::int32_t distinct, std::int32_t dim, std::int32_t inner,
       std::int32_t gate_words, std::int32_t up_words, std::int32_t down_words,
       std::mt19937& random)
      : refs(static_cast<std::size_t>(num_experts)),
        dim(dim),
        inner(inner),
        words{gate_words, up_words, down_words} {
    for (std::int32_t e = 0; e < distinct; ++e) {
      gate.emplace_back(dim, inner, gate_words, random);
      up.emplace_back(dim, inner, up_words, random);
      down.emplace_back(inner, dim, down_words, random);
    }
    for (std::int32_t e = 0; e < num_experts; ++e) {
      const std::size_t at = static_cast<std::size_t>(e);
      const std::size_t g = at % gate.size();
      const std::size_t u = at / 3 % gate.size();
      const std::size_t d = at / 7 % gate.size();
      refs.host[at] = {{gate[g].trellis.device(), up[u].trellis.device(), down[d].trellis.device()},
                       {gate[g].suh.device(), up[u].suh.device(), down[d].suh.device()},
                       {gate[g].svh.device(), up[u].svh.device(), down[d].svh.device()}};
      host_refs.push_back(
          {{gate[g].trellis.host.data(), up[u].trellis.host.data(), down[d].trellis.host.data()},
           {gate[g].suh.host.data(), up[u].suh.host.data(), down[d].suh.host.data()},
           {gate[g].svh.host.data(), up[u].svh.host.data(), down[d].svh.host.data()}});
    }
    refs.upload();
  }
};

class ExpertsGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << "no CUDA device";
  }

  // ids empty: null. shared: a bank of one, or null. groups: experts fall into so many groups, and
  // only the pairs of one are computed; 0: all pairs.
  std::vector<float> check_experts(const Bank& bank, const std::vector<std::int32_t>& ids,
                                   std::int32_t rows, std::int32_t max, std::int32_t slots,
                                   std::int32_t levels, const std::string& what,
                                   const Bank* shared = nullptr, std::int32_t groups = 0,
                                   std::uint32_t seed = 5) {
    std::mt19937 numbers(seed);
    const std::size_t dim = static_cast<std::size_t>(bank.dim);
    const std::size_t pairs = static_cast<std::size_t>(max * slots);
    Twin<std::int32_t> count(1);
    count.host[0] = rows;
    count.upload();
    Twin<float> x(static_cast<std::size_t>(max) * dim);
    fill_normal(x.host, numbers);
    x.upload();
    Twin<std::int32_t> id(pairs);
    std::copy(ids.begin(), ids.end(), id.host.begin());
    id.upload();
    Twin<float> y(pairs * dim);
    poison(y.host);
    y.upload();
    Twin<float> shared_y(static_cast<std::size_t>(max) * dim);
    poison(shared_y.host);
    shared_y.upload();
    ExpertsArgs on_host{};
    on_host.rows = {count.host.data(), 1, max};
    on_host.x = x.host.data();
    on_host.ids = ids.empty() ? nullptr : id.host.data();
    on_host.experts = bank.host_refs.data();
    on_host.y = y.host.data();
    on_host.num_experts = static_cast<std::int32_t>(bank.host_refs.size());
    on_host.slots = slots;
    on_host.dim = bank.dim;
    on_host.inner = bank.inner;
    std::copy_n(bank.words, 3, on_host.words);
    on_host.levels = levels;
    if (shared != nullptr) {
      on_host.shared = shared->host_refs.data();
      on_host.shared_y = shared_y.host.data();
      on_host.shared_inner = shared->inner;
      std::copy_n(shared->words, 3, on_host.shared_words);
    }
    Twin<std::int32_t> group(bank.host_refs.size());
    if (groups > 0) {
      const std::int32_t only = 3;
      std::int32_t in_group = 0;
      for (std::int32_t& g : group.host)
        g = only + static_cast<std::int32_t>(numbers() % static_cast<unsigned>(groups));
      for (std::int32_t p = 0; p < rows * slots; ++p) {
        const std::size_t at = static_cast<std::size_t>(p);
        const std::int32_t expert = ids.empty() ? p % slots : ids[at];
        if (group.host[static_cast<std::size_t>(expert)] == only) ++in_group;
      }
      group.upload();
      on_host.group = group.host.data();
      on_host.only = only;
      on_host.max_pairs = std::max(in_group, 1);
    }
    ExpertsArgs on_device = on_host;
    if (groups > 0) on_device.group = group.device();
    on_device.rows.count = count.device();
    on_device.x = x.device();
    if (!ids.empty()) on_device.ids = id.device();
    on_device.experts = bank.refs.device();
    on_device.y = y.device();
    if (shared != nullptr) {
      on_device.shared = shared->refs.device();
      on_device.shared_y = shared_y.device();
    }
    HostSide& side = host_side();
    std::vector<std::byte> scratch(host::workspace_bytes(on_host, side.pool.threads()) + 64);
    on_host.workspace = {scratch.data(), scratch.size()};
    host::experts(on_host, side.context);
    const DeviceScratch device_scratch(cuda::workspace_bytes(on_device));
    on_device.workspace = device_scratch.workspace();
    run_on_device(cuda::experts, on_device);
    std::vector<float> result = y.download();
    expect_same_bits(result, y.host, bank.dim, what.c_str());
    expect_same_bits(shared_y.download(), shared_y.host, bank.dim, ("shared, " + what).c_str());
    return result;
  }

  // `slots` different experts a row.
  std::vector<std::int32_t> pick(std::int32_t rows, std::int32_t slots, std::int32_t experts) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(experts));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::int32_t> ids;
    for (std::int32_t r = 0; r < rows; ++r) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + slots);
    }
    return ids;
  }

  std::mt19937 random{77};
};

TEST_F(ExpertsGpu, RowCountsAndRates) {
  for (std::int32_t words : {48, 80, 40}) {
    const Bank bank(16, 5, 384, 256, words, words, words, random);
    for (std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
      for (std::int32_t rows : {1, 2, 5, 8, 9, 12, 17, 32, 33, 64, 300}) {
        check_experts(bank, pick(rows, 4, 16), rows, rows, 4, levels,
                      "rows " + std::to_string(rows));
      }
    }
  }
}

TEST_F(ExpertsGpu, DifferentRatesOfGateUpAndDown) {
  const Bank bank(6, 6, 256, 128, 48, 64, 80, random);
  for (std::int32_t rows : {1, 6, 30}) {
    check_experts(bank, pick(rows, 3, 6), rows, rows, 3, exl3::kLevels, "mixed rates");
  }
}

TEST_F(ExpertsGpu, FewerRowsThanTheBucket) {
  const Bank bank(16, 4, 256, 128, 48, 48, 48, random);
  for (std::int32_t rows : {0, 1, 3}) {
    for (std::int32_t bucket : {8, 12, 32, 100}) {
      check_experts(bank, pick(bucket, 4, 16), rows, bucket, 4, exl3::kLevels,
                    "bucket of " + std::to_string(bucket));
    }
  }
}

TEST_F(ExpertsGpu, AllRowsTheSameExpert) {
  const Bank bank(8, 8, 256, 128, 48, 48, 48, random);
  for (std::int32_t rows : {8, 9, 32, 300}) {
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * 4), 5);
    check_experts(bank, ids, rows, rows, 4, exl3::kLevels, "one expert, also in every slot");
  }
}

TEST_F(ExpertsGpu, RepeatedIdsInADecodeStep) {
  const Bank bank(4, 4, 256, 128, 48, 48, 48, random);
  for (std::int32_t rows : {3, 8, 9, 32}) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * 10));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 4);
    check_experts(bank, ids, rows, rows, 10, exl3::kLevels, "ten slots of four experts");
    check_experts(bank, ids, rows, rows, 10, exl3::kLevelsOneDigit,
                  "ten slots of four experts, one digit");
  }
}

// More pairs than units take go through the GEMM.
TEST_F(ExpertsGpu, ManySlots) {
  const Bank bank(40, 6, 256, 128, 48, 48, 48, random);
  for (std::int32_t rows : {9, 16, 20, 32}) {
    check_experts(bank, pick(rows, 30, 40), rows, rows, 30, exl3::kLevels, "thirty slots");
  }
}

TEST_F(ExpertsGpu, SlotsAreExpertsWithoutIds) {
  const Bank shared(1, 1, 640, 256, 80, 80, 80, random);
  const Bank three(3, 3, 256, 128, 48, 48, 48, random);
  for (std::int32_t rows : {1, 8, 9, 32, 200}) {
    check_experts(shared, {}, rows, rows, 1, exl3::kLevels, "shared expert");
    check_experts(three, {}, rows, rows, 3, exl3::kLevels, "three shared experts");
  }
}

TEST_F(ExpertsGpu, SharedExpertBesideRoutedOnes) {
  const Bank bank(16, 5, 384, 256, 48, 64, 48, random);
  const Bank same_width(1, 1, 384, 256, 80, 64, 40, random);
  const Bank other_width(1, 1, 384, 128, 80, 80, 80, random);
  for (std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
    for (std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 64, 200}) {
      const std::vector<std::int32_t> ids = pick(rows, 4, 16);
      const std::string what = std::to_string(rows) + " rows";
      check_experts(bank, ids, rows, rows, 4, levels, what, &same_width);
      check_experts(bank, ids, rows, rows, 4, levels, what + ", other width", &other_width);
    }
  }
  for (std::int32_t rows : {0, 1, 5}) {
    check_experts(bank, pick(8, 4, 16), rows, 8, 4, exl3::kLevels, "bucket of 8", &same_width);
    check_experts(bank, pick(32, 4, 16), rows, 32, 4, exl3::kLevels, "bucket of 32", &same_width);
  }
}

TEST_F(ExpertsGpu, PairsOfAGroup) {
  const Bank bank(16, 5, 384, 256, 48, 64, 48, random);
  const Bank same_width(1, 1, 384, 256, 80, 64, 40, random);
  const Bank other_width(1, 1, 384, 128, 80, 80, 80, random);
  for (std::int32_t groups : {1, 2, 20}) {
    for (std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 64, 200, 1000}) {
      const std::vector<std::int32_t> ids = pick(rows, 4, 16);
      const std::string what =
          std::to_string(rows) + " rows, one of " + std::to_string(groups) + " groups";
      check_experts(bank, ids, rows, rows, 4, exl3::kLevels, what, nullptr, groups);
      check_experts(bank, ids, rows, rows, 4, exl3::kLevels, what, &same_width, groups);
      check_experts(bank, ids, rows, rows, 4, exl3::kLevels, what, &other_width, groups);
      check_experts(bank, {}, rows, rows, 4, exl3::kLevels, what + ", no ids", nullptr, groups);
    }
  }
  for (std::int32_t rows : {0, 1, 5}) {
    check_experts(bank, pick(8, 4, 16), rows, 8, 4, exl3::kLevels, "bucket of 8", nullptr, 2);
    check_experts(bank, pick(32, 4, 16), rows, 32, 4, exl3::kLevels, "bucket of 32", nullptr, 2);
    check_experts(bank, pick(90, 4, 16), rows, 90, 4, exl3::kLevels, "bucket of 90", nullptr, 2);
  }
}

TEST_F(ExpertsGpu, PairsOfAGroupInSeveralChunks) {
  const Bank bank(64, 8, 128, 128, 48, 48, 48, random);
  check_experts(bank, pick(3000, 10, 64), 3000, 3000, 10, exl3::kLevels, "about 15,000 pairs",
                nullptr, 2);
}

// Neither lines nor scales of an expert outside the group are touched: they may not even exist.
TEST_F(ExpertsGpu, ExpertsOutsideTheGroupMayBeAbsent) {
  Bank bank(16, 5, 384, 256, 48, 48, 48, random);
  std::vector<std::int32_t> group(16);
  for (std::size_t e = 0; e < 16; ++e) {
    group[e] = static_cast<std::int32_t>(e % 2);
    if (group[e] == 0) bank.refs.host[e] = bank.host_refs[e] = ExpertRef{};
  }
  bank.refs.upload();
  Twin<std::int32_t> on_card(16);
  on_card.host = group;
  on_card.upload();
  for (std::int32_t rows : {1, 8, 9, 32, 64}) {
    const std::size_t n = static_cast<std::size_t>(rows);
    Twin<std::int32_t> count(1), ids(n * 4);
    count.host[0] = rows;
    ids.host = pick(rows, 4, 16);
    Twin<float> x(n * 384), y(n * 4 * 384);
    fill_normal(x.host, random);
    poison(y.host);
    count.upload();
    ids.upload();
    x.upload();
    y.upload();
    ExpertsArgs args{};
    args.rows = {count.host.data(), 1, rows};
    args.x = x.host.data();
    args.ids = ids.host.data();
    args.experts = bank.host_refs.data();
    args.y = y.host.data();
    args.num_experts = 16;
    args.slots = 4;
    args.dim = 384;
    args.inner = 256;
    std::copy_n(bank.words, 3, args.words);
    args.levels = exl3::kLevels;
    args.group = group.data();
    args.only = 1;
    HostSide& side = host_side();
    std::vector<std::byte> scratch(host::workspace_bytes(args, side.pool.threads()) + 64);
    args.workspace = {scratch.data(), scratch.size()};
    host::experts(args, side.context);
    const DeviceScratch device_scratch(cuda::workspace_bytes(args));
    args.rows.count = count.device();
    args.x = x.device();
    args.ids = ids.device();
    args.experts = bank.refs.device();
    args.group = on_card.device();
    args.y = y.device();
    args.workspace = device_scratch.workspace();
    run_on_device(cuda::experts, args);
    expect_same_bits(y.download(), y.host, 384, std::to_string(rows).c_str());
  }
}

TEST_F(ExpertsGpu, TenOf512AndSharedAtModelSize) {
  const Bank bank(512, 9, 2560, 640, 48, 48, 48, random);
  const Bank shared(1, 1, 2560, 640, 80, 80, 80, random);
  for (std::int32_t rows : {1, 2, 4, 5, 8, 9, 16, 32}) {
    check_experts(bank, pick(rows, 10, 512), rows, rows, 10, exl3::kLevels,
                  std::to_string(rows) + " rows", &shared);
  }
}

TEST_F(ExpertsGpu, TenOf512AtModelSize) {
  const Bank bank(512, 9, 2560, 640, 48, 48, 48, random);
  check_experts(bank, pick(1, 10, 512), 1, 1, 10, exl3::kLevels, "one row");
  check_experts(bank, pick(8, 10, 512), 8, 8, 10, exl3::kLevels, "eight rows");
  check_experts(bank, pick(30, 10, 512), 30, 30, 10, exl3::kLevels, "30 rows");
}

// More pairs than one chunk of the workspace holds; small experts keep the host quick.
TEST_F(ExpertsGpu, PairsInSeveralChunks) {
  const Bank bank(64, 8, 128, 128, 48, 48, 48, random);
  check_experts(bank, pick(1900, 10, 64), 1900, 1900, 10, exl3::kLevels, "19,000 pairs");
}

TEST_F(ExpertsGpu, DecodeEqualsPrefill) {
  const Bank bank(32, 6, 512, 256, 48, 48, 48, random);
  const std::vector<std::int32_t> ids = pick(8, 4, 32);
  const std::vector<float> decode = check_experts(bank, ids, 8, 8, 4, exl3::kLevels, "decode");
  std::vector<float> units = check_experts(bank, ids, 8, 24, 4, exl3::kLevels, "units");
  units.resize(decode.size());
  expect_same_bits(units, decode, bank.dim, "units against decode");
  std::vector<float> prefill = check_experts(bank, ids, 8, 90, 4, exl3::kLevels, "prefill");
  // Both draw x from the same seed, so the first eight rows are the same.
  prefill.resize(decode.size());
  expect_same_bits(prefill, decode, bank.dim, "prefill against decode");
}

}  // namespace
}  // namespace flashnext
