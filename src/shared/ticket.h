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

// Memory: one word; add(x) and swap_if(expected, x) give what was there before, and release and acquire.
// parts: of the row, this one among them.
template <class Memory> constexpr bool brings_last_part(Memory memory, u64 parts) {
  u64 before = memory.add(1);
  while (!is_marked(before)) {  // others may be about to mark it too
    const u64 now = memory.read();
    if (is_marked(now)) {
      before = memory.add(1);
    } else if (memory.swap_if(now, kTicketMark + 1) ==
               now) {  // what was added before goes with the rest: those add again
      before = kTicketMark;
    }
  }
  if ((before & kTicketCount) != parts - 1) return false;
  memory.write(kTicketMark);
  return true;
}

}  // namespace narrows
