// Family sm90, forward: the constants of its programs, and the programs that CI compiles.
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/call_args.h"

#include <vector>

namespace narrows {

/// What makes kernels/forward_sm90.cu one program.
struct ForwardSm90Constants {
  Element element = Element::bf16;
  i32 head_width = 0, value_width = 0, query_block = 0, key_block = 0;
  i32 warps = 0;                                   // that compute, four to a warpgroup of 64 query rows
  i32 stages = 0;                                  // of K, and as many of V
  i32 query_stages = 0;                            // of Q
  i32 fact_slots = 0;                              // tiles that are known ahead
  i32 bring_registers = 0, compute_registers = 0;  // of a thread
  i32 tiles_before_wait = 0;          // of 8 keys that are exponentiated before the wait for P V; -1: ptxas says
  bool queries_in_registers = false;  // else wgmma reads Q from shared memory
  bool takes_turns = true;            // of warpgroups at the tensor cores
  bool own_output_tile = false;       // O leaves through a tile of its own, else through Q's
  bool limits_keys = false;           // rows do not see every key
  bool natural = false, softcap = false, alibi = false;
  bool cached = false;   // keys lie in a cache or in pages
  bool gathers = false;  // row by row: no box of the copy engine lies whole in a page

  bool operator==(const ForwardSm90Constants&) const = default;
};

/// Of a problem that consider_sm90 accepts.
ForwardSm90Constants forward_sm90_constants(const Problem& problem);
Program forward_sm90_program(const ForwardSm90Constants& constants);

/// Dynamic shared memory of a thread block.
i64 forward_sm90_shared_bytes(const ForwardSm90Constants& constants);

/// Slots that the copy engine brings at once of a cache or of pages, none of two pages; 0: rows are gathered.
i32 forward_sm90_box_rows(const Problem& problem, i32 key_block);

/// Scratch, in the order of the plan's regions.
enum class Sm90ForwardRegion : std::size_t { tiles_taken, refused };

/// Tiles of query rows and heads that a call's thread blocks take; some of a varlen call's have no rows.
i64 forward_sm90_tiles(const Problem& problem, i64 query_block);

/// Every row of the table with masks and without, with all score rules or none; in fp16 the rows of one width. Over caches those with
/// masks alone, in bf16.
std::vector<Program> planned_forward_sm90_programs(const Machine& machine);

}  // namespace narrows
