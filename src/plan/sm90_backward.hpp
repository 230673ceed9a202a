// Family sm90, backward: the constants of its program of dK, dV and the sums of dQ, and the programs that CI compiles. What goes
// before and after it, the rows' facts and dQ from its sums, are programs of family sm80 (facts_apart).
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/call_args.h"

#include <vector>

namespace narrows {

/// What makes kernels/backward_sm90.cu one program, or kernels/backward_wide_sm90.cu.
struct BackwardSm90Constants {
  Element element = Element::bf16;
  i32 head_width = 0, value_width = 0, query_block = 0, key_block = 0;
  i32 cluster = 1;                           // thread blocks that share a block of keys; 2: the kernel of wide heads
  i32 stages = 0, output_stages = 0;         // of Q, of dO
  i32 pace = 0;                              // clocks between two additions to dQ of a warp
  i32 turn_rows = 0;                         // deterministic: that a block of keys adds to before the next one may
  i32 sum_registers = 0, key_registers = 0;  // of a thread that sums dQ; dK and dV
  bool limits_keys = false;                  // rows do not see every key
  bool natural = false, softcap = false, alibi = false;
  bool deterministic = false;  // thread blocks add to dQ in turn
  bool takes_turns = false;    // warpgroups begin products in turn

  bool operator==(const BackwardSm90Constants&) const = default;
};

/// Of a problem that consider_sm90_backward accepts.
BackwardSm90Constants backward_sm90_constants(const Problem& problem);
Program backward_sm90_program(const BackwardSm90Constants& constants);
/// Dynamic shared memory of a thread block, and its threads.
i64 backward_sm90_shared_bytes(const BackwardSm90Constants& constants);
i32 backward_sm90_threads(const BackwardSm90Constants& constants);

std::variant<Plan, Refusal> consider_sm90_backward(const Problem& problem, const Work& work, const Machine& machine);

/// Every row of the table with masks and without, in order and in turns, and with all score rules; in fp16 one of each kernel.
std::vector<Program> planned_backward_sm90_programs(const Machine& machine);

}  // namespace narrows
