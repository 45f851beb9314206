// The thread pool: every item once, whatever the grain, over many loops and pools.
#include "cpp/base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <gtest/gtest.h>
#include <numeric>
#include <thread>
#include <vector>

namespace flashnext {
namespace {

TEST(ThreadPool, RunsEveryItemOnceForAnyGrain) {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::int64_t n : {0, 1, 2, 63, 1000}) {
      for (const std::int64_t grain : {1, 3, 64, 5000}) {
        std::vector<int> hits(static_cast<std::size_t>(n), 0);
        std::atomic<std::int64_t> widest{0};
        pool.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
          ASSERT_LT(begin, end);
          EXPECT_EQ(begin % grain, 0);
          std::int64_t seen = widest.load();
          while (seen < end - begin && !widest.compare_exchange_weak(seen, end - begin)) {
          }
          for (std::int64_t i = begin; i < end; ++i) ++hits[static_cast<std::size_t>(i)];
        });
        EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), std::int64_t{0}), n);
        for (const int h : hits) ASSERT_EQ(h, 1);
        EXPECT_LE(widest.load(), grain);
      }
    }
  }
}

TEST(ThreadPool, ManyLoopsInARowSeeTheWritesOfTheOnesBefore) {
  ThreadPool pool(3);
  std::vector<std::int64_t> v(97, 0);
  const auto n = static_cast<std::int64_t>(v.size());
  constexpr std::int64_t kLoops = 2000;
  for (std::int64_t loop = 0; loop < kLoops; ++loop) {
    pool.parallel_for(n, 1 + loop % 11, [&](std::int64_t begin, std::int64_t end) {
      // Reads a neighbour's value of an earlier loop through the caller's ordering only.
      for (std::int64_t i = begin; i < end; ++i) v[static_cast<std::size_t>(i)] += 1;
    });
    if (loop % 100 == 0) {
      for (const std::int64_t x : v) ASSERT_EQ(x, loop + 1);
    }
  }
  for (const std::int64_t x : v) EXPECT_EQ(x, kLoops);
}

TEST(ThreadPool, LoopsAfterAPauseStillRun) {
  ThreadPool pool(2);
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the workers go to sleep
    std::atomic<int> sum{0};
    pool.parallel_for(100, 1, [&](std::int64_t, std::int64_t) { sum.fetch_add(1); });
    EXPECT_EQ(sum.load(), 100);
  }
}

TEST(ThreadPool, PoolsComeAndGo) {
  for (int i = 0; i < 60; ++i) {
    ThreadPool pool(1 + i % 4);
    std::atomic<int> sum{0};
    if (i % 3 != 0) pool.parallel_for(10, 1, [&](std::int64_t, std::int64_t) { ++sum; });
    EXPECT_EQ(sum.load(), i % 3 != 0 ? 10 : 0);
  }
}

TEST(ThreadPool, ZeroThreadsMeansOneACore) {
  ThreadPool pool(0);
  EXPECT_EQ(pool.threads(), available_cores());
  EXPECT_GE(available_cores(), 1);
}

}  // namespace
}  // namespace flashnext
