// Experts computed by the processor: the same bits as the op experts whatever the instruction set,
// the threads and the division, and a mailbox that never hangs.
#include "tests/cpp/cpu_experts_case.h"

#include <chrono>
#include <gtest/gtest.h>
#include <thread>
#include <time.h>

namespace flashnext {
namespace {

using cache::CpuExperts;
using cpu_test::Desk;
using cpu_test::Experts;
using cpu_test::isas;
using cpu_test::Sizes;
using cpu_test::with;
using exl3::Isa;
using exl3_test::same_bits;

constexpr std::int64_t kShort = 20'000'000;  // ns

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

std::uint32_t done(Desk& desk) { return std::atomic_ref(desk.head.done).load(); }

// Waits for `what`, ten seconds at most.
template <class What>
bool soon(What&& what) {
  for (int i = 0; i < 10'000; ++i) {
    if (what()) return true;
    sleep_ms(1);
  }
  return false;
}

TEST(CpuExperts, FormulaOfTheSpec) {
  const Sizes sizes;
  const Experts experts(sizes);
  std::mt19937 random(1);
  for (const Isa isa : isas()) {
    Desk desk(sizes);
    CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(2, isa));
    workers.arm();
    desk.draw(random, 1, 2);
    desk.post(1);
    desk.join(1);
    for (std::int32_t slot = 0; slot < sizes.slots; ++slot) {
      const std::int32_t id = desk.ids[static_cast<std::size_t>(slot)];
      const bool posted = std::find(desk.cpu.begin(), desk.cpu.begin() + desk.num_cpu, id) !=
                          desk.cpu.begin() + desk.num_cpu;
      const std::vector<float> y =
          posted ? experts.formula(1, id, desk.x.data()) : std::vector<float>(256, -7.0f);
      EXPECT_TRUE(same_bits(y.data(), desk.y.data() + slot * sizes.dim, y.size()))
          << exl3::to_string(isa) << " slot " << slot;
    }
    workers.disarm();
  }
}

TEST(CpuExperts, BitsOfTheOp) {
  struct Case {
    std::int32_t dim, inner, words[3];
  };
  for (const Case& c :
       {Case{256, 128, {48, 48, 48}}, Case{384, 640, {80, 48, 40}}, Case{128, 256, {24, 56, 64}}}) {
    Sizes sizes;
    sizes.dim = c.dim;
    sizes.inner = c.inner;
    std::copy_n(c.words, 3, sizes.words);
    const Experts experts(sizes);
    for (const Isa isa : isas()) {
      for (const int threads : {1, 2, 7}) {  // 7 divide the inputs of a block
        Desk desk(sizes, exl3::best_isa());
        std::mt19937 random(static_cast<unsigned>(threads));
        CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(threads, isa));
        EXPECT_EQ(workers.threads(), threads);
        workers.arm();
        for (const std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 32}) {
          desk.draw(random, rows, 1 + static_cast<std::int32_t>(random() % 8));
          const std::int32_t layer = static_cast<std::int32_t>(random() % 2);
          desk.post(layer);
          desk.join(layer);
          const std::vector<float> expected = desk.expected(experts, layer);
          ASSERT_TRUE(same_bits(expected.data(), desk.y.data(), expected.size()))
              << exl3::to_string(isa) << " threads " << threads << " rows " << rows;
        }
        workers.disarm();
        EXPECT_EQ(workers.fault(), "");
      }
    }
  }
}

TEST(CpuExperts, ManyPostings) {
  const Sizes sizes;
  const Experts experts(sizes);
  Desk desk(sizes, exl3::best_isa());
  desk.sequence.posted = desk.head.posted = desk.head.done =
      0xFFFFFFF0u;  // it wraps, and 0 is left out
  cache::CpuOptions options = with(3);
  options.linger_ns = 100'000;
  CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), options);
  std::mt19937 random(3);
  std::uint64_t jobs = 0;
  std::uint64_t distinct = 0;
  for (std::uint32_t i = 0; i < 400; ++i) {
    desk.draw(random, 1 + static_cast<std::int32_t>(random() % 8),
              static_cast<std::int32_t>(random() % 12) + 1);
    const std::int32_t layer = static_cast<std::int32_t>(random() % 2);
    workers.arm();
    desk.post(layer);
    desk.join(layer);
    if (random() % 3 == 0) workers.disarm();
    if (random() % 40 == 0) sleep_ms(1);
    jobs += static_cast<std::uint64_t>(desk.jobs_posted());
    distinct += static_cast<std::uint64_t>(desk.num_cpu);
    const std::vector<float> expected = desk.expected(experts, layer);
    ASSERT_TRUE(same_bits(expected.data(), desk.y.data(), expected.size())) << i;
  }
  const cache::CpuCounters c = workers.counters();
  EXPECT_EQ(c.postings, 400u);
  EXPECT_EQ(c.jobs, jobs);
  EXPECT_EQ(c.experts, distinct);
  EXPECT_EQ(c.bytes, distinct * (3 * (256 * 128 * 3 / 8 + 2 * (256 + 128))));
  EXPECT_EQ(c.sequence, desk.sequence.posted);
  EXPECT_EQ(desk.sequence.posted, 400u - 15u);  // 15 steps to 0xFFFFFFFF, then 1
  EXPECT_GT(c.busy_ns, 0u);
  EXPECT_EQ(workers.fault(), "");
}

TEST(CpuExperts, NotFiniteStaysInItsRow) {
  const Sizes sizes;
  const Experts experts(sizes);
  Desk desk(sizes);
  CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(2));
  workers.arm();
  std::mt19937 random(4);
  desk.draw(random, 3, 12);
  desk.x[256 + 5] = std::numeric_limits<float>::infinity();
  desk.post(0);
  desk.join(0);
  for (std::int32_t pair = 0; pair < 12; ++pair) {
    EXPECT_EQ(std::isnan(desk.y[static_cast<std::size_t>(pair * 256)]), pair / 4 == 1) << pair;
  }
}

TEST(CpuExperts, StallFiresTheDeadline) {
  const Sizes sizes;
  const Experts experts(sizes);
  Desk desk(sizes);
  CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(2));
  workers.arm();
  std::mt19937 random(5);
  desk.draw(random, 2, 3);
  desk.post(0);
  desk.join(0);
  workers.stall(true);
  desk.post(1);
  desk.join(1, kShort);
  EXPECT_EQ(desk.head.stalled, 2u);
  EXPECT_EQ(desk.head.stalled_layer, 1);
  EXPECT_EQ(workers.counters().sequence, 1u);
  EXPECT_EQ(workers.fault(), "");
  desk.post(0);  // a stalled mailbox takes no more
  EXPECT_EQ(desk.sequence.posted, 2u);
  workers.stall(false);  // late, and of no consequence
  EXPECT_TRUE(soon([&] { return done(desk) == 2; }));
}

TEST(CpuExperts, WrongPostingsAreFaults) {
  const Sizes sizes;
  Experts experts(sizes);
  experts.refs[3].trellis[1] = nullptr;
  struct Case {
    std::int32_t layer, jobs, expert, pair;
    const char* what;
  };
  for (const Case& c :
       {Case{2, 1, 0, 0, "layer"}, Case{-1, 1, 0, 0, "layer"},
        Case{0, sizes.pairs() + 1, 0, 0, "too many jobs"}, Case{0, 1, 12, 0, "expert"},
        Case{0, 1, 0, sizes.pairs(), "pair"}, Case{0, 1, 3, 0, "not in host memory"}}) {
    Desk desk(sizes);
    desk.num_cpu = 1;
    CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(2));
    workers.arm();
    desk.head.layer = c.layer;
    desk.head.num_jobs = c.jobs;
    desk.jobs[0] = {c.expert, c.pair};
    desk.sequence.posted = 1;
    std::atomic_ref(desk.head.posted).store(1u);
    ASSERT_TRUE(soon([&] { return !workers.fault().empty(); })) << c.what;
    EXPECT_NE(workers.fault().find(c.what), std::string::npos) << workers.fault();
    desk.join(0, kShort);
    EXPECT_EQ(desk.head.stalled, 1u);
    EXPECT_EQ(done(desk), 0u);
  }
}

TEST(CpuExperts, EndsWithAnOpenPosting) {
  Sizes sizes;
  sizes.dim = 1024;
  sizes.inner = 512;
  const Experts experts(sizes);
  Desk desk(sizes, exl3::best_isa());
  std::mt19937 random(6);
  for (int i = 0; i < 20; ++i) {
    desk.draw(random, 8, 12);
    {
      CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(3, Isa::kScalar));
      if (i % 4 == 3) workers.stall(true);
      workers.arm();
      desk.post(0);
      if (i % 2 == 0) sleep_ms(1);
      if (i % 8 == 7) workers.disarm();
    }
    // The next workers find the posting open and compute it.
    CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(2));
    workers.arm();
    desk.join(0);
    const std::vector<float> expected = desk.expected(experts, 0);
    ASSERT_TRUE(same_bits(expected.data(), desk.y.data(), expected.size())) << i;
  }
}

double process_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

TEST(CpuExperts, SleepsWhileDisarmed) {
  const Sizes sizes;
  const Experts experts(sizes);
  Desk desk(sizes, exl3::best_isa());
  CpuExperts workers(desk.mail(), experts.layers(), desk.shape(), with(4));
  std::mt19937 random(7);
  for (int i = 0; i < 3; ++i) {
    workers.arm();
    desk.draw(random, 1, 4);
    desk.post(0);
    desk.join(0);
    workers.disarm();
    sleep_ms(50);
    const double before = process_seconds();
    sleep_ms(200);
    EXPECT_LT(process_seconds() - before, 0.05);
    desk.draw(random, 1, 4);
    desk.post(0);  // nobody looks
    sleep_ms(20);
    EXPECT_NE(done(desk), desk.sequence.posted);
    workers.arm();
    desk.join(0);
    EXPECT_EQ(done(desk), desk.sequence.posted);
  }
}

TEST(CpuExperts, PartsOfTheInputsAddUp) {
  for (const std::int32_t words : {24, 48, 80}) {
    const exl3_test::Linear l = exl3_test::random_linear(640, 256, words, 8);
    const std::vector<float> x = exl3_test::random_rows(9, 640, 9);
    for (const Isa isa : isas()) {
      for (const std::int32_t rows : {1, 3, 9}) {
        const std::vector<float> whole = exl3_test::ours(l.w, x.data(), rows, 127, isa);
        exl3_test::AlignedBytes memory(exl3::prepared_bytes(rows, 640));
        const exl3::Prepared p = exl3::place_prepared(memory.data(), rows, 640);
        exl3::prepare(l.w, x.data(), 640, 127, isa, 0, rows, p);
        std::vector<float> y(whole.size());
        for (std::int32_t block = 0; block < 2; ++block) {
          std::vector<std::int64_t> sums(static_cast<std::size_t>(rows) * 128);
          std::vector<std::int64_t> part(sums.size());
          const std::int32_t edges[] = {0, 128, 512, 640};
          for (int i = 0; i < 3; ++i) {
            const exl3::Upcoming next =
                i < 2 ? exl3::upcoming(l.w, block, edges[i + 1]) : exl3::Upcoming{};
            exl3::part_sums(l.w, p, isa, block, edges[i], edges[i + 1], part.data(), next);
            for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += part[k];
          }
          exl3::finish_sums(l.w, p, isa, block, sums.data(), y.data(), 256);
        }
        EXPECT_TRUE(same_bits(whole.data(), y.data(), y.size()))
            << exl3::to_string(isa) << " words " << words << " rows " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace flashnext
