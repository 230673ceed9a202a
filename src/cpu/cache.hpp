// Where the keys of a sequence lie: in a tensor, in a cache row, or in pages.
#pragma once

#include "core/problem.hpp"

namespace narrows::cpu {

/// Row j of a kv head in `view`, which is k or v. Reads the block table's entry of j's page and no other.
inline std::byte* key_row(const Problem& problem, const Buffers& buffers, const View& view, const Sequence& sequence,
                          i64 j, i64 kv_head) {
  const i64 slot = sequence.first_key + j;
  if (problem.key_form != KeyForm::pages) return view.at(sequence.key_batch, slot, kv_head);
  const i64 page = buffers.block_table.at(sequence.key_batch, slot / problem.page_size);
  return view.at(page, slot % problem.page_size, kv_head);
}

/// Row after row of `keys`: their addresses, with one look at the block table for each page.
inline void key_rows(const Problem& problem, const Buffers& buffers, const View& view, const Sequence& sequence,
                     Range keys, i64 kv_head, const std::byte** rows) {
  const bool pages = problem.key_form == KeyForm::pages;
  for (i64 j = keys.begin; j < keys.end;) {
    const i64 together = pages ? problem.page_size - (sequence.first_key + j) % problem.page_size : keys.end - j;
    const i64 end = min_of(keys.end, j + together);
    const std::byte* row = key_row(problem, buffers, view, sequence, j, kv_head);
    for (; j < end; ++j, row += view.strides[1]) *rows++ = row;
  }
}

/// Slots that were filled before the call: the rotary position of the first new key.
inline i64 filled_slots(const Sequence& sequence) { return sequence.first_key + sequence.keys - sequence.new_keys; }

}  // namespace narrows::cpu
