// Rows of a (b, s, h, d) result that belong to no sequence or lie beyond its used rows.
#pragma once

#include "core/problem.hpp"

#include <algorithm>
#include <vector>

namespace narrows::cpu {

struct BlankRows {
  i64 batch;
  Range rows;  // few enough for one task
};

/// `rows`: of the tensor's sequence axis. of_sequence(b): the row range of sequence b.
template <class OfSequence>
std::vector<BlankRows> blank_rows(bool varlen, i64 batch, i64 rows, OfSequence of_sequence) {
  constexpr i64 kRowsOfTask = 256;
  std::vector<BlankRows> blanks;
  const auto add = [&](i64 b, i64 begin, i64 end) {
    for (; begin < end; begin += kRowsOfTask) blanks.push_back({b, {begin, std::min(begin + kRowsOfTask, end)}});
  };
  i64 next = 0;
  for (i64 b = 0; b < batch; ++b) {
    const Range used = of_sequence(b);
    if (varlen) add(0, next, used.begin);
    next = used.end;
    if (!varlen) add(b, next, rows);
  }
  if (varlen) add(0, next, rows);
  return blanks;
}

}  // namespace narrows::cpu
