// Which of several thread blocks is the last to bring its part, in memory that nobody has to clear: a ticket that lacks the mark is
// taken for one that counts nothing yet, and the last one leaves it marked and counting nothing. What is marked by chance, one in
// 2^36 of all words, is what this cannot tell from a ticket.
#pragma once
#include "shared/params.h"

namespace narrows {

constexpr int kTicketBits = 28;  // of the count
constexpr u64 kTicketMark = u64{0xb7e151628} << kTicketBits;
constexpr u64 kTicketCount = (u64{1} << kTicketBits) - 1;

constexpr bool is_marked(u64 ticket) { return (ticket & ~kTicketCount) == kTicketMark; }

// Memory: one word; add(x) and swap_if(expected, x) give what was there before, and release and acquire. What was counted before.
template <class Memory> constexpr u64 add_to_ticket(Memory memory, u64 x) {
  u64 before = memory.add(x);
  while (!is_marked(before)) {  // others may be about to mark it too
    const u64 now = memory.read();
    if (is_marked(now)) {
      before = memory.add(x);
    } else if (memory.swap_if(now, kTicketMark + x) == now) {  // what was added goes with the rest: those add again
      before = kTicketMark;
    }
  }
  return before & kTicketCount;
}

// parts: of the row, this one among them.
template <class Memory> constexpr bool brings_last_part(Memory memory, u64 parts) {
  if (add_to_ticket(memory, 1) != parts - 1) return false;
  memory.write(kTicketMark);
  return true;
}

// The other way, where parts are large: each block says that its part is near, then all but the last to say so store theirs. The last
// one keeps its own, and waits for theirs; they are at work already and wait for nobody. A ticket counts both.
constexpr int kNearBits = 14;
constexpr u64 kStoredPart = u64{1} << kNearBits;  // is added where a part has been stored

template <class Memory> constexpr bool is_near_last(Memory memory, u64 parts) {
  return (add_to_ticket(memory, 1) & (kStoredPart - 1)) == parts - 1;
}

// By the last one. Memory: read_acquired() is a read that acquires.
template <class Memory> constexpr void wait_for_stored(Memory memory, u64 parts) {
  while ((memory.read_acquired() & kTicketCount) >> kNearBits != parts - 1) {
  }
  memory.write(kTicketMark);
}

}  // namespace narrows
