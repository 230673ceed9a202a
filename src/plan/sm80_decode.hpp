// Family sm80, few query rows against keys that are many, in a cache, in pages or in tensors: the constants of its programs, and
// the programs that CI compiles.
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/decode_args.h"

#include <vector>

namespace narrows {

/// Keys of a tile: a lane's share of two products.
inline constexpr i64 kDecodeTile = 16;

/// What makes kernels/decode_sm80.cu one program, and family sm90's decode_sm90.cu.
struct DecodeConstants {
  Element element = Element::bf16;
  Element bias_element = Element::fp32;
  i32 head_width = 0, value_width = 0;
  i32 query_block = 8;  // query rows times heads that share a kv head, of a thread block: 8 or 16, sm90 64
  i32 key_block = kDecodeTile;
  i32 warps = 0, copy_bytes = 0, resident_blocks = 0;
  bool wide = false;     // Q is read again for every tile, K and V are loaded a step at a time
  bool natural = false;  // scores are logits already when they are exponentiated
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false;
  bool turned = false;  // queries by their positions

  bool operator==(const DecodeConstants&) const = default;
};

DecodeConstants decode_constants(const Problem& problem, const Plan& plan);
Program decode_program(const DecodeConstants& constants);
/// Of kernels/append_sm80.cu, which writes new keys and values to the cache before; its thread blocks have so many warps.
inline constexpr i32 kAppendWarps = 4;
Program append_program(Element element);

/// Dynamic shared memory of a thread block.
i64 decode_shared_bytes(const DecodeConstants& constants);
/// Columns of a partial result.
i64 decode_columns(const DecodeConstants& constants);

/// Tiles of packed rows of a sequence of a dense q.
i64 decode_row_tiles(const Problem& problem, i64 packed_rows);

/// Why caches or tensors are too large for a kernel with thread blocks of so many packed rows and tiles of so many keys.
std::string decode_size_refusal(const Problem& problem, i64 packed_rows, i64 tile);
/// How keys are split, and scratch for partial results of so many columns, a row's at most most_parts. Of a plan that has thread
/// blocks and tiles.
void share_out(Plan& plan, const Problem& problem, i64 columns, i64 most_parts);

/// Scratch, in the order of the plan's regions.
enum class Sm80DecodeRegion : std::size_t { tickets, sums, outputs, refused };

/// Whether a forward call is this family's decoding: keys in a cache or in pages, or num_splits.
bool decodes(const Problem& problem);
/// Of head dims above 256.
bool decodes_wide(const Problem& problem);

std::variant<Plan, Refusal> consider_sm80_decode(const Problem& problem, const Work& work, const Machine& machine);

/// In bf16 and fp32 the plain program of every row of the table and, at 128 columns, with every rule and element by element; in fp16
/// the plain ones there. And those that append.
std::vector<Program> planned_decode_programs(const Machine& machine);

}  // namespace narrows
