// Threads and processes that want the same kernel at once.
#include "cuda/cache.hpp"

#include <chrono>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cuda/cache_support.hpp"
#include "tests/support/sanitizer.hpp"

namespace narrows::cuda {
namespace {

constexpr int kMany = 32;
constexpr int kPrograms = 3;

void get_all(Cache& cache) {
  for (int size = 1; size <= kPrograms; ++size) cache.get(small_program(size), "sm_80");
}

TEST_F(CacheTest, ThreadsCompileEachProgramOnce) {
  for (const bool on_disk : {true, false}) {
    Cache::Settings some = settings();
    if (!on_disk) some.disk.folder.clear();
    some.compile = [&](const Program& program, std::string_view architecture, std::span<const SourceFile>) {
      ++compiled_;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // in which the others come along
      return stand_in(program, architecture);
    };
    compiled_ = 0;
    Cache cache(some);
    std::latch start(kMany);
    std::vector<std::thread> threads;
    for (int i = 0; i < kMany; ++i)
      threads.emplace_back([&] {
        start.arrive_and_wait();
        get_all(cache);
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(compiled_, kPrograms);
  }
}

TEST_F(CacheTest, CachesOverOneFolderCompileEachProgramOnce) {
  std::latch start(kMany);
  std::vector<std::thread> threads;
  for (int i = 0; i < kMany; ++i)
    threads.emplace_back([&] {
      Cache cache(settings());
      start.arrive_and_wait();
      get_all(cache);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(compiled_, kPrograms);
  EXPECT_EQ(count(".lock"), 0);
}

TEST_F(CacheTest, DifferentProgramsAreCompiledAtTheSameTime) {
  std::latch both(2);
  Cache::Settings meeting = settings();
  std::atomic<int> alone{0};
  meeting.compile = [&](const Program& program, std::string_view architecture, std::span<const SourceFile>) {
    both.count_down();
    for (int waits = 0; !both.try_wait() && waits < 2000; ++waits)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (!both.try_wait()) ++alone;
    return stand_in(program, architecture);
  };
  Cache cache(meeting);
  std::thread other([&] { cache.get(small_program(1), "sm_80"); });
  cache.get(small_program(2), "sm_80");
  other.join();
  EXPECT_EQ(alone, 0);
}

TEST_F(CacheTest, ProcessesCompileEachProgramOnceWithTheRealCompiler) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow a fork";
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  const std::string log = (directory_ / "log").string();
  const auto compile_all = [&] {
    Cache::Settings real = settings();
    real.version = [] { return find_compiler().version; };
    real.compile = [&](const Program& program, std::string_view architecture, std::span<const SourceFile> sources) {
      const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      const bool is_written = write(file, "x", 1) == 1;
      close(file);
      return is_written ? compile(program, architecture, sources) : Binary{};
    };
    Cache cache(real);
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) threads.emplace_back([&] { get_all(cache); });
    for (std::thread& thread : threads) thread.join();
    for (int size = 1; size <= kPrograms; ++size)
      if (cache.get(small_program(size), "sm_80")->usage.shared_bytes != 4 * size) return 1;
    return 0;
  };
  std::vector<pid_t> processes;
  for (int i = 0; i < kMany; ++i) processes.push_back(start_process(compile_all));
  for (const pid_t process : processes) EXPECT_EQ(wait_for(process), 0);
  EXPECT_EQ(files::load(log), std::string(kPrograms, 'x'));
  EXPECT_EQ(count("-nvrtc"), kPrograms);
  EXPECT_EQ(count(""), kPrograms);
}

}  // namespace
}  // namespace narrows::cuda
