#include "core/work.hpp"

#include "core/lengths.hpp"

#include <algorithm>

namespace narrows {
namespace {

i64 product(std::initializer_list<i64> factors) {
  i64 result = 1;
  for (const i64 factor : factors) result = saturating_multiply(result, factor);
  return result;
}

i64 sum(std::initializer_list<i64> terms) {
  i64 result = 0;
  for (const i64 term : terms) result = saturating_add(result, term);
  return result;
}

struct Rows {
  i64 queries = 0;  // of all sequences
  i64 keys = 0;
  i64 seen_keys = 0;             // from the first to the last that a query sees
  i64 pairs = 0, rectangle = 0;  // a head
};

/// Sequences whose lengths and shifts come from the shapes alone: 2^62 of them are counted as fast as one.
bool all_alike(const Call& call) {
  const Buffers& buffers = call.buffers;
  return call.problem.query_form == QueryForm::dense && call.problem.key_form == KeyForm::dense && !buffers.seqused_q &&
         !buffers.seqused_k && !buffers.shift && buffers.key_begin.row_stride == 0 && buffers.key_end.row_stride == 0;
}

/// Of lengths that only the device knows: a row sees at most its window and its chunk of the keys that there may be.
Rows count_at_most(const Problem& problem) {
  const Mask& mask = problem.rules.mask;
  i64 widest = std::min(problem.max_keys, saturating_add(saturating_add(mask.left, mask.right), 1));
  if (mask.chunk) widest = std::min(widest, mask.chunk);
  Rows rows;
  rows.queries = problem.query_form == QueryForm::varlen ? problem.max_queries
                                                         : saturating_multiply(problem.batch, problem.max_queries);
  rows.keys =
      problem.key_form == KeyForm::varlen ? problem.max_keys : saturating_multiply(problem.batch, problem.max_keys);
  rows.pairs = saturating_multiply(rows.queries, widest);
  rows.seen_keys = std::min(rows.keys, rows.pairs);
  rows.rectangle = saturating_multiply(rows.queries, problem.max_keys);
  return rows;
}

Rows count(const Call& call) {
  if (call.problem.lengths_on_device) return count_at_most(call.problem);
  Rows rows;
  const i64 batch = call.problem.batch;
  const bool alike = all_alike(call);
  for (i64 b = 0; b < (alike ? std::min<i64>(batch, 1) : batch); ++b) {
    const Sequence s = sequence(call.problem, call.buffers, b);
    const Mask& mask = call.problem.rules.mask;
    const RowBounds bounds = are_read(call.problem.device) ? s.bounds : RowBounds{};
    const Range seen = key_range(mask, bounds, {0, s.queries}, s.shift, s.keys);
    rows.queries += s.queries;
    rows.keys += s.keys;
    rows.seen_keys += length(seen);
    rows.pairs = saturating_add(rows.pairs, visible_pairs(mask, bounds, s.queries, s.keys, s.shift));
    rows.rectangle = saturating_add(rows.rectangle, saturating_multiply(s.queries, s.keys));
  }
  if (alike)
    for (i64* total : {&rows.queries, &rows.keys, &rows.seen_keys, &rows.pairs, &rows.rectangle})
      *total = saturating_multiply(*total, batch);
  return rows;
}

i64 bytes(const Layout& layout, i64 item) { return layout.given ? saturating_multiply(layout.elements, item) : 0; }

}  // namespace

Work work(const Call& call) {
  const Problem& problem = call.problem;
  const Buffers& buffers = call.buffers;
  const i64 item = static_cast<i64>(item_size(problem.dtype));
  const i64 lse_item = static_cast<i64>(item_size(accumulator(problem.dtype)));
  const i64 d = problem.head_dim;
  const i64 dv = problem.value_dim;
  const Rows rows = count(call);
  const i64 result_rows = problem.query_form == QueryForm::varlen
                              ? problem.query_rows
                              : saturating_multiply(problem.batch, problem.query_rows);

  Work work;
  work.pairs = product({rows.pairs, problem.heads});
  const i64 rectangle = product({rows.rectangle, problem.heads});
  const i64 q = product({rows.queries, problem.heads, d, item});
  const i64 o = product({result_rows, problem.heads, dv, item});
  const i64 keys = product({rows.keys, problem.kv_heads, d + dv, item});
  const i64 seen_keys = product({rows.seen_keys, problem.kv_heads, d + dv, item});
  const i64 lse = problem.wants_lse ? product({result_rows, problem.heads, lse_item}) : 0;
  const i64 rules = sum({bytes(problem.bias, static_cast<i64>(item_size(buffers.bias.dtype))), bytes(problem.mask, 1),
                         bytes(problem.alibi_slopes, static_cast<i64>(item_size(buffers.alibi_slopes.dtype))),
                         bytes(problem.sinks, static_cast<i64>(item_size(buffers.sinks.dtype)))});
  const double pairs = static_cast<double>(work.pairs);
  if (problem.operation == Operation::forward) {
    work.flops = 2.0 * static_cast<double>(d + dv) * pairs;
    work.three_kernel_flops = 2.0 * static_cast<double>(d + dv) * static_cast<double>(rectangle);
    work.fused_bytes = sum({q, seen_keys, o, lse, rules});
    work.three_kernel_bytes = sum({q, keys, o, rules, product({4, rectangle, item})});
    work.three_kernel_memory = product({2, rectangle, item});
  } else {
    const i64 row_terms = product({result_rows, problem.heads, lse_item});
    work.flops = 2.0 * static_cast<double>(3 * d + 2 * dv) * pairs;
    work.three_kernel_flops = 4.0 * static_cast<double>(d + dv) * static_cast<double>(rectangle);
    // Read q, k, v, o, dO and the LSE; write dQ, dK, dV.
    work.fused_bytes = sum({q, q, seen_keys, keys, o, o, row_terms, rules});
    // P is read for dV and for dS, dP written and read, dS written and read for dQ and for dK.
    work.three_kernel_bytes = sum({q, q, keys, keys, o, o, rules, product({7, rectangle, item})});
    work.three_kernel_memory = product({3, rectangle, item});
  }
  return work;
}

}  // namespace narrows
