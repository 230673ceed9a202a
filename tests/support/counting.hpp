// Counting over every mask rule and layout: with Q = 0 exp(LSE) rounds to the number of keys that a row sees, and
// V = one-hot(j mod d) says which. A tolerance cannot see one key too many; this does.
#pragma once

#include "tests/support/attention.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace narrows::test {

struct CountingRule {
  std::string name;
  Causal causal = Causal::none;
  Window window = {};
  std::int64_t chunk = 0;
  bool own_shift = false, masked = false, bias = false;
  bool key_begin = false, key_end = false;
};
/// Of row i of sequence s. Some rows see 34 keys and the next ones 34 others with a gap between, some nothing, some have bounds
/// that bound nothing.
std::int64_t counted_key_begin(std::int64_t s, std::int64_t i);
std::int64_t counted_key_end(std::int64_t s, std::int64_t i);
const std::vector<CountingRule>& counting_rules();

enum class CountingLayout { dense, varlen, seqused, varlen_seqused };
std::string layout_name(const testing::TestParamInfo<CountingLayout>& info);
inline const auto kCountingLayouts = testing::Values(CountingLayout::dense, CountingLayout::varlen,
                                                     CountingLayout::seqused, CountingLayout::varlen_seqused);

/// Three sequences; the lengths cross tiles of 16 keys and panels, and one is empty on either side. Keys that belong to a
/// sequence are one-hot in V, everything that no row may see is NaN.
struct Counting {
  static constexpr std::int64_t kHeads = 3, kDim = 96;
  struct Lengths {
    std::int64_t number, first_query, queries, first_key, keys, shift;
  };

  Counting(const CountingRule& rule_, CountingLayout layout, DType dtype, std::int64_t sq, std::int64_t sk);

  CountingRule rule;
  bool varlen;
  std::int64_t rows_of_batch;  // dense: query rows of a batch row
  std::vector<Lengths> sequences;
  Attention a;
  Array mask, bias, cu_q, cu_k, used_q, used_k, shift, key_begin, key_end;

  /// Keys and values that a sequence has and none of its rows sees become NaN.
  void poison_unseen();

 private:
  void fill_values();
  void bound_rows();
};

/// Whether row i of a head of a sequence sees key j, by the contract's text.
bool sees(const CountingRule& rule, const Counting::Lengths& s, std::int64_t h, std::int64_t i, std::int64_t j);

/// O and LSE of every row of a sequence, by the contract's text.
void expect_counted(const Counting& c);
/// Rows that belong to no sequence have O 0 and LSE -inf.
void expect_blank_rows(const Counting& c);

}  // namespace narrows::test
