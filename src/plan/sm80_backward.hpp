// Family sm80, backward: the constants of its programs, and the programs that CI compiles.
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/backward_args.h"

#include <vector>

namespace narrows {

/// What makes kernels/backward_*.cu programs. Lengths, strides, masks and every number of a rule are arguments instead.
struct BackwardConstants {
  Element element = Element::bf16;
  Element bias_element = Element::fp32;
  i32 head_width = 0, value_width = 0;
  i32 query_block = 0;  // rows of Q of a step
  i32 key_block = 0;    // keys of a thread block
  i32 warps = 0;
  i32 column_warps = 1;  // that share the same keys: each has a part of the columns of dK and dV
  i32 stages = 2;        // of Q and dO
  i32 copy_bytes = 0, resident_blocks = 0;
  bool vector_sums = false;    // four sums at once, from compute capability 9.0 on
  bool deterministic = false;  // thread blocks add to dQ in turn
  bool facts_apart = false;    // of rows, as family sm90 reads them (fact_place)
  bool natural = false;        // scores are logits already when they are exponentiated
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false;

  bool operator==(const BackwardConstants&) const = default;
};

/// The kernels of a backward call, in the order in which they run.
enum class BackwardKernel { rows, keys, queries, sums, bias };

BackwardConstants backward_constants(const Problem& problem, const Plan& plan);

/// What a kernel makes of a call's constants: those that do not matter to it are the same for all calls, which so share programs.
BackwardConstants constants_of(BackwardKernel kernel, const BackwardConstants& constants);
/// constants: as constants_of answers.
Program backward_program(BackwardKernel kernel, const BackwardConstants& constants);

/// Dynamic shared memory of a thread block. constants: as constants_of answers.
i64 backward_shared_bytes(BackwardKernel kernel, const BackwardConstants& constants);
/// Of the kernel `keys`.
i64 backward_shared_bytes(const BackwardConstants& constants);

/// Thread blocks and scratch of a call are counted in these.
struct Sm80BackwardBlocks {
  i64 query_blocks = 0, key_blocks = 0;  // of a pair: of a sequence, or varlen of all sequences
  i64 query_pairs = 0, key_pairs = 0;    // (sequence, head) and (sequence, kv head), or varlen heads
};
Sm80BackwardBlocks backward_blocks(const Problem& problem, i64 query_block, i64 key_block);
/// Of a deterministic call, whose warps of each query block wait for each other.
i64 backward_turns(const Problem& problem, i64 query_block, int warps);
/// Thread blocks of the kernel `bias`.
i64 bias_blocks(const Problem& problem, i64 query_block, i64 key_block);

/// Why a call has too many blocks of these; empty where it has not.
std::string backward_size_refusal(const Problem& problem, const BackwardConstants& constants);
/// Kv heads worked on together: their Q, dO and sums of dQ, which the blocks of all their keys read and add to, are in L2. Taking
/// turns, the more heads the fewer blocks wait for each other; family sm90 is so fast that memory cannot feed all heads at once.
i64 backward_section(const Problem& problem, const Machine& machine, const Plan& plan);
/// What the products of a plan are, for head dims that it pads.
double padded_backward_flops(const Work& work, const Problem& problem, const Plan& plan);
/// Linear in the tokens.
Regions backward_regions(const Problem& problem, const BackwardConstants& constants);

/// Scratch, in the order of the plan's regions. The kernel `rows` writes the first two, the others begin at 0.
enum class Sm80Region : std::size_t { rows, query_sums, far_rows, slope_sums, sink_sums, turns };

std::variant<Plan, Refusal> consider_sm80_backward(const Problem& problem, const Work& work, const Machine& machine);

/// Of the kernel `keys`: in bf16 the plain program of every width; for two widths that with everything on, for four fp32's plain
/// one; for one width each rule, order and gathered elements alone, and fp16. The other kernels of plain calls of 64 and 128
/// columns, and those of one call with everything on.
std::vector<Program> planned_backward_programs(const Machine& machine);

}  // namespace narrows
