// Random cache calls: contiguous or paged, dense or varlen queries and new keys. Every slot that no row may read holds NaN,
// every table entry that nobody may read is out of range.
#pragma once

#include "core/problem.hpp"
#include "tests/cpu/dice.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/row_bounds.hpp"

#include <algorithm>
#include <deque>
#include <numeric>

namespace narrows::test {

struct CacheCall {
  Attention a;
  Blocks blocks;
  std::deque<Array> sides;  // what the views in a.options look at

  /// counting: Q = 0 and V = one-hot(j mod dv), and no rule that weighs visible keys differently.
  explicit CacheCall(std::uint64_t seed, bool counting = false) : counting_(counting), dice_(seed) {
    const std::vector<std::string> sets = instruction_sets();
    blocks.instruction_set = sets[dice_.below(sets.size())];
    choose_sizes();
    choose_lengths();
    make_cache();
    make_queries();
    make_new_keys();
    if (dice_.one_in(2)) make_rotary();
    choose_rules();
    if (paged_) break_unread_entries();
    blocks.threads = static_cast<int>(dice_.between(1, 3));
    blocks.query_block = dice_.between(1, 40);
    blocks.key_block = dice_.between(1, 80);
    blocks.heads_at_once = dice_.between(1, 5);
    blocks.packs_ahead = dice_.one_in(2);
    if (dice_.one_in(2)) blocks.split_keys = dice_.between(1, 90);
    blocks.reads_in_place = dice_.one_in(2);
    blocks.heads_together = dice_.between(1, 4);
  }

 private:
  void choose_sizes() {
    b_ = dice_.between(1, 4);
    hk_ = dice_.between(1, 3);
    h_ = hk_ * dice_.of<std::int64_t>({1, 2, 4});
    d_ = dice_.of<std::int64_t>({2, 8, 20, 48, 65});
    dv_ = dice_.one_in(2) ? d_ : dice_.of<std::int64_t>({1, 16, 33});
    sq_ = dice_.of<std::int64_t>({1, 1, 2, 9, 30});
    paged_ = dice_.one_in(2);
    page_ = dice_.of<std::int64_t>({1, 3, 16, 40, 130});
    capacity_ = dice_.of<std::int64_t>({0, 1, 20, 97, 160});
    pages_of_row_ = (capacity_ + page_ - 1) / page_ + dice_.between(0, 2);
    if (paged_) capacity_ = pages_of_row_ * page_;
    rows_ = b_ + dice_.between(0, 3);
    dtype_ =
        type_for(blocks.instruction_set, dice_.of({DType::fp32, DType::fp32, DType::bf16, DType::fp16, DType::fp64}));
  }

  void choose_lengths() {
    const std::int64_t same = dice_.between(0, std::min<std::int64_t>(5, capacity_));
    appends_ = dice_.one_in(2);
    varlen_new_ = dice_.one_in(2);
    for (std::int64_t s = 0; s < b_; ++s) {
      const std::int64_t fresh = !appends_     ? 0
                                 : varlen_new_ ? dice_.between(0, std::min<std::int64_t>(9, capacity_))
                                               : same;
      new_.push_back(fresh);
      filled_.push_back(dice_.one_in(6) ? 0 : dice_.between(0, capacity_ - fresh));
      pad_.push_back(dice_.one_in(2) ? 0 : dice_.between(0, filled_.back()));
    }
    cache_row_.resize(static_cast<std::size_t>(rows_));
    std::iota(cache_row_.begin(), cache_row_.end(), 0);
    for (std::size_t i = cache_row_.size(); i > 1 && rows_ > b_; --i)
      std::swap(cache_row_[i - 1], cache_row_[dice_.below(i)]);
    cache_row_.resize(static_cast<std::size_t>(b_));
    a.options.cache_seqlens = lengths(filled_);
    if (std::any_of(pad_.begin(), pad_.end(), [](std::int64_t pad) { return pad > 0; }))
      a.options.leftpad = lengths(pad_);
    if (rows_ > b_) a.options.cache_batch_idx = lengths(cache_row_);
  }

  void make_cache() {
    const std::int64_t pool = rows_ * pages_of_row_ + 2;
    const auto shape = [&](std::int64_t width) {
      return paged_ ? Dims{pool, page_, hk_, width} : Dims{rows_, capacity_, hk_, width};
    };
    a.k = Array(dtype_, shape(d_), arrangement(4));
    a.v = Array(dtype_, shape(dv_), arrangement(4));
    std::vector<std::int64_t> free_pages(static_cast<std::size_t>(pool));
    std::iota(free_pages.begin(), free_pages.end(), 0);
    for (std::size_t i = free_pages.size(); i > 1; --i) std::swap(free_pages[i - 1], free_pages[dice_.below(i)]);
    Array table(DType::int32, {rows_, pages_of_row_});
    for (std::size_t s = 0; s < static_cast<std::size_t>(b_); ++s) {
      const std::int64_t end = filled_[s] + new_[s];
      for (std::int64_t page = pad_[s] / page_; paged_ && end > pad_[s] && page <= (end - 1) / page_; ++page) {
        table.set({cache_row_[s], page}, static_cast<double>(free_pages.back()));
        free_pages.pop_back();
      }
      for (std::int64_t slot = pad_[s]; slot < filled_[s]; ++slot) {
        const Dims place = paged_ ? Dims{static_cast<std::int64_t>(table[{cache_row_[s], slot / page_}]), slot % page_}
                                  : Dims{cache_row_[s], slot};
        fill_slot(a.k, place, -1);
        fill_slot(a.v, place, slot - pad_[s]);
      }
    }
    if (paged_) a.options.block_table = side(table);
  }

  /// j: of the key, where the array is one-hot.
  void fill_slot(Array& array, const Dims& place, std::int64_t j) {
    const std::int64_t width = array.shape()[3];
    for (std::int64_t head = 0; head < hk_; ++head)
      for (std::int64_t x = 0; x < width; ++x) array.set({place[0], place[1], head, x}, element(j, x, width));
  }
  double element(std::int64_t j, std::int64_t x, std::int64_t width) {
    return counting_ && j >= 0 ? (j % width == x ? 1 : 0) : dice_();
  }

  void make_queries() {
    const bool varlen = dice_.one_in(2);
    std::vector<std::int64_t> bounds{0}, used;
    for (std::int64_t s = 0; s < b_; ++s) {
      bounds.push_back(bounds.back() + (varlen ? dice_.between(0, sq_) : sq_));
      used.push_back(dice_.between(0, bounds.back() - bounds[bounds.size() - 2]));
    }
    const std::int64_t total = bounds.back() + dice_.between(0, 2);
    const auto shape = [&](std::int64_t width) { return varlen ? Dims{total, h_, width} : Dims{b_, sq_, h_, width}; };
    a.q = Array(dtype_, shape(d_), arrangement(varlen ? 3 : 4));
    a.q.fill([&](const Dims&) { return counting_ ? 0 : dice_(); });
    a.o = Array(dtype_, shape(dv_), arrangement(varlen ? 3 : 4));
    a.lse = Array(dtype_ == DType::fp64 ? DType::fp64 : DType::fp32, varlen ? Dims{h_, total} : Dims{b_, h_, sq_});
    if (varlen) a.options.cu_seqlens_q = lengths(bounds);
    if (dice_.one_in(4)) a.options.seqused_q = lengths(used);
  }

  void make_new_keys() {
    if (!appends_) return;
    std::vector<std::int64_t> bounds{0};
    for (const std::int64_t fresh : new_) bounds.push_back(bounds.back() + fresh);
    const auto shape = [&](std::int64_t width) {
      return varlen_new_ ? Dims{bounds.back() + 1, hk_, width} : Dims{b_, new_.front(), hk_, width};
    };
    a.options.k_new = gaussian(shape(d_));
    a.options.v_new = side(Array(dtype_, shape(dv_)).fill([&](const Dims& at) {
      std::size_t s = static_cast<std::size_t>(at[0]);
      std::int64_t t = at[1];
      if (varlen_new_) {
        s = 0;
        while (s + 1 < new_.size() && at[0] >= bounds[s + 1]) ++s;
        t = at[0] - bounds[s];
      }
      return element(filled_[s] - pad_[s] + t, at[at.rank() - 1], dv_);
    }));
    if (varlen_new_) a.options.cu_seqlens_k_new = lengths(bounds);
  }

  void make_rotary() {
    const std::int64_t pairs = dice_.between(1, d_ / 2), positions = capacity_ + sq_ + 40;
    const DType dtype = dice_.of({DType::fp32, DType::fp64, DType::bf16, DType::fp16});
    const auto angle = [&](const Dims& at) {
      return static_cast<double>(at[0]) / std::pow(100.0, static_cast<double>(at[1]) / static_cast<double>(pairs));
    };
    a.options.rotary_cos =
        side(Array(dtype, {positions, pairs}).fill([&](const Dims& at) { return std::cos(angle(at)); }));
    a.options.rotary_sin =
        side(Array(dtype, {positions, pairs}).fill([&](const Dims& at) { return std::sin(angle(at)); }));
    a.options.rotary_interleaved = dice_.one_in(2);
    std::vector<std::int64_t> bases;
    for (std::int64_t s = 0; s < b_; ++s) bases.push_back(dice_.between(0, 40));
    if (dice_.one_in(3)) a.options.rotary_base = lengths(bases);
  }

  void choose_rules() {
    Options& options = a.options;
    options.causal = dice_.of({Causal::none, Causal::bottom_right, Causal::bottom_right, Causal::top_left});
    if (dice_.one_in(4)) options.window.left = dice_.between(0, 60);
    if (dice_.one_in(6)) options.chunk = dice_.between(1, 60);
    if (dice_.one_in(3)) {
      const RandomBounds bounds(dice_.below(1 << 20), a.q.shape(), capacity_);
      if (!dice_.one_in(4)) options.key_begin = side(bounds.begin);
      if (!dice_.one_in(4)) options.key_end = side(bounds.end);
    }
    if (!counting_) choose_scores();
    const Dims full{1, dice_.one_in(2) ? h_ : 1, sq_, std::max<std::int64_t>(capacity_, 1)};
    if (dice_.one_in(5))
      options.mask = side(Array(DType::boolean, full).fill([&](const Dims&) { return dice_.one_in(3) ? 0 : 1; }));
  }

  /// Of the table: all but those from the first to the last key that a row of the sequence sees, and those of new keys.
  void break_unread_entries() {
    const Call call = make_forward(a.in(), a.out(), a.options);
    Array table(DType::int32, {rows_, pages_of_row_});
    table.fill([](const Dims& at) { return at[1] % 2 ? -1.0 : 2147483647.0; });
    for (std::int64_t b = 0; b < b_; ++b) {
      const Sequence s = sequence(call.problem, call.buffers, b);
      const auto keep = [&](std::int64_t begin, std::int64_t end) {  // slots
        for (std::int64_t page = begin / page_; begin < end && page <= (end - 1) / page_; ++page)
          table.set({s.key_batch, page}, static_cast<double>(call.buffers.block_table.at(s.key_batch, page)));
      };
      const Range seen = key_range(call.problem.rules.mask, s.bounds, {0, s.queries}, s.shift, s.keys);
      keep(s.first_key + seen.begin, s.first_key + seen.end);
      keep(s.first_key + s.keys - s.new_keys, s.first_key + s.keys);
    }
    a.options.block_table = side(table);
  }

  void choose_scores() {
    Options& options = a.options;
    if (dice_.one_in(4)) options.softcap = 3;
    if (dice_.one_in(4)) {
      options.dropout = 0.3;
      options.seed = dice_.below(1000);
    }
    if (dice_.one_in(4)) options.alibi_slopes = side(Array(DType::fp32, {h_}).fill(0.05));
    if (dice_.one_in(4)) options.sinks = side(Array(DType::fp32, {h_}).fill(0.7));
    const Dims full{1, dice_.one_in(2) ? h_ : 1, sq_, std::max<std::int64_t>(capacity_, 1)};
    if (dice_.one_in(5)) options.bias = side(Array(DType::fp16, full).fill([&](const Dims&) { return dice_(); }));
  }

  Arrangement arrangement(std::size_t rank) {
    if (dice_.one_in(2)) return {};
    return {.order = rank == 4 ? dice_.of({Dims{0, 2, 1, 3}, Dims{3, 1, 0, 2}}) : Dims{1, 0, 2},
            .gap = dice_.between(0, 3)};
  }
  Tensor side(const Array& array) { return sides.emplace_back(array); }
  Tensor gaussian(const Dims& shape) {
    return side(Array(dtype_, shape, arrangement(shape.rank())).fill([&](const Dims&) { return dice_(); }));
  }
  Tensor lengths(const std::vector<std::int64_t>& values) {
    return side(int32_array(std::vector<double>(values.begin(), values.end())));
  }

  bool counting_;
  Dice dice_;
  std::int64_t b_, h_, hk_, d_, dv_, sq_, page_, capacity_, pages_of_row_, rows_;
  bool paged_, appends_, varlen_new_;
  DType dtype_;
  std::vector<std::int64_t> new_, filled_, pad_, cache_row_;
};

}  // namespace narrows::test
