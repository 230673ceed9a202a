#include "tests/support/counting.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace narrows::test {
namespace {

bool in_mask(std::int64_t h, std::int64_t i, std::int64_t j) { return (h + 3 * i + 5 * j) % 4 != 0; }

std::int64_t floor_of(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

Dims with(Dims row, std::int64_t x) {
  row.push_back(x);
  return row;
}

void expect_row(const Counting& c, std::size_t s, std::int64_t i, std::int64_t h) {
  const Counting::Lengths& lengths = c.sequences[s];
  std::vector<std::int64_t> expected(static_cast<std::size_t>(Counting::kDim));
  std::int64_t count = 0;
  for (std::int64_t j = 0; j < lengths.keys; ++j)
    if (sees(c.rule, lengths, h, i, j)) {
      ++expected[static_cast<std::size_t>(j % Counting::kDim)];
      ++count;
    }
  const std::int64_t row = lengths.first_query + i, batch = static_cast<std::int64_t>(s);
  const double lse = c.varlen ? c.a.lse[{h, row}] : c.a.lse[{batch, h, row}];
  ASSERT_EQ(std::llround(std::exp(lse)), count) << c.rule.name << " sequence " << s << " row " << i << " head " << h;
  for (std::int64_t x = 0; x < Counting::kDim; ++x) {
    const double o = c.varlen ? c.a.o[{row, h, x}] : c.a.o[{batch, row, h, x}];
    ASSERT_EQ(std::llround(o * static_cast<double>(count)), expected[static_cast<std::size_t>(x)])
        << c.rule.name << " sequence " << s << " row " << i << " head " << h << " keys " << x << " mod 96";
  }
}

}  // namespace

bool sees(const CountingRule& rule, const Counting::Lengths& s, std::int64_t h, std::int64_t i, std::int64_t j) {
  const std::int64_t p = i + (rule.own_shift ? s.shift : rule.causal == Causal::top_left ? 0 : s.keys - s.queries);
  if (rule.causal != Causal::none && j > p) return false;
  if (rule.window.left >= 0 && j < p - rule.window.left) return false;
  if (rule.window.right >= 0 && j > p + rule.window.right) return false;
  if (rule.chunk > 0 && floor_of(j, rule.chunk) != floor_of(p, rule.chunk)) return false;
  if (rule.key_begin && j < counted_key_begin(s.number, i)) return false;
  if (rule.key_end && j >= counted_key_end(s.number, i)) return false;
  return !(rule.masked || rule.bias) || in_mask(h, i, j);
}

std::int64_t counted_key_begin(std::int64_t s, std::int64_t i) {
  if ((i + s) % 7 == 3) return std::numeric_limits<std::int32_t>::max();
  if ((i + s) % 11 == 5) return std::numeric_limits<std::int32_t>::min();
  return (i + s) / 17 * 40 - 3;
}

std::int64_t counted_key_end(std::int64_t s, std::int64_t i) {
  if ((i + s) % 13 == 6) return (i + s) / 17 * 40 - 3;  // where the row begins
  if ((i + s) % 11 == 5) return std::numeric_limits<std::int32_t>::max();
  return (i + s) / 17 * 40 + 31;
}

const std::vector<CountingRule>& counting_rules() {
  static const std::vector<CountingRule> rules{
      {"none"},
      {"causal", Causal::bottom_right},
      {"top_left", Causal::top_left},
      {"left", Causal::none, {5, -1}},
      {"right", Causal::none, {-1, 7}},
      {"band", Causal::none, {33, 2}},
      {"diagonal", Causal::none, {0, 0}},
      {"causal_left", Causal::bottom_right, {31, -1}},
      {"chunk", Causal::none, {}, 13},
      {"chunk_causal", Causal::bottom_right, {}, 32},
      {"chunk_top_left_band", Causal::top_left, {9, -1}, 24},
      {"shift", Causal::bottom_right, {40, -1}, 0, true},
      {"mask", Causal::none, {}, 0, false, true},
      {"mask_causal", Causal::bottom_right, {20, -1}, 0, false, true},
      {"bias", Causal::none, {}, 0, false, false, true},
      {"bias_chunk", Causal::bottom_right, {}, 17, false, false, true},
      {"key_begin", Causal::none, {}, 0, false, false, false, true, false},
      {"key_end", Causal::none, {}, 0, false, false, false, false, true},
      {"interval", Causal::none, {}, 0, false, false, false, true, true},
      {"interval_causal", Causal::bottom_right, {60, -1}, 0, false, false, false, true, true},
      {"interval_mask", Causal::top_left, {}, 50, false, true, false, true, true},
  };
  return rules;
}

std::string layout_name(const testing::TestParamInfo<CountingLayout>& info) {
  return std::array{"dense", "varlen", "seqused", "varlen_seqused"}[static_cast<std::size_t>(info.param)];
}

Counting::Counting(const CountingRule& rule_, CountingLayout layout, DType dtype, std::int64_t sq, std::int64_t sk)
    : rule(rule_),
      varlen(layout == CountingLayout::varlen || layout == CountingLayout::varlen_seqused),
      rows_of_batch(sq) {
  const bool used = layout == CountingLayout::seqused || layout == CountingLayout::varlen_seqused;
  std::vector<double> bounds_q{0}, bounds_k{0}, lengths_q, lengths_k, shifts;
  for (std::int64_t s = 0; s < 3; ++s) {
    const std::int64_t rows = varlen && s == 1 ? 0 : sq, keys = varlen ? sk - 11 * s : sk;
    const std::int64_t first_q = static_cast<std::int64_t>(bounds_q.back()),
                       first_k = static_cast<std::int64_t>(bounds_k.back());
    const std::int64_t queries_used = used ? std::max<std::int64_t>(rows - 2 * s, 0) : rows;
    const std::int64_t keys_used = used ? (s == 2 ? 0 : keys - 3 * s - 1) : keys;
    shifts.push_back(static_cast<double>(7 * s - 9));
    sequences.push_back({s, varlen ? first_q : 0, queries_used, varlen ? first_k : 0, keys_used, 7 * s - 9});
    bounds_q.push_back(bounds_q.back() + static_cast<double>(rows));
    bounds_k.push_back(bounds_k.back() + static_cast<double>(keys));
    lengths_q.push_back(static_cast<double>(queries_used));
    lengths_k.push_back(static_cast<double>(keys_used));
  }
  // Two rows and keys of slack behind the last sequence.
  a = varlen ? Attention::packed({1, static_cast<std::int64_t>(bounds_q.back()) + 2,
                                  static_cast<std::int64_t>(bounds_k.back()) + 2, kHeads, 1, 8, kDim},
                                 dtype)
             : Attention({3, sq, sk, kHeads, 1, 8, kDim}, dtype);
  a.q.fill(0);
  a.dlse = Array(DType::fp32, a.lse.shape());
  a.options.causal = rule.causal;
  a.options.window = rule.window;
  a.options.chunk = rule.chunk;
  if (varlen) {
    a.options.cu_seqlens_q = cu_q = int32_array(bounds_q);
    a.options.cu_seqlens_k = cu_k = int32_array(bounds_k);
  }
  if (used) {
    a.options.seqused_q = used_q = int32_array(lengths_q);
    a.options.seqused_k = used_k = int32_array(lengths_k);
  }
  if (rule.own_shift) a.options.shift = shift = int32_array(shifts);
  const Dims shape{1, kHeads, sq, sk};
  if (rule.masked) {
    mask = Array(DType::boolean, shape).fill([](const Dims& at) { return in_mask(at[1], at[2], at[3]) ? 1 : 0; });
    a.options.mask = mask;
  }
  if (rule.bias) {
    bias = Array(DType::bf16, shape).fill([](const Dims& at) {
      return in_mask(at[1], at[2], at[3]) ? 0 : -std::numeric_limits<double>::infinity();
    });
    a.options.bias = bias;
  }
  bound_rows();
  fill_values();
}

void Counting::bound_rows() {
  const Dims shape = varlen ? Dims{a.q.shape()[0]} : Dims{3, rows_of_batch};
  const auto make = [&](Array& array, const Arrangement& arrangement, auto bound_of) {
    array = Array(DType::int32, shape, arrangement);
    for (const Lengths& s : sequences)
      for (std::int64_t i = 0; i < s.queries; ++i)
        array.set(varlen ? Dims{s.first_query + i} : Dims{s.number, i}, static_cast<double>(bound_of(s.number, i)));
    return array.tensor();
  };
  if (rule.key_begin) a.options.key_begin = make(key_begin, {}, counted_key_begin);
  if (rule.key_end)
    a.options.key_end = make(key_end, {.order = varlen ? Dims{0} : Dims{1, 0}, .gap = 1}, counted_key_end);
}

void Counting::poison_unseen() {
  for (const Lengths& s : sequences)
    for (std::int64_t j = 0; j < s.keys; ++j) {
      bool seen = false;
      for (std::int64_t i = 0; i < s.queries && !seen; ++i)
        for (std::int64_t h = 0; h < kHeads && !seen; ++h) seen = sees(rule, s, h, i, j);
      if (seen) continue;
      const Dims row = varlen ? Dims{s.first_key + j, 0} : Dims{s.number, j, 0};
      for (std::int64_t x = 0; x < 8; ++x) a.k.set(with(row, x), std::numeric_limits<double>::quiet_NaN());
      for (std::int64_t x = 0; x < kDim; ++x) a.v.set(with(row, x), std::numeric_limits<double>::quiet_NaN());
    }
}

void Counting::fill_values() {
  const Array random = a.k;
  a.k.poison();
  a.v.poison();
  for (std::size_t s = 0; s < sequences.size(); ++s)
    for (std::int64_t j = 0; j < sequences[s].keys; ++j) {
      const Dims row = varlen ? Dims{sequences[s].first_key + j, 0} : Dims{static_cast<std::int64_t>(s), j, 0};
      for (std::int64_t x = 0; x < kDim; ++x) a.v.set(with(row, x), j % kDim == x ? 1 : 0);
      for (std::int64_t x = 0; x < 8; ++x) a.k.set(with(row, x), random.at(with(row, x)));
    }
}

void expect_counted(const Counting& c) {
  for (std::size_t s = 0; s < c.sequences.size(); ++s)
    for (std::int64_t i = 0; i < c.sequences[s].queries; ++i)
      for (std::int64_t h = 0; h < Counting::kHeads; ++h) ASSERT_NO_FATAL_FAILURE(expect_row(c, s, i, h));
}

void expect_blank_rows(const Counting& c) {
  const std::int64_t per_batch = c.rows_of_batch, rows = c.varlen ? c.a.q.shape()[0] : 3 * per_batch;
  std::vector<bool> belongs(static_cast<std::size_t>(rows));
  for (std::size_t s = 0; s < 3; ++s)
    for (std::int64_t i = 0; i < c.sequences[s].queries; ++i)
      belongs[static_cast<std::size_t>(c.varlen ? c.sequences[s].first_query + i
                                                : static_cast<std::int64_t>(s) * per_batch + i)] = true;
  for (std::int64_t i = 0; i < rows; ++i) {
    if (belongs[static_cast<std::size_t>(i)]) continue;
    const std::int64_t b = i / per_batch, row = i % per_batch;
    EXPECT_EQ(c.varlen ? (c.a.lse[{1, i}]) : (c.a.lse[{b, 1, row}]), -std::numeric_limits<double>::infinity()) << i;
    EXPECT_EQ(c.varlen ? (c.a.o[{i, 1, 95}]) : (c.a.o[{b, row, 1, 95}]), 0) << i;
  }
}

}  // namespace narrows::test
