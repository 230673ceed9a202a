// The counting probes backward: with lse = 0, o = 0, v = 0, scale 1 and scores of 0, P is exactly 1 on every visible pair, and
// the gradients are counts. A tolerance cannot see one pair too many; a count can.
#pragma once

#include "tests/support/counting.hpp"

namespace narrows::test {

enum class CountedGradient { dq, dk, dv };

/// Fills the arrays of a call so that the gradient counts: dq of a row its keys by j mod 8, dk and dv of a key its rows by
/// i mod 8 and i mod 96. Rows and keys that are in no sequence are NaN.
void make_counting(Counting& c, CountedGradient which);

/// Every element, zeros of rows and keys in no sequence included.
void expect_counted(const Counting& c, CountedGradient which);

}  // namespace narrows::test
