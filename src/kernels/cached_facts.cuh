// What the warp that schedules finds out besides where keys lie in a cache or in pages: the row of the cache or of the
// block table, and whether all pages are there whose keys are read.
#pragma once
#include "kernels/cache_rows.cuh"
#include "kernels/query_block.cuh"
#include "shared/cached_forward_args.h"

namespace narrows {

inline const CachedForwardArgs& cached_args(const ForwardSm90Args& args) {
  return static_cast<const CachedForwardArgs&>(args);
}

// A tile's, where keys are cached; no bytes of others.
template <bool cached> struct CacheRow {
  i32 cache_row() const { return 0; }
  void set_cache_row(i32) {}
};
template <> struct CacheRow<true> {
  i32 number;

  i32 cache_row() const { return number; }
  void set_cache_row(i32 row) { number = row; }
};

// As query_block_of. row: of the cache or of the table.
inline QueryBlock cached_block_of(const DecodeArgs& cache, const Part& queries, i32 head, i32 number, bool reports,
                                  i32& row) {
  row = 0;
  return query_block_of(cache, queries, head, number, reports, [&](bool first) {
    CacheFacts facts = cache_facts(cache, queries, first);
    facts.broken |= is_refused(cache, facts.sequence);
    row = facts.row;
    return static_cast<const SequenceFacts&>(facts);
  });
}

// Whether an entry of the table is no page, of those in which one of these keys lies. By a warp.
inline bool misses_page(const DecodeArgs& cache, const SequenceFacts& sequence, i32 row, const Keys& keys) {
  if (cache.table == nullptr || keys.begin >= keys.end) return false;
  const i32 last = cache.by_page.quotient(sequence.first_key + keys.end - 1);
  i32 wrong = 0;
  bool misses = false;
#pragma unroll 4
  for (i32 page = cache.by_page.quotient(sequence.first_key + keys.begin) + static_cast<i32>(thread_index() % kWarp);
       page <= last; page += kWarp) {
    const i32 entry = cache.table[row * cache.table_row + page * cache.table_stride];
    if (entry < 0 || cache.pages <= entry) wrong = entry, misses = true;
  }
  breaks(cache, misses, sequence.sequence, misses ? Breach{StatusCode::block_table, wrong, cache.pages - 1} : Breach{});
  return __any_sync(~0u, misses) != 0;
}

}  // namespace narrows
