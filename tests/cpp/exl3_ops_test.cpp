// The ops exl3_linear and experts of the host: the same bits as the scalar linear of each row
// alone, whatever the threads, the instruction set, the rows of the step and their grouping.
#include "cpp/base/errors.h"
#include "cpp/base/math.h"
#include "cpp/device/host_ops.h"
#include "exl3_case.h"

#include <gtest/gtest.h>

namespace flashnext {
namespace {

using namespace exl3_test;
using exl3::Isa;

// Runs with exactly the workspace that the op asks for, and checks that it stays inside.
template <class Args, class Run>
void run_op(Args args, int threads, Isa isa, Run run) {
  ThreadPool pool(threads);
  host::Context context{pool, isa};
  const std::size_t bytes = host::workspace_bytes(args, threads);
  AlignedBytes memory(bytes + 256);
  std::byte* data = static_cast<std::byte*>(memory.data());
  std::fill(data, data + bytes + 256, std::byte{0xC5});
  args.workspace = {data, bytes};
  run(args, context);
  for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(data[bytes + i], std::byte{0xC5});
}

TEST(Exl3Ops, LinearsOfOneInput) {
  const std::int32_t in = 384;
  std::vector<Linear> linears;
  linears.push_back(random_linear(in, 640, 48, 1, 1));
  linears.push_back(random_linear(in, 128, 80, 2, 3, true));
  linears.push_back(random_linear(in, 256, 40, 3, 0));
  const std::int32_t max_rows = 140;
  const std::vector<float> x = random_rows(max_rows, in, 4);
  for (const std::int32_t levels : {exl3::kLevels, exl3::kLevelsOneDigit}) {
    std::vector<std::vector<float>> expected;
    for (const Linear& l : linears) {
      std::vector<float> y;
      for (std::int32_t r = 0; r < max_rows; ++r) {
        const std::vector<float> row = ours(l.w, x.data() + r * in, 1, levels, Isa::kScalar);
        y.insert(y.end(), row.begin(), row.end());
      }
      expected.push_back(y);
    }
    for (const Isa isa : isas()) {
      for (const int threads : {1, 2, 3}) {
        for (const std::int32_t rows : {0, 1, 2, 7, 140}) {
          Exl3LinearArgs args{};
          args.rows = {&rows, 1, max_rows};
          args.x = x.data();
          args.n = 3;
          args.levels = levels;
          std::vector<std::vector<float>> y(3);
          for (std::size_t i = 0; i < 3; ++i) {
            args.w[i] = linears[i].w;
            y[i].assign(static_cast<std::size_t>(max_rows) * args.w[i].out, -7.0f);
            args.y[i] = y[i].data();
          }
          run_op(args, threads, isa,
                 [](const Exl3LinearArgs& a, host::Context& c) { host::exl3_linear(a, c); });
          for (std::size_t i = 0; i < 3; ++i) {
            const std::size_t n = static_cast<std::size_t>(rows) * args.w[i].out;
            ASSERT_TRUE(same_bits(expected[i].data(), y[i].data(), n))
                << exl3::to_string(isa) << " rows " << rows << " linear " << i;
            for (std::size_t k = n; k < y[i].size(); ++k) ASSERT_EQ(y[i][k], -7.0f);
          }
        }
      }
    }
  }
}

struct Bank {
  static constexpr std::int32_t kDim = 256, kInner = 128;
  std::vector<Linear> parts;  // gate, up, down of each expert
  std::vector<ExpertRef> refs;

  explicit Bank(int experts) {
    const std::int32_t words[3] = {48, 48, 40};
    for (int e = 0; e < experts; ++e) {
      ExpertRef ref{};
      for (std::size_t i = 0; i < 3; ++i) {
        const unsigned seed = static_cast<unsigned>(3 * e) + static_cast<unsigned>(i);
        parts.push_back(i == 2 ? random_linear(kInner, kDim, words[i], seed)
                               : random_linear(kDim, kInner, words[i], seed));
      }
      refs.push_back(ref);
    }
    for (std::size_t e = 0; e < refs.size(); ++e) {
      for (std::size_t i = 0; i < 3; ++i) {
        refs[e].trellis[i] = parts[3 * e + i].w.trellis;
        refs[e].suh[i] = parts[3 * e + i].w.suh;
        refs[e].svh[i] = parts[3 * e + i].w.svh;
      }
    }
  }

  // Expert e of one row, by its definition.
  std::vector<float> row(int e, const float* x, std::int32_t levels) const {
    const auto linear = [&](int i, const float* from) {
      return ours(parts[static_cast<std::size_t>(3 * e + i)].w, from, 1, levels, Isa::kScalar);
    };
    std::vector<float> h = linear(0, x);
    const std::vector<float> up = linear(1, x);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] = math::silu(h[i]) * up[i];
    return linear(2, h.data());
  }
};

TEST(Exl3Ops, Experts) {
  const int experts = 9;
  const Bank bank(experts);
  const std::int32_t slots = 4;
  const std::int32_t max_rows = 140;  // 560 pairs: more than one batch
  const std::vector<float> x = random_rows(max_rows, Bank::kDim, 5);
  std::mt19937 random(6);
  std::vector<std::int32_t> ids;
  for (std::int32_t r = 0; r < max_rows; ++r) {
    std::vector<std::int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    std::shuffle(all.begin(), all.end(), random);
    if (r % 3 != 0)
      std::iter_swap(all.begin(), std::find(all.begin(), all.end(), 5));  // a favourite
    ids.insert(ids.end(), all.begin(), all.begin() + slots);
  }
  for (const bool routed : {true, false}) {
    std::vector<float> expected;
    for (std::int32_t r = 0; r < max_rows; ++r) {
      for (std::int32_t s = 0; s < slots; ++s) {
        const int e = routed ? ids[static_cast<std::size_t>(r * slots + s)] : s;
        const std::vector<float> y = bank.row(e, x.data() + r * Bank::kDim, exl3::kLevels);
        expected.insert(expected.end(), y.begin(), y.end());
      }
    }
    for (const Isa isa : isas()) {
      for (const int threads : {1, 2}) {
        for (const std::int32_t rows : {0, 1, 2, 5, 40, 140}) {
          ExpertsArgs args{};
          args.rows = {&rows, 1, max_rows};
          args.x = x.data();
          args.ids = routed ? ids.data() : nullptr;
          args.experts = bank.refs.data();
          args.num_experts = experts;
          args.slots = slots;
          args.dim = Bank::kDim;
          args.inner = Bank::kInner;
          args.words[0] = args.words[1] = 48;
          args.words[2] = 40;
          args.levels = exl3::kLevels;
          std::vector<float> y(expected.size(), -7.0f);
          args.y = y.data();
          run_op(args, threads, isa,
                 [](const ExpertsArgs& a, host::Context& c) { host::experts(a, c); });
          const std::size_t n = static_cast<std::size_t>(rows * slots * Bank::kDim);
          ASSERT_TRUE(same_bits(expected.data(), y.data(), n))
              << exl3::to_string(isa) << " threads " << threads << " rows " << rows;
          for (std::size_t k = n; k < y.size(); ++k) ASSERT_EQ(y[k], -7.0f);
        }
      }
    }
  }
}

// Complementary groups, each with a table that has only its own experts.
TEST(Exl3Ops, ExpertsOfAGroup) {
  const int experts = 9;
  const Bank bank(experts);
  const std::int32_t slots = 4;
  const std::int32_t max_rows = 140;
  const std::vector<float> x = random_rows(max_rows, Bank::kDim, 5);
  const std::int32_t group[experts] = {0, 1, 0, 2, 1, 0, 1, 1, 0};  // nobody is in 3
  std::mt19937 random(6);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(max_rows * slots));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % experts);
  std::vector<std::vector<float>> expected;
  for (std::size_t p = 0; p < ids.size(); ++p) {
    const std::size_t row = p / static_cast<std::size_t>(slots);
    expected.push_back(bank.row(ids[p], x.data() + row * Bank::kDim, exl3::kLevels));
  }
  for (const std::int32_t rows : {1, 3, 140}) {
    for (const std::int32_t only : {0, 1, 2, 3}) {
      std::vector<ExpertRef> refs = bank.refs;
      for (std::size_t e = 0; e < refs.size(); ++e) {
        if (group[e] != only) refs[e] = {};
      }
      const std::size_t pairs = static_cast<std::size_t>(rows * slots);
      std::int32_t in_group = 0;
      for (std::size_t p = 0; p < pairs; ++p) in_group += group[ids[p]] == only ? 1 : 0;
      ExpertsArgs args{};
      args.rows = {&rows, 1, max_rows};
      args.x = x.data();
      args.ids = ids.data();
      args.experts = refs.data();
      args.num_experts = experts;
      args.slots = slots;
      args.dim = Bank::kDim;
      args.inner = Bank::kInner;
      args.words[0] = args.words[1] = 48;
      args.words[2] = 40;
      args.levels = exl3::kLevels;
      args.group = group;
      args.only = only;
      args.max_pairs = std::max(in_group, 1);
      const std::size_t dim = Bank::kDim;
      std::vector<float> y(ids.size() * dim, -7.0f);
      const std::vector<float> untouched(dim, -7.0f);
      args.y = y.data();
      run_op(args, 2, exl3::best_isa(),
             [](const ExpertsArgs& a, host::Context& c) { host::experts(a, c); });
      for (std::size_t p = 0; p < ids.size(); ++p) {
        const bool is_in = p < pairs && group[ids[p]] == only;
        const std::vector<float>& want = is_in ? expected[p] : untouched;
        ASSERT_TRUE(same_bits(want.data(), y.data() + p * dim, dim))
            << rows << " rows, group " << only << ", pair " << p;
      }
      if (in_group < 2) continue;
      args.max_pairs = in_group - 1;
      run_op(args, 2, exl3::best_isa(), [](const ExpertsArgs& a, host::Context& c) {
        EXPECT_THROW(host::experts(a, c), LogicError);
      });
    }
  }
}

TEST(Exl3Ops, WrongCallsAreLogicErrors) {
  const Bank bank(2);
  const std::int32_t rows = 1;
  const std::int32_t id = 2;
  const std::vector<float> x = random_rows(1, Bank::kDim, 5);
  std::vector<float> y(Bank::kDim);
  ExpertsArgs args{};
  args.rows = {&rows, 1, 1};
  args.x = x.data();
  args.ids = &id;
  args.experts = bank.refs.data();
  args.y = y.data();
  args.num_experts = 2;
  args.slots = 1;
  args.dim = Bank::kDim;
  args.inner = Bank::kInner;
  args.words[0] = args.words[1] = 48;
  args.words[2] = 40;
  args.levels = exl3::kLevels;
  run_op(args, 1, Isa::kScalar, [](ExpertsArgs a, host::Context& c) {
    EXPECT_THROW(host::experts(a, c), LogicError);  // id outside the bank
    const std::int32_t good = 1;
    a.ids = &good;
    EXPECT_NO_THROW(host::experts(a, c));
    a.workspace.bytes -= 1;
    EXPECT_THROW(host::experts(a, c), LogicError);
  });
}

}  // namespace
}  // namespace flashnext
