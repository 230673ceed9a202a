#include "cpu/pool.hpp"

#include <gtest/gtest.h>

#include "tests/support/sanitizer.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

namespace narrows::cpu {
namespace {

using namespace std::chrono_literals;

int repeats(int many) { return std::getenv("NARROWS_TEST_SMALL") ? many / 10 : many; }

TEST(CpuPool, every_task_runs_once_whatever_the_threads) {
  for (const int threads : {1, 2, 3, 8})
    for (const std::int64_t count : {0, 1, 2, 7, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
      parallel_for(count, threads, [&](std::int64_t task, int) { ++runs[static_cast<std::size_t>(task)]; });
      for (const std::atomic<int>& run : runs) EXPECT_EQ(run.load(), 1) << threads << " threads, " << count << " tasks";
    }
}

TEST(CpuPool, thread_numbers_are_below_the_limit_and_exclusive) {
  constexpr int kThreads = 4;
  std::array<std::atomic<int>, kThreads> busy{};
  std::atomic<int> wrong{0};
  parallel_for(repeats(2000), kThreads, [&](std::int64_t, int thread) {
    if (thread < 0 || thread >= kThreads) {
      ++wrong;
      return;
    }
    std::atomic<int>& mine = busy[static_cast<std::size_t>(thread)];
    if (mine.fetch_add(1) != 0) ++wrong;
    std::this_thread::yield();
    mine.fetch_sub(1);
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(CpuPool, workers_take_part) {
  // Each task waits until another one has started, so that one thread alone could not finish.
  std::atomic<int> started{0};
  parallel_for(2, 2, [&](std::int64_t, int) {
    ++started;
    while (started.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(started.load(), 2);
}

TEST(CpuPool, sleeping_workers_wake_up) {
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(5ms);
    std::atomic<int> started{0};
    parallel_for(3, 3, [&](std::int64_t, int) {
      ++started;
      while (started.load() < 3) std::this_thread::yield();
    });
    EXPECT_EQ(started.load(), 3);
  }
}

TEST(CpuPool, results_of_workers_are_seen_by_the_caller) {
  for (int round = 0; round < repeats(500); ++round) {
    std::vector<int> plain(64, -1);
    parallel_for(64, 4, [&](std::int64_t task, int) { plain[static_cast<std::size_t>(task)] = round; });
    for (const int value : plain) ASSERT_EQ(value, round);
  }
}

TEST(CpuPool, nested_calls_run_inline) {
  std::atomic<int> total{0}, foreign{0};
  parallel_for(8, 2, [&](std::int64_t, int) {
    const std::thread::id outer = std::this_thread::get_id();
    parallel_for(10, 4, [&](std::int64_t, int thread) {
      ++total;
      if (thread != 0 || std::this_thread::get_id() != outer) ++foreign;
    });
  });
  EXPECT_EQ(total.load(), 80);
  EXPECT_EQ(foreign.load(), 0);
}

TEST(CpuPool, concurrent_callers_all_finish) {
  std::vector<std::thread> callers;
  std::array<std::atomic<std::int64_t>, 6> sums{};
  const int rounds = repeats(300);
  for (std::atomic<std::int64_t>& sum : sums)
    callers.emplace_back([&sum, rounds] {
      for (int round = 0; round < rounds; ++round) parallel_for(20, 3, [&](std::int64_t task, int) { sum += task; });
    });
  for (std::thread& caller : callers) caller.join();
  for (const std::atomic<std::int64_t>& sum : sums) EXPECT_EQ(sum.load(), 190 * rounds);
}

TEST(CpuPool, a_body_that_throws_reaches_the_caller_and_leaves_the_pool_usable) {
  for (const int threads : {1, 2, 4}) {
    std::atomic<int> ran{0};
    EXPECT_THROW(parallel_for(1000000, threads,
                              [&](std::int64_t task, int) {
                                ++ran;
                                if (task == 5) throw std::runtime_error("five");
                              }),
                 std::runtime_error);
    EXPECT_LT(ran.load(), 1000000);
    std::atomic<int> after{0};
    parallel_for(10, threads, [&](std::int64_t, int) { ++after; });
    EXPECT_EQ(after.load(), 10);
  }
}

TEST(CpuPool, a_forked_child_makes_its_own_threads) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer ends a child that starts threads";
  if (test::kAddressSanitizer) GTEST_SKIP() << "a child keeps the locks that AddressSanitizer's other threads held";
  parallel_for(4, 2, [](std::int64_t, int) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int> started{0};
    parallel_for(2, 2, [&](std::int64_t, int) {
      ++started;
      while (started.load() < 2) std::this_thread::yield();
    });
    _exit(started.load() == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace narrows::cpu
