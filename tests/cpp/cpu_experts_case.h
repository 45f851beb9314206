// Experts in host memory, a mailbox, and a device's side of it, for the tests of the processor's
// workers.
#pragma once

#include "cpp/base/math.h"
#include "cpp/cache/cpu_experts.h"
#include "cpp/device/host_ops.h"
#include "tests/cpp/exl3_case.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace flashnext::cpu_test {

using exl3::Isa;
using exl3_test::isas;
using exl3_test::Linear;

struct Sizes {
  std::int32_t dim = 256;
  std::int32_t inner = 128;
  std::int32_t words[3] = {48, 48, 48};
  std::int32_t layers = 2;
  std::int32_t experts = 12;
  std::int32_t slots = 4;
  std::int32_t rows = kDecodeRows;
  std::int32_t pairs() const { return rows * slots; }
};

struct Experts {
  explicit Experts(const Sizes& s) : sizes(s) {
    for (std::int32_t i = 0; i < s.layers * s.experts; ++i) {
      for (int p = 0; p < 3; ++p) {
        const std::int32_t in = p == 2 ? s.inner : s.dim;
        const std::int32_t out = p == 2 ? s.dim : s.inner;
        const unsigned seed = static_cast<unsigned>(3 * i + p);
        linears.push_back(exl3_test::random_linear(in, out, s.words[p], seed));
      }
    }
    refs.resize(static_cast<std::size_t>(s.layers * s.experts));
    for (std::size_t i = 0; i < refs.size(); ++i) {
      for (std::size_t p = 0; p < 3; ++p) {
        const Exl3Weight& w = linears[3 * i + p].w;
        refs[i].trellis[p] = w.trellis;
        refs[i].suh[p] = w.suh;
        refs[i].svh[p] = w.svh;
      }
    }
  }

  std::vector<cache::LayerExperts> layers() const {
    std::vector<cache::LayerExperts> all;
    const std::size_t n = static_cast<std::size_t>(sizes.experts);
    for (std::size_t i = 0; i < static_cast<std::size_t>(sizes.layers); ++i) {
      cache::LayerExperts l{std::span(refs).subspan(i * n, n), {}};
      std::copy_n(sizes.words, 3, l.words);
      all.push_back(l);
    }
    return all;
  }

  // One row of an expert, straight from the formulas of the spec.
  std::vector<float> formula(std::int32_t layer, std::int32_t e, const float* x) const {
    const auto linear = [&](int p, const float* from) {
      const Exl3Weight& w =
          linears[static_cast<std::size_t>(3 * (layer * sizes.experts + e) + p)].w;
      return exl3_test::linear_row(w, exl3_test::byte_sums(w), from, exl3::kLevels);
    };
    std::vector<float> h = linear(0, x);
    const std::vector<float> up = linear(1, x);
    for (std::size_t i = 0; i < h.size(); ++i) h[i] = math::silu(h[i]) * up[i];
    return linear(2, h.data());
  }

  Sizes sizes;
  std::vector<Linear> linears;
  std::vector<ExpertRef> refs;
};

// Memory of a mailbox and what cpu_post and cpu_join read.
struct Desk {
  explicit Desk(const Sizes& s, Isa with = Isa::kScalar)
      : sizes(s), context{pool, with}, jobs(static_cast<std::size_t>(s.pairs())) {
    x.resize(static_cast<std::size_t>(s.rows * s.dim));
    y.resize(static_cast<std::size_t>(s.pairs() * s.dim));
    ids.resize(static_cast<std::size_t>(s.pairs()));
    cpu.resize(static_cast<std::size_t>(s.experts));
  }

  MailView mail() {
    if (mail_x.empty()) {
      mail_x.resize(x.size());
      mail_y.resize(y.size());
    }
    return {&head, jobs.data(), mail_x.data(), mail_y.data()};
  }
  cache::CpuShape shape() const {
    return {sizes.dim, sizes.inner, sizes.slots, exl3::kLevels, sizes.pairs()};
  }

  // A random step: distinct experts a row, `experts` of those in use go to the processor.
  void draw(std::mt19937& random, std::int32_t step_rows, std::int32_t experts) {
    rows = step_rows;
    for (float& v : x) v = normal(random);
    std::vector<std::int32_t> all(static_cast<std::size_t>(sizes.experts));
    std::iota(all.begin(), all.end(), 0);
    std::vector<std::int32_t> used;
    for (std::int32_t r = 0; r < rows; ++r) {
      std::shuffle(all.begin(), all.end(), random);
      std::copy_n(all.begin(), sizes.slots, ids.begin() + r * sizes.slots);
      used.insert(used.end(), all.begin(), all.begin() + sizes.slots);
    }
    std::sort(used.begin(), used.end());
    used.erase(std::unique(used.begin(), used.end()), used.end());
    std::shuffle(used.begin(), used.end(), random);
    num_cpu = std::min(experts, static_cast<std::int32_t>(used.size()));
    std::copy_n(used.begin(), num_cpu, cpu.begin());
    std::fill(y.begin(), y.end(), -7.0f);
  }

  void post(std::int32_t layer) {
    CpuPostArgs a{};
    a.rows = {&rows, 1, sizes.rows};
    a.x = x.data();
    a.ids = ids.data();
    a.cpu = cpu.data();
    a.num_cpu = &num_cpu;
    a.sequence = &sequence;
    a.mail = mail();
    a.layer = layer;
    a.slots = sizes.slots;
    a.dim = sizes.dim;
    host::cpu_post(a, context);
  }
  void join(std::int32_t layer, std::int64_t deadline_ns = 60'000'000'000) {
    CpuJoinArgs a{};
    a.num_cpu = &num_cpu;
    a.sequence = &sequence;
    a.mail = mail();
    a.y = y.data();
    a.counters = &counters;
    a.deadline_ns = deadline_ns;
    a.layer = layer;
    a.dim = sizes.dim;
    host::cpu_join(a, context);
  }

  // What the op experts makes of the same step: pairs of the processor's experts, -7 elsewhere.
  std::vector<float> expected(const Experts& e, std::int32_t layer) {
    std::vector<std::int32_t> group(static_cast<std::size_t>(sizes.experts), kGroupHit);
    for (std::int32_t i = 0; i < num_cpu; ++i) {
      group[static_cast<std::size_t>(cpu[static_cast<std::size_t>(i)])] = kGroupCpu;
    }
    std::vector<float> out(y.size(), -7.0f);
    ExpertsArgs a{};
    a.rows = {&rows, 1, sizes.rows};
    a.x = x.data();
    a.ids = ids.data();
    a.experts = e.refs.data() + layer * sizes.experts;
    a.y = out.data();
    a.num_experts = sizes.experts;
    a.slots = sizes.slots;
    a.dim = sizes.dim;
    a.inner = sizes.inner;
    std::copy_n(sizes.words, 3, a.words);
    a.levels = exl3::kLevels;
    a.group = group.data();
    a.only = kGroupCpu;
    exl3_test::AlignedBytes memory(host::workspace_bytes(a, 1));
    a.workspace = {static_cast<std::byte*>(memory.data()), host::workspace_bytes(a, 1)};
    host::experts(a, context);
    return out;
  }

  std::int32_t jobs_posted() const {
    std::int32_t n = 0;
    for (std::int32_t i = 0; i < num_cpu; ++i) {
      n += static_cast<std::int32_t>(std::count(ids.begin(), ids.begin() + rows * sizes.slots,
                                                cpu[static_cast<std::size_t>(i)]));
    }
    return n;
  }

  Sizes sizes;
  ThreadPool pool{1};
  host::Context context;
  MailboxHead head{};
  std::vector<MailJob> jobs;
  std::vector<float> mail_x, mail_y;
  std::vector<float> x;                // (rows, dim)
  std::vector<float> y;                // (rows, slots, dim)
  std::vector<std::int32_t> ids, cpu;  // (rows, slots), (experts)
  std::normal_distribution<float> normal;
  std::int32_t rows = 0;
  std::int32_t num_cpu = 0;
  MailSequence sequence{};
  CacheCounters counters{};
};

inline cache::CpuOptions with(int threads, Isa isa = exl3::best_isa()) {
  cache::CpuOptions o;
  o.threads = threads;
  o.isa = isa;
  return o;
}

}  // namespace flashnext::cpu_test
