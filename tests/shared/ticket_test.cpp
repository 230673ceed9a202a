// Tickets in memory that holds anything: threads in the place of thread blocks.
#include "shared/ticket.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace narrows {
namespace {

struct HostWord {
  std::atomic<u64>* at;

  u64 add(u64 x) const { return at->fetch_add(x); }
  u64 swap_if(u64 expected, u64 x) const {
    at->compare_exchange_strong(expected, x);
    return expected;
  }
  u64 read() const { return at->load(); }
  u64 read_acquired() const { return at->load(); }
  void write(u64 x) const { at->store(x); }
};

constexpr u64 kContents[]{
    0, ~u64{0}, kTicketMark, kTicketMark - 1, ~kTicketMark, kTicketCount, u64{1} << 63, 0x3f8000003f800000};

TEST(Ticket, one_after_the_other_the_last_is_known_and_leaves_none) {
  for (const u64 content : kContents)
    for (const u64 parts : {u64{1}, u64{2}, u64{17}}) {
      std::atomic<u64> word{content};
      for (int launch = 0; launch < 3; ++launch) {
        for (u64 part = 1; part < parts; ++part) ASSERT_FALSE(brings_last_part(HostWord{&word}, parts)) << content;
        ASSERT_TRUE(brings_last_part(HostWord{&word}, parts)) << content;
        ASSERT_EQ(word.load(), kTicketMark);
      }
    }
}

TEST(Ticket, of_threads_at_once_exactly_one_is_last) {
  constexpr int kThreads = 4, kRounds = 3000;
  for (const u64 content : kContents) {
    std::vector<std::atomic<u64>> words(kRounds);
    std::vector<std::atomic<int>> last(kRounds);
    for (std::atomic<u64>& word : words) word = content;
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([&] {
          for (int round = 0; round < kRounds; ++round)
            if (brings_last_part(HostWord{&words[static_cast<std::size_t>(round)]}, kThreads))
              ++last[static_cast<std::size_t>(round)];
        });
    }
    for (int round = 0; round < kRounds; ++round) {
      ASSERT_EQ(last[static_cast<std::size_t>(round)], 1) << content;
      ASSERT_EQ(words[static_cast<std::size_t>(round)], kTicketMark) << content;
    }
  }
}

/// The one that comes last finds what all others have stored, and leaves the ticket for the next launch.
TEST(Ticket, of_threads_at_once_the_last_to_come_waits_for_the_others_parts) {
  constexpr int kThreads = 4, kRounds = 3000;
  for (const u64 content : kContents) {
    std::vector<std::atomic<u64>> words(kRounds);
    std::vector<std::atomic<int>> last(kRounds);
    std::vector<int> parts(kThreads * kRounds);  // plain memory, which the ticket alone makes seen
    for (std::atomic<u64>& word : words) word = content;
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kThreads; ++thread)
        threads.emplace_back([&, thread] {
          for (int round = 0; round < kRounds; ++round) {
            const auto index = static_cast<std::size_t>(round);
            const HostWord word{&words[index]};
            int* const own = &parts[index * kThreads];
            const bool comes_last = is_near_last(word, kThreads);
            own[thread] = 1;
            if (!comes_last) {
              word.add(kStoredPart);
              continue;
            }
            wait_for_stored(word, kThreads);
            for (int other = 0; other < kThreads; ++other) last[index] += own[other];
          }
        });
    }
    for (int round = 0; round < kRounds; ++round) {
      ASSERT_EQ(last[static_cast<std::size_t>(round)], kThreads) << content;
      ASSERT_EQ(words[static_cast<std::size_t>(round)], kTicketMark) << content;
    }
  }
}

}  // namespace
}  // namespace narrows
