// What the decode kernel and the one that appends to a cache are given when they are launched.
#pragma once
#include "shared/call_args.h"
#include "shared/divider.h"

namespace narrows {

// Of a row: its largest score so far, and the sum of weights relative to that score's reference (score.h).
struct RowSum {
  float maximum, sum;
};

constexpr int kLineSequenceBytes = 64;  // of shared memory, that a thread block keeps for each thread

struct DecodeArgs : CallArgs {
  TensorArg q, k, v, o;
  TensorArg lse;               // (b, h, s); null: not wanted
  bool whole_columns = false;  // O is written four columns at a time, which adjoin and are aligned
  i32 kv_heads = 1;
  bool cached = false;     // k and v are a cache or pages; else rows of the call's own
  TensorArg k_new, v_new;  // null: nothing is appended
  IndicesArg cache_seqlens, leftpad, cache_batch_idx, cu_seqlens_k_new, rotary_base;
  TensorArg rotary_cos, rotary_sin;  // (position, pair); null: none
  i32 rotary_pairs = 0, rotary_rows = 0;
  bool rotary_interleaved = false;
  i32 new_rows = 0;                     // of k_new: a sequence's, varlen all
  i32 capacity = 0;                     // slots of a sequence
  i32 cache_rows = 0;                   // of a cache or of the block table
  const i32* table = nullptr;           // null: a cache's rows are its sequences
  i64 table_row = 0, table_stride = 0;  // elements
  i32 page_size = 1, pages = 0;

  // Of calls whose sequences may only differ in cache_seqlens: the most slots that a sequence may have filled before the call.
  // -1: sequences may differ in other ways.
  i32 plain_filled = -1;
  bool cuts_alike = false;                  // where their lengths are alike
  Divider by_splits;                        // pieces of a row then
  Divider by_rows, by_sequence_rows;        // rows of the line: the call's, a sequence's
  Divider by_lines;                         // lines that they are dealt to blocks in, where their lengths differ
  i32 line_rows = 1;                        // of a sequence, in each
  Divider by_tile_rows, by_group, by_page;  // kv heads, query heads of one, slots of a page
  i32 line_blocks = 1;                      // thread blocks that share the line
  i32 splits = 0;                           // of a row's keys, at most; 0: as many as fill the machine
  i32 fixed_split = 0;                      // tiles of keys; not 0: all rows are cut after so many, counted from key 0
  float* outputs = nullptr;                 // scratch: of partial results, [slot][packed row][value column]
  RowSum* sums = nullptr;                   // scratch: [slot][packed row]
  u64* tickets = nullptr;                   // scratch: parts of a row that are done (ticket.h)
  i32* refused = nullptr;                   // scratch: of each sequence, whether a page is missing; null: nobody looked
};

}  // namespace narrows
