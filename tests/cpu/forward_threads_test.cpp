// Calls from several threads at once, inside a parent's parallel region, and after fork.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"
#include "tests/support/sanitizer.hpp"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <thread>

namespace narrows::test {
namespace {

/// A call with splits, and one that packs ahead.
std::vector<Attention> calls() {
  std::vector<Attention> made;
  for (const Sizes& sizes : {Sizes{1, 1, 1200, 4, 2, 16, 16}, Sizes{1, 210, 300, 2, 1, 16, 16}}) {
    made.emplace_back(sizes);
    made.back().options.threads = 2;
  }
  return made;
}

bool right(Attention a, const Attention& expected) {
  a.o.poison();
  forward(a.in(), a.out(), a.options);
  return a.o.same_bits(expected.o) && a.lse.same_bits(expected.lse);
}

std::vector<Attention> results() {
  std::vector<Attention> expected = calls();
  for (Attention& a : expected) forward(a.in(), a.out(), a.options);
  return expected;
}

TEST(CpuForwardThreads, L06_calls_at_once_do_not_disturb_each_other) {
  const std::vector<Attention> expected = results();
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < wrong.size(); ++t)
    threads.emplace_back([&, t] {
      for (int round = 0; round < repeats(20, 4); ++round) {
        const Attention& a = expected[(t + static_cast<std::size_t>(round)) % expected.size()];
        if (!right(a, a)) ++wrong[t];
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

/// What `#pragma omp parallel num_threads(4)` is compiled to, so that this file needs no compiler option.
TEST(CpuForwardThreads, inside_a_parent_s_openmp_region) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not see libgomp's barriers";
  void* const library = dlopen("libgomp.so.1", RTLD_NOW);
  if (!library) GTEST_SKIP() << "no libgomp";
  using Region = void (*)(void*);
  const auto parallel = reinterpret_cast<void (*)(Region, void*, unsigned, unsigned)>(dlsym(library, "GOMP_parallel"));
  ASSERT_NE(parallel, nullptr);
  struct Shared {
    std::vector<Attention> expected = results();
    std::atomic<int> wrong{0}, members{0};
  } shared;
  const Region region = [](void* data) {
    Shared& all = *static_cast<Shared*>(data);
    ++all.members;
    for (const Attention& a : all.expected)
      if (!right(a, a)) ++all.wrong;
  };
  parallel(region, &shared, 4, 0);
  EXPECT_GE(shared.members, 1);
  EXPECT_EQ(shared.wrong, 0);
}

TEST(CpuForwardThreads, after_fork_the_child_computes_too) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer ends a child that starts threads";
  if (kAddressSanitizer) GTEST_SKIP() << "a child keeps the locks that AddressSanitizer's other threads held";
  const std::vector<Attention> expected = results();
  const pid_t child = fork();
  if (child == 0) _exit(right(expected[0], expected[0]) && right(expected[1], expected[1]) ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_TRUE(right(expected[0], expected[0]));
}

}  // namespace
}  // namespace narrows::test
