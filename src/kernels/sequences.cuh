// Facts of the sequences of a call: where their rows lie and how many there are. Lengths that break a rule are taken as the
// nearest that do not: nothing outside the tensors is read.
#pragma once
#include "kernels/elements.cuh"
#include "shared/status.h"
#include "shared/tile_order.h"

namespace narrows {

struct SequenceFacts {
  i32 sequence;
  i32 queries, keys;           // used
  i32 first_query, first_key;  // in the tensors
  i64 shift;
  bool broken;  // a length breaks a rule: the results are NaN
};

// ahead: perhaps before the kernel ahead has written it; past L1, where what is read now must not stay.
inline i32 at(const IndicesArg& values, i32 index, bool ahead = false) {
  const i32* const place = values.data + index * values.stride;
  return ahead ? static_cast<i32>(load_relaxed(reinterpret_cast<const u32*>(place))) : *place;
}

// The first breach of a call is kept. `reports`: of the threads that find the same one, this writes it.
inline bool breaks(const CallArgs& args, bool reports, i32 sequence, const Breach& breach) {
  if (breach.code == StatusCode::kept) return false;
  if (reports && args.status != nullptr && atomicCAS(args.status, 0, static_cast<i32>(breach.code)) == 0) {
    args.status[1] = sequence;
    args.status[2] = breach.value;
    args.status[3] = breach.limit;
  }
  return true;
}

// Where sequences begin among a tensor's rows. Not given: every sequence has `rows` of its own.
struct Bounds {
  const IndicesArg& starts;
  i32 rows;
  StatusCode code;  // of a wrong start
};
inline Bounds query_bounds(const CallArgs& args) {
  return {args.cu_seqlens_q, args.query_rows, StatusCode::cu_seqlens_q_start};
}
inline Bounds key_bounds(const CallArgs& args) {
  return {args.cu_seqlens_k, args.key_rows, StatusCode::cu_seqlens_k_start};
}

inline bool is_varlen(const IndicesArg& starts) { return starts.data != nullptr; }

struct Part {
  i32 sequence, begin, count;  // of its rows
  bool broken;
};

// Of sequence s. Number `batch` is of the rows behind the last sequence.
struct Limits {
  i32 begin, end;
  Breach breach;

  Limits(const CallArgs& args, const Bounds& bounds, i32 s) {
    const bool last = s == args.batch;
    begin = at(bounds.starts, s);
    end = last ? bounds.rows : at(bounds.starts, s + 1);
    breach = last ? bounds_breach(bounds.code, s == 0 ? begin : 0, begin, end, true)
                  : bounds_breach(bounds.code, begin, end, bounds.rows, s == 0);
  }
};

// Whether starts are given that are no bounds: one answer for the thread block, and a barrier of it.
inline bool bounds_break(const CallArgs& args, const Bounds& bounds, bool reports = false) {
  if (!is_varlen(bounds.starts)) return false;
  bool broken = false;
  for (i32 s = static_cast<i32>(threadIdx.x); s <= args.batch; s += kThreads)
    broken |= breaks(args, reports, clamp_to(s, 0, max_of(args.batch - 1, 0)), Limits(args, bounds, s).breach);
  return __syncthreads_or(broken) != 0;
}

// Varlen: finds the sequence of a block by looking at all bounds, and whether these are bounds. Rows behind the last sequence
// are one more, of number `batch`. With broken bounds every row of the tensor counts as one sequence's.
inline Part find_sequence(const CallArgs& args, const Bounds& bounds, i32 block, i32 rows_of_block, bool reports) {
  __shared__ i32 place[3];  // sequence, its first row, and the row behind its last
  __shared__ bool broken;
  if (threadIdx.x == 0) broken = false;
  __syncthreads();
  for (i32 s = static_cast<i32>(threadIdx.x); s <= args.batch; s += kThreads) {
    const Limits limits(args, bounds, s);
    if (breaks(args, reports, clamp_to(s, 0, max_of(args.batch - 1, 0)), limits.breach))
      broken = true;
    else if (first_block(limits.begin, s, rows_of_block) <= block &&
             block < first_block(limits.end, s + 1, rows_of_block)) {
      place[0] = s;
      place[1] = limits.begin;
      place[2] = limits.end;
    }
  }
  __syncthreads();
  if (broken) return {0, 0, bounds.rows, true};
  return {place[0], place[1], place[2] - place[1], false};
}

// The rows of sequence s.
inline Part part_of(const CallArgs& args, const Bounds& bounds, i32 s, bool reports) {
  if (bounds.starts.data == nullptr) return {s, 0, bounds.rows, false};
  const i32 begin = at(bounds.starts, s), end = at(bounds.starts, s + 1);
  const bool broken = breaks(args, reports, s, bounds_breach(bounds.code, begin, end, bounds.rows, s == 0));
  const i32 first = clamp_to(begin, 0, bounds.rows);
  return {s, first, clamp_to(end, first, bounds.rows) - first, broken};
}

// How many of them are used, of which bias and mask must have `reach`.
inline i32 used_rows(const CallArgs& args, const IndicesArg& used, StatusCode code, StatusCode reach_code, i32 reach,
                     const Part& part, bool reports, bool& broken) {
  i32 count = part.count;
  if (used.data) {
    const i32 given = at(used, part.sequence);
    broken |= breaks(args, reports, part.sequence, used_breach(code, given, count));
    count = clamp_to(given, 0, count);
  }
  broken |= breaks(args, reports, part.sequence, reach_breach(reach_code, count, reach));
  return count;
}

// Everything about the sequence that these are the query rows and the keys of.
inline SequenceFacts facts_of(const CallArgs& args, const Part& queries, const Part& keys, bool reports) {
  SequenceFacts facts{};
  facts.sequence = queries.sequence;
  facts.first_query = queries.begin;
  facts.first_key = keys.begin;
  facts.broken = queries.broken || keys.broken;
  facts.queries = used_rows(args, args.seqused_q, StatusCode::seqused_q, StatusCode::score_rows, args.score_rows,
                            queries, reports, facts.broken);
  facts.keys = used_rows(args, args.seqused_k, StatusCode::seqused_k, StatusCode::score_keys, args.score_keys, keys,
                         reports, facts.broken);
  facts.shift = i64{facts.keys} - facts.queries;
  if (args.top_left) facts.shift = 0;
  if (args.shift.data) facts.shift = at(args.shift, facts.sequence);
  if (args.offset.place)
    facts.broken |= breaks(args, reports, facts.sequence, offset_breach(static_cast<u64>(*args.offset.place)));
  return facts;
}

// Keys as 32-bit numbers.
struct Keys {
  i32 begin, end;
};

// The sequence's own. Of a null address the strides are 0.
inline RowBounds row_bounds(const CallArgs& args, const SequenceFacts& facts) {
  const auto first = [&](const RowIndicesArg& values) {
    return values.data + facts.sequence * values.batch_stride + facts.first_query * values.stride;
  };
  return {first(args.key_begin), first(args.key_end), args.key_begin.stride, args.key_end.stride};
}

// What row i of the sequence sees; i is a row that exists.
inline Keys seen_keys(const CallArgs& args, const SequenceFacts& facts, i32 i) {
  const Range range = row_keys(args.visibility, row_bounds(args, facts), i, facts.shift, facts.keys);
  return {static_cast<i32>(range.begin), static_cast<i32>(range.end)};
}

// Query rows of one head that a thread block computes.
struct QueryBlock : SequenceFacts {
  i32 head;
  i32 first_row;  // within the sequence
  i32 rows;       // of them, that the tensors have; results are written for these
};

// Block `number` of the rows of a pair: of those of sequence `queries`, if its bounds are known to be some.
// facts_of_sequence(reports)
template <class FactsOfSequence>
inline QueryBlock query_block_of(const CallArgs& args, const Part& queries, i32 head, i32 number, bool reports,
                                 const FactsOfSequence& facts_of_sequence) {
  QueryBlock block{};
  block.sequence = queries.sequence;
  block.first_query = queries.begin;
  block.broken = queries.broken;
  i32 first_row = number * kBlockQueries;
  if (is_varlen(args.cu_seqlens_q))
    first_row -= static_cast<i32>(first_block(queries.begin, queries.sequence, kBlockQueries)) * kBlockQueries;
  if (queries.sequence < args.batch && !queries.broken)
    static_cast<SequenceFacts&>(block) = facts_of_sequence(reports && head == 0 && first_row == 0);
  block.head = head;
  block.first_row = first_row;
  block.rows = clamp_to(queries.count - first_row, 0, kBlockQueries);
  return block;
}

// The same of a call's own keys.
inline QueryBlock query_block_of(const CallArgs& args, const Part& queries, i32 head, i32 number, bool reports) {
  return query_block_of(args, queries, head, number, reports, [&](bool first) {
    return facts_of(args, queries, part_of(args, key_bounds(args), queries.sequence, first), first);
  });
}

// A dense call's pairs are (batch, head), a varlen one's are heads.
inline u32 query_pairs(const CallArgs& args) {
  return static_cast<u32>(is_varlen(args.cu_seqlens_q) ? args.heads : args.batch * args.heads);
}
inline i32 head_of(const CallArgs& args, const TileNumber& tile) {
  return is_varlen(args.cu_seqlens_q) ? tile.pair : tile.pair % args.heads;
}

// blocks: of the query rows of a pair; section: pairs worked on together (tile_order.h).
inline QueryBlock find_query_block(const CallArgs& args, i32 blocks, i32 section, u32 index) {
  const TileNumber tile = tile_number(index, static_cast<u32>(blocks), query_pairs(args), static_cast<u32>(section));
  const i32 head = head_of(args, tile);
  Part queries{tile.pair / args.heads, 0, args.query_rows, false};
  if (is_varlen(args.cu_seqlens_q))
    queries = find_sequence(args, query_bounds(args), tile.block, kBlockQueries, head == 0 && tile.block == 0);
  return query_block_of(args, queries, head, tile.block, threadIdx.x == 0);
}

}  // namespace narrows
