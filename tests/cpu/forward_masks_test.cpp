// Counting: with Q = 0 exp(LSE) rounds to the number of keys that a row sees, and V = one-hot(j mod d) says which. A tolerance
// cannot see one key too many; this does.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"

#include <array>
#include <cmath>

namespace narrows::test {
namespace {

struct Rule {
  std::string name;
  Causal causal = Causal::none;
  Window window = {};
  std::int64_t chunk = 0;
  bool own_shift = false, masked = false, bias = false;
};

const std::vector<Rule> kRules{
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
};

bool in_mask(std::int64_t h, std::int64_t i, std::int64_t j) { return (h + 3 * i + 5 * j) % 4 != 0; }

std::int64_t floor_of(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

struct Lengths {
  std::int64_t first_query, queries, first_key, keys, shift;
};

/// From the contract's text.
bool sees(const Rule& rule, const Lengths& s, std::int64_t h, std::int64_t i, std::int64_t j) {
  const std::int64_t p = i + (rule.own_shift ? s.shift : rule.causal == Causal::top_left ? 0 : s.keys - s.queries);
  if (rule.causal != Causal::none && j > p) return false;
  if (rule.window.left >= 0 && j < p - rule.window.left) return false;
  if (rule.window.right >= 0 && j > p + rule.window.right) return false;
  if (rule.chunk > 0 && floor_of(j, rule.chunk) != floor_of(p, rule.chunk)) return false;
  return !(rule.masked || rule.bias) || in_mask(h, i, j);
}

enum class Layout { dense, varlen, seqused, varlen_seqused };

/// Three sequences; the lengths cross tiles of 16 keys and panels, and one is empty on either side.
struct Counting {
  static constexpr std::int64_t kHeads = 3, kDim = 96;
  std::vector<Lengths> sequences;
  Attention a;
  Array mask, bias, cu_q, cu_k, used_q, used_k, shift;

  Counting(const Rule& rule, Layout layout, DType dtype, std::int64_t sq, std::int64_t sk) {
    const bool varlen = layout == Layout::varlen || layout == Layout::varlen_seqused;
    const bool used = layout == Layout::seqused || layout == Layout::varlen_seqused;
    std::vector<double> bounds_q{0}, bounds_k{0}, lengths_q, lengths_k, shifts;
    for (std::int64_t s = 0; s < 3; ++s) {
      const std::int64_t rows = varlen && s == 1 ? 0 : sq, keys = varlen ? sk - 11 * s : sk;
      const std::int64_t first_q = static_cast<std::int64_t>(bounds_q.back()),
                         first_k = static_cast<std::int64_t>(bounds_k.back());
      const std::int64_t queries_used = used ? std::max<std::int64_t>(rows - 2 * s, 0) : rows;
      const std::int64_t keys_used = used ? (s == 2 ? 0 : keys - 3 * s - 1) : keys;
      shifts.push_back(static_cast<double>(7 * s - 9));
      sequences.push_back({varlen ? first_q : 0, queries_used, varlen ? first_k : 0, keys_used, 7 * s - 9});
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
    fill_values(varlen);
  }

  /// Keys that belong to a sequence are one-hot in V, everything else stays NaN.
  void fill_values(bool varlen) {
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
  static Dims with(Dims row, std::int64_t x) {
    row.push_back(x);
    return row;
  }
};

void check_row(const Counting& c, const Rule& rule, std::size_t s, std::int64_t i, std::int64_t h, bool varlen) {
  const Lengths& lengths = c.sequences[s];
  std::vector<std::int64_t> expected(static_cast<std::size_t>(Counting::kDim));
  std::int64_t count = 0;
  for (std::int64_t j = 0; j < lengths.keys; ++j)
    if (sees(rule, lengths, h, i, j)) {
      ++expected[static_cast<std::size_t>(j % Counting::kDim)];
      ++count;
    }
  const std::int64_t row = lengths.first_query + i, batch = static_cast<std::int64_t>(s);
  const double lse = varlen ? c.a.lse[{h, row}] : c.a.lse[{batch, h, row}];
  ASSERT_EQ(std::llround(std::exp(lse)), count) << rule.name << " sequence " << s << " row " << i << " head " << h;
  for (std::int64_t x = 0; x < Counting::kDim; ++x) {
    const double o = varlen ? c.a.o[{row, h, x}] : c.a.o[{batch, row, h, x}];
    ASSERT_EQ(std::llround(o * static_cast<double>(count)), expected[static_cast<std::size_t>(x)])
        << rule.name << " sequence " << s << " row " << i << " head " << h << " keys " << x << " mod 96";
  }
}

class CpuForwardCounting : public testing::TestWithParam<Layout> {};

TEST_P(CpuForwardCounting, every_mask_shows_exactly_its_keys) {
  const bool varlen = GetParam() == Layout::varlen || GetParam() == Layout::varlen_seqused;
  std::vector<Dims> sizes{{45, 83}, {83, 45}, {1, 70}};
  sizes.resize(static_cast<std::size_t>(repeats(3, 1)));
  for (const Rule& rule : kRules)
    for (const Dims& size : sizes)
      for (const std::string& set : instruction_sets()) {
        Counting c(rule, GetParam(), type_for(set, rule.own_shift ? DType::fp64 : DType::fp32), size[0], size[1]);
        run_forward(c.a, {set, 2, 10, 16, 2});
        for (std::size_t s = 0; s < 3; ++s)
          for (std::int64_t i = 0; i < c.sequences[s].queries; ++i)
            for (std::int64_t h = 0; h < Counting::kHeads; ++h) check_row(c, rule, s, i, h, varlen);
        if (HasFatalFailure()) return;
      }
}

TEST_P(CpuForwardCounting, C08_rows_of_no_sequence_are_zero_and_minus_infinity) {
  const bool varlen = GetParam() == Layout::varlen || GetParam() == Layout::varlen_seqused;
  Counting c(kRules[1], GetParam(), DType::bf16, 20, 40);
  run_forward(c.a);
  std::vector<bool> belongs(static_cast<std::size_t>(varlen ? c.a.q.shape()[0] : 3 * 20));
  for (std::size_t s = 0; s < 3; ++s)
    for (std::int64_t i = 0; i < c.sequences[s].queries; ++i)
      belongs[static_cast<std::size_t>(varlen ? c.sequences[s].first_query + i
                                              : static_cast<std::int64_t>(s) * 20 + i)] = true;
  for (std::size_t row = 0; row < belongs.size(); ++row) {
    if (belongs[row]) continue;
    const std::int64_t i = static_cast<std::int64_t>(row);
    EXPECT_EQ(varlen ? (c.a.lse[{1, i}]) : (c.a.lse[{i / 20, 1, i % 20}]), -std::numeric_limits<double>::infinity())
        << row;
    EXPECT_EQ(varlen ? (c.a.o[{i, 1, 95}]) : (c.a.o[{i / 20, i % 20, 1, 95}]), 0) << row;
  }
}

std::string layout_name(const testing::TestParamInfo<Layout>& info) {
  return std::array{"dense", "varlen", "seqused", "varlen_seqused"}[static_cast<std::size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(All, CpuForwardCounting,
                         testing::Values(Layout::dense, Layout::varlen, Layout::seqused, Layout::varlen_seqused),
                         layout_name);

TEST(CpuForward, E06_windows_that_cover_everything_equal_causal_bit_for_bit) {
  Attention causal({1, 70, 70, 2, 1, 16, 16});
  causal.options.causal = Causal::bottom_right;
  run_forward(causal);
  for (const Window window : {Window{-1, 0}, Window{70, 0}, Window{69, 0}}) {
    Attention a({1, 70, 70, 2, 1, 16, 16});
    a.options.window = window;
    run_forward(a);
    EXPECT_TRUE(a.o.same_bits(causal.o) && a.lse.same_bits(causal.lse)) << window.left;
  }
}

}  // namespace
}  // namespace narrows::test
