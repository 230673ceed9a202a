// Backward on several threads: the same bits, and calls at once.
#include "tests/cpu/backward_run.hpp"
#include "tests/cpu/forward_run.hpp"

#include <thread>

namespace narrows::test {
namespace {

TEST(CpuBackwardThreads, K01_bits_do_not_depend_on_threads_or_repetition) {
  std::vector<std::pair<DType, std::string>> kinds{{DType::fp32, ""}, {DType::fp64, ""}};
  for (const std::string& set : instruction_sets()) kinds.emplace_back(DType::bf16, set);
  for (const auto& [dtype, set] : kinds) {
    SCOPED_TRACE(std::string(name(dtype)) + " " + set);
    BackwardCase c({.b = 2, .sq = 90, .sk = 200, .h = 4, .hk = 2, .d = 24, .dv = 16}, dtype);
    c.with_bias({1, 4, 1, 200}).with_slopes({4}).with_sinks({0, 1, 2, 3}).with_dlse().with_dropout(0.2);
    c.options.causal = Causal::bottom_right;
    c.forward_by_oracle();
    c.run({.instruction_set = set, .threads = 1, .query_block = 32});
    std::vector<Array> first;
    for (const Array* array : c.results()) first.push_back(*array);
    for (const int threads : {1, 2, 5}) {
      c.run({.instruction_set = set, .threads = threads, .query_block = 32});
      for (std::size_t x = 0; x < first.size(); ++x)
        EXPECT_TRUE(c.results()[x]->same_bits(first[x])) << threads << " " << x;
    }
    // How many heads are in scratch together changes nothing either, nor do the blocks of query rows, in whole depths.
    c.run({.instruction_set = set, .threads = 2, .query_block = 64, .heads_at_once = 1});
    for (const std::size_t x : {0U, 1U, 2U}) EXPECT_TRUE(c.results()[x]->same_bits(first[x])) << x;
  }
}

TEST(CpuBackwardThreads, L06_calls_at_once_do_not_disturb_each_other) {
  BackwardCase expected({.b = 2, .sq = 60, .sk = 150, .h = 4, .hk = 2, .d = 24, .dv = 16});
  expected.with_bias({1, 4, 1, 150}).with_slopes({4}).with_sinks({0, 1, 2, 3}).with_dropout(0.2);
  expected.forward_by_oracle();
  expected.run();
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (int& mistakes : wrong)
    threads.emplace_back([&] {
      BackwardCase mine = expected;
      for (int round = 0; round < repeats(10, 3); ++round) {
        mine.run();
        for (std::size_t x = 0; x < mine.results().size(); ++x)
          mistakes += !mine.results()[x]->same_bits(*expected.results()[x]);
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

}  // namespace
}  // namespace narrows::test
