// Facts of the sequences of a call whose keys lie in a cache, in pages, or in tensors of the call's own. As sequences.cuh: lengths
// that break a rule are taken as the nearest that do not.
#pragma once
#include "kernels/sequences.cuh"
#include "shared/decode_args.h"

namespace narrows {

// Key j lies in slot first_key + j of row `row` of k and v, or of the block table.
struct CacheFacts : SequenceFacts {
  i32 row;
  i32 filled;               // slots before the call
  i32 first_new, new_keys;  // rows of k_new; of `keys`, the last ones
};

// The first breach of a sequence. Found by all who look, it is reported by one.
class Breaches {
 public:
  void add(const Breach& breach) {
    if (first_.code == StatusCode::kept) first_ = breach;
  }
  // Of a value that must be in [0, most]; what it is taken for.
  i32 bounded(StatusCode code, i32 value, i32 most) {
    add(value_breach(code, value, most));
    return clamp_to(value, 0, most);
  }
  const Breach& first() const { return first_; }

 private:
  Breach first_;
};

// The rows of sequence s.
inline Part found_part(const Bounds& bounds, i32 s, Breaches& breaches) {
  if (bounds.starts.data == nullptr) return {s, 0, bounds.rows, false};
  const i32 begin = at(bounds.starts, s), end = at(bounds.starts, s + 1);
  breaches.add(bounds_breach(bounds.code, begin, end, bounds.rows, s == 0));
  const i32 first = clamp_to(begin, 0, bounds.rows);
  return {s, first, clamp_to(end, first, bounds.rows) - first, false};
}

inline i32 found_used(const IndicesArg& used, StatusCode code, const Part& part, Breaches& breaches) {
  if (used.data == nullptr) return part.count;
  const i32 given = at(used, part.sequence);
  breaches.add(used_breach(code, given, part.count));
  return clamp_to(given, 0, part.count);
}

// Where the keys of sequence s are, and how many.
inline void find_cached_keys(const DecodeArgs& args, i32 s, CacheFacts& facts, Breaches& breaches, bool ahead) {
  facts.filled = args.capacity;
  if (args.cache_batch_idx.data)
    facts.row = breaches.bounded(StatusCode::cache_batch_idx, at(args.cache_batch_idx, s), args.cache_rows - 1);
  if (args.cache_seqlens.data)
    facts.filled = breaches.bounded(StatusCode::cache_seqlens, at(args.cache_seqlens, s, ahead), args.capacity);
  if (args.leftpad.data) facts.first_key = breaches.bounded(StatusCode::leftpad, at(args.leftpad, s), facts.filled);
  if (args.k_new.data) {
    const Part fresh =
        found_part({args.cu_seqlens_k_new, args.new_rows, StatusCode::cu_seqlens_k_new_start}, s, breaches);
    const i32 room = args.capacity - facts.filled;
    facts.first_new = fresh.begin;
    facts.new_keys = min_of(fresh.count, room);
    if (fresh.count > room) breaches.add({StatusCode::capacity, facts.filled, args.capacity - fresh.count});
  }
  facts.keys = facts.filled + facts.new_keys - facts.first_key;
}

// Whether the appending kernel found a page missing.
inline bool is_refused(const DecodeArgs& args, i32 s) { return args.refused != nullptr && args.refused[s] != 0; }

// The position of query row 0, which rotates its rows.
inline i32 rotary_base(const DecodeArgs& args, const CacheFacts& facts) {
  return args.rotary_base.data ? at(args.rotary_base, facts.sequence) : facts.filled;
}

inline void check_rotary(const DecodeArgs& args, const CacheFacts& facts, Breaches& breaches) {
  const i32 base = rotary_base(args, facts);
  if (base < 0) breaches.add({StatusCode::rotary_base, base, 0});
  const i64 queries = facts.queries ? i64{base} + facts.queries : 0,
            keys = facts.new_keys ? i64{facts.filled} + facts.new_keys : 0;
  const i32 reach = static_cast<i32>(min_of(max_of(queries, keys), i64{0x7fffffff}));
  if (reach > args.rotary_rows) breaches.add({StatusCode::rotary_reach, reach, args.rotary_rows});
}

// Everything about the sequence that these are the query rows of.
inline CacheFacts cache_facts(const DecodeArgs& args, const Part& queries, bool reports, bool ahead = false) {
  const i32 s = queries.sequence;
  CacheFacts facts{};
  Breaches breaches;
  facts.sequence = facts.row = s;
  facts.first_query = queries.begin;
  facts.queries = found_used(args.seqused_q, StatusCode::seqused_q, queries, breaches);
  breaches.add(reach_breach(StatusCode::score_rows, facts.queries, args.score_rows));
  if (args.cached) {
    find_cached_keys(args, s, facts, breaches, ahead);
  } else {
    const Part keys = found_part(key_bounds(args), s, breaches);
    facts.first_key = keys.begin;
    facts.keys = found_used(args.seqused_k, StatusCode::seqused_k, keys, breaches);
  }
  breaches.add(reach_breach(StatusCode::score_keys, facts.keys, args.score_keys));
  facts.shift = i64{facts.keys} - facts.queries;
  if (args.top_left) facts.shift = 0;
  if (args.shift.data) facts.shift = at(args.shift, s);
  if (args.offset.place) breaches.add(offset_breach(static_cast<u64>(*args.offset.place)));
  if (args.rotary_pairs) check_rotary(args, facts, breaches);
  facts.broken = breaks(args, reports, s, breaches.first());
  return facts;
}

}  // namespace narrows
