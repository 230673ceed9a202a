// Calls over KV caches on several threads: the same bits, and calls at once, each of which appends to its own cache.
#include <gtest/gtest.h>

#include "tests/cpu/cache_call.hpp"

#include <thread>

namespace narrows::test {
namespace {

bool same(const Attention& a, const Attention& b) {
  return a.o.same_bits(b.o) && a.lse.same_bits(b.lse) && a.k.same_bits(b.k) && a.v.same_bits(b.v);
}

TEST(CpuCacheThreads, L06_calls_at_once_append_to_their_own_caches) {
  for (int round = 0; round < repeats(40, 10); ++round) {
    CacheCall call(static_cast<std::uint64_t>(round));
    Attention alone = call.a;
    call.blocks.threads = 1;
    run_forward(alone, call.blocks);
    call.blocks.threads = 3;
    std::vector<Attention> at_once(3, call.a);
    std::vector<std::thread> threads;
    for (Attention& a : at_once) threads.emplace_back([&] { run_forward(a, call.blocks); });
    for (std::thread& thread : threads) thread.join();
    for (const Attention& a : at_once) EXPECT_TRUE(same(a, alone)) << round;
  }
}

}  // namespace
}  // namespace narrows::test
