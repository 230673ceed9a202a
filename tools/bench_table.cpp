#include "tools/bench_table.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "core/error.hpp"

namespace narrows::cli {
namespace {

/// The table's own values of one operation and case.
struct Axes {
  std::vector<std::int64_t> d{64, 128}, sq;
  std::vector<bool> causal;
};

bool has(Op op, Case special) {
  if (special == Case::plain) return true;
  return (op == Op::decode) == (special == Case::paged16);
}

Axes axes_of(Op op, Case special, bool quick) {
  Axes axes{{64, 128}, {2048}, {false}};
  if (op == Op::decode) {
    axes.sq = {1};
  } else if (op == Op::backward) {
    axes.sq = {512, 1024, 4096};
    axes.causal = {false, true};
  } else if (special == Case::plain) {
    axes.sq = {512, 1024, 4096, 16384};
    axes.causal = {false, true};
  } else if (special == Case::window512) {
    axes.sq = {16384};
    axes.causal = {true};
  } else if (special == Case::varlen) {
    axes.sq = {16384};
    axes.causal = {false, true};
  } else if (special == Case::gqa4) {
    axes.causal = {false, true};
  }
  if (quick) {
    axes.d = {64};
    if (op == Op::forward) axes.sq = {1024, 4096};
    if (op == Op::backward) axes.sq = {1024};
  }
  return axes;
}

/// Special cases where no size is given: with one, rows are what the command line says and no more.
std::vector<Case> cases_of(const Selection& selection, Op op) {
  std::vector<Case> cases = selection.special;
  if (cases.empty()) {
    const bool sized =
        !selection.sq.empty() || selection.b || selection.h || selection.hk || selection.sk || selection.dv;
    if (op == Op::backward || sized || (selection.quick && op == Op::forward)) return {Case::plain};
    cases.assign(kCases.begin(), kCases.end());
  }
  std::erase_if(cases, [op](Case special) { return !has(op, special); });
  return cases;
}

/// Keys whose K and V of 8 heads lie well within the last cache, and such that go well beyond it: powers of two.
std::vector<std::int64_t> decode_keys(const Row& row, std::int64_t last_cache) {
  constexpr std::int64_t kUsualCache = std::int64_t{32} << 20, kMostBytes = std::int64_t{1} << 30;
  const std::int64_t cache = last_cache > 0 ? last_cache : kUsualCache;
  const std::int64_t bytes_of_key = row.hk * (row.d + row.dv) * static_cast<std::int64_t>(item_size(row.dtype));
  const auto keys = [&](std::int64_t bytes) {
    return static_cast<std::int64_t>(
        std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(bytes / bytes_of_key, 1))));
  };
  return {keys(cache / 2), keys(std::min(4 * cache, kMostBytes))};
}

/// Queries times heads stay the same along the table, so that rows take similar times; each thread has a head of its own.
std::int64_t heads_for(std::int64_t sq, int threads) {
  constexpr std::int64_t kQueryHeads = 16384, kMost = 32, kMostForThreads = 8;
  const std::int64_t least = std::min<std::int64_t>(threads, kMostForThreads);
  return std::clamp(kQueryHeads / std::max<std::int64_t>(sq, 1), least, kMost);
}

constexpr std::int64_t kGroup = 4;  // query heads of one kv head, in decode and gqa4

std::int64_t kv_heads(const Selection& selection, Op op, Case special, std::int64_t h) {
  const bool grouped = op == Op::decode || special == Case::gqa4;
  const std::int64_t hk = selection.hk.value_or(grouped && h % kGroup == 0 ? h / kGroup : h);
  if (special == Case::gqa4 && h != kGroup * hk)
    refuse_value(selection.hk ? "--hk" : "--h", selection.hk ? hk : h,
                 "--case gqa4 has four query heads for each kv head");
  return hk;
}

/// But for sk and causal.
Row row_of(const Selection& selection, Op op, Case special, DType dtype, std::int64_t sq, std::int64_t d, int threads) {
  constexpr std::int64_t kDecodeHeads = 32;
  if (special == Case::varlen && (selection.b || selection.sk))
    refuse_value(selection.b ? "--b" : "--sk", selection.b ? *selection.b : *selection.sk,
                 "sequences and lengths of --case varlen follow from --sq");
  std::int64_t h = op == Op::decode ? kDecodeHeads : heads_for(sq, threads);
  if (special == Case::gqa4) h = (h + kGroup - 1) / kGroup * kGroup;
  h = selection.h.value_or(h);
  const std::int64_t b = special == Case::varlen ? std::ssize(zipf_lengths(sq)) : selection.b.value_or(1);
  return {.op = op,
          .dtype = dtype,
          .b = b,
          .h = h,
          .hk = kv_heads(selection, op, special, h),
          .sq = sq,
          .sk = sq,
          .d = d,
          .dv = selection.dv.value_or(d),
          .causal = false,
          .special = special,
          .threads = threads};
}

void add_rows(std::vector<Row>& rows, const Selection& selection, Op op, Case special, int threads,
              std::int64_t last_cache) {
  Axes axes = axes_of(op, special, selection.quick);
  if (!selection.d.empty()) axes.d = selection.d;
  if (!selection.sq.empty()) axes.sq = selection.sq;
  if (!selection.causal.empty()) axes.causal = selection.causal;
  std::vector<DType> dtypes{DType::fp32, DType::bf16, DType::fp16};
  if (selection.quick) dtypes.pop_back();
  if (!selection.dtype.empty()) dtypes = selection.dtype;
  for (const DType dtype : dtypes)
    for (const std::int64_t d : axes.d)
      for (const bool causal : axes.causal)
        for (const std::int64_t sq : axes.sq) {
          Row row = row_of(selection, op, special, dtype, sq, d, threads);
          row.causal = causal;
          std::vector<std::int64_t> keys{sq};
          if (op == Op::decode) keys = decode_keys(row, last_cache);
          if (selection.sk) keys = {*selection.sk};
          for (const std::int64_t sk : keys) {
            row.sk = sk;
            rows.push_back(row);
          }
        }
}

std::vector<std::int64_t> thread_counts(const Selection& selection, int all) {
  if (!selection.threads.empty()) return selection.threads;
  if (all == 1 || selection.quick) return {all};
  return {1, all};
}

}  // namespace

std::vector<std::int32_t> zipf_lengths(std::int64_t total) {
  constexpr std::int64_t kStride = 7;  // of the walk that ends the order by length
  const std::int64_t longest = std::max<std::int64_t>(total / 4, 1);
  std::vector<std::int32_t> sorted;
  for (std::int64_t rank = 1, left = total; left > 0; ++rank) {
    const std::int64_t length = std::min(std::max<std::int64_t>(longest / rank, 1), left);
    sorted.push_back(static_cast<std::int32_t>(length));
    left -= length;
  }
  const std::int64_t count = std::ssize(sorted);
  const std::int64_t stride = std::gcd(count, kStride) == 1 ? kStride : 1;
  std::vector<std::int32_t> lengths;
  for (std::int64_t n = 0; n < count; ++n) lengths.push_back(sorted[static_cast<std::size_t>(n * stride % count)]);
  return lengths;
}

std::vector<Row> rows_of(const Selection& selection, int threads, std::int64_t last_cache) {
  const std::vector<Op> ops = selection.op.empty() ? std::vector<Op>(kOps.begin(), kOps.end()) : selection.op;
  std::vector<Row> rows;
  for (const Op op : ops)
    for (const std::int64_t count : thread_counts(selection, threads))
      for (const Case special : cases_of(selection, op))
        add_rows(rows, selection, op, special, static_cast<int>(count), last_cache);
  if (rows.empty())
    refuse_value("--case", name(selection.special.front()),
                 "paged16 is of decode, the others of forward and backward; no row is left", "plain");
  return rows;
}

}  // namespace narrows::cli
