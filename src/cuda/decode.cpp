#include "cuda/decode.hpp"

#include "cuda/call_args.hpp"
#include "cuda/kernel.hpp"
#include "cuda/scratch.hpp"
#include "plan/sm80_decode.hpp"
#include "shared/decode_line.h"

#include <algorithm>
#include <array>

namespace narrows::cuda {
namespace {

/// Beside forward's 0 and those of backward.
enum class DecodeKernel : i32 { decode = 6, append = 7 };

ProgramKey key_of(const DecodeConstants& constants) {
  KeyBits bits;
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    bits.add(size, 16);
  bits.add(static_cast<i32>(DecodeKernel::decode), 4);
  for (const i32 number : {static_cast<i32>(constants.element), static_cast<i32>(constants.bias_element),
                           constants.warps, constants.copy_bytes, constants.resident_blocks})
    bits.add(number, 8);
  for (const bool rule : {constants.wide, constants.natural, constants.softcap, constants.alibi, constants.bias,
                          constants.mask, constants.dropout})
    bits.add(rule, 1);
  return bits.key();
}

ProgramKey append_key(Element element) {
  KeyBits bits;
  bits.add(0, 64);
  bits.add(static_cast<i32>(DecodeKernel::append), 4);
  bits.add(static_cast<i32>(element), 8);
  return bits.key();
}

bool is_cached(const Problem& problem) {
  return problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages;
}

i64 bytes_of(const Plan& plan, Sm80DecodeRegion region) {
  return plan.workspace[static_cast<std::size_t>(region)].bytes;
}

void set_cache(DecodeArgs& args, const Problem& problem, const Buffers& buffers) {
  const auto indices = [](const Indices& from) { return IndicesArg{from.data, from.stride}; };
  args.cached = is_cached(problem);
  args.k_new = tensor_arg(buffers.k_new);
  args.v_new = tensor_arg(buffers.v_new);
  args.cache_seqlens = indices(buffers.cache_seqlens);
  args.leftpad = indices(buffers.leftpad);
  args.cache_batch_idx = indices(buffers.cache_batch_idx);
  args.cu_seqlens_k_new = indices(buffers.cu_seqlens_k_new);
  args.rotary_base = indices(buffers.rotary_base);
  args.rotary_cos = tensor_arg(buffers.rotary_cos);
  args.rotary_sin = tensor_arg(buffers.rotary_sin);
  args.rotary_pairs = narrow(problem.rotary_pairs);
  args.rotary_rows = narrow(problem.rotary_rows);
  args.rotary_interleaved = problem.rotary_interleaved;
  args.new_rows = narrow(problem.new_rows);
  args.capacity = narrow(problem.capacity);
  args.cache_rows = narrow(problem.cache_rows);
  if (problem.key_form != KeyForm::pages) return;
  args.table = buffers.block_table.data;
  args.table_row = buffers.block_table.row_stride;
  args.table_stride = buffers.block_table.stride;
  args.page_size = narrow(problem.page_size);
  args.pages = narrow(problem.key_batches);
}

/// DecodeArgs::plain_filled.
i32 plain_filled(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const Mask& mask = problem.rules.mask;
  const bool by_sequence = buffers.seqused_q || buffers.leftpad || buffers.cache_batch_idx ||
                           buffers.cu_seqlens_k_new || buffers.rotary_base || buffers.shift || buffers.key_begin ||
                           buffers.key_end || buffers.offset.place || problem.query_form == QueryForm::varlen;
  const bool by_row = problem.rules.causal == Causal::top_left || mask.left < kUnlimited || mask.chunk != 0 ||
                      (mask.right != 0 && mask.right < kUnlimited) || problem.mask.given || problem.bias.given;
  if (!is_cached(problem) || by_sequence || by_row || plan.most_splits || plan.split_keys) return -1;
  i64 most = problem.capacity - problem.new_rows;
  if (problem.rotary_pairs) most = std::min(most, problem.rotary_rows - std::max(problem.query_rows, problem.new_rows));
  return narrow(std::max<i64>(most, -1));
}

void set_line(DecodeArgs& args, const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const i32 blocks = narrow(plan.blocks);
  args.splits = plan.most_splits;
  args.fixed_split = narrow(plan.split_keys / kDecodeTile);
  args.row_tiles = narrow(decode_row_tiles(problem, plan.query_block));
  const i32 rows = args.batch * args.kv_heads * args.row_tiles;  // no more than tiles, which the planner has counted
  args.plain_splits = most_splits(rows, blocks);
  if (problem.query_form == QueryForm::dense && fills(rows * args.plain_splits, blocks))
    args.plain_filled = plain_filled(problem, plan, buffers);
}

struct Kernels {
  const Kernel* append = nullptr;  // null: nothing is appended
  const Kernel* decode = nullptr;  // null: there is no query row
};

bool has_rows(const Problem& problem) { return problem.batch * problem.heads * problem.query_rows != 0; }
bool appends_rows(const Problem& problem) { return problem.appends && problem.batch * problem.new_rows != 0; }

/// find(key, make_program)
template <class Find> Kernels kernels_of(const Problem& problem, const Plan& plan, const Find& find) {
  Kernels kernels;
  const auto element = static_cast<Element>(problem.dtype);
  const DecodeConstants constants = decode_constants(problem, plan);
  if (appends_rows(problem)) kernels.append = &find(append_key(element), [&] { return append_program(element); });
  if (has_rows(problem)) kernels.decode = &find(key_of(constants), [&] { return decode_program(constants); });
  return kernels;
}

/// Thread blocks of the appending kernel: some of a sequence's new rows each.
unsigned append_blocks(const Problem& problem, const Plan& plan) {
  const i64 of_sequence = std::clamp<i64>(ceil_div<i64>(4 * plan.blocks, problem.batch), 1, problem.new_rows);
  return static_cast<unsigned>(problem.batch * of_sequence);
}

}  // namespace

DecodeArgs decode_args(const Problem& problem, const Plan& plan, const Buffers& buffers, std::byte* scratch) {
  DecodeArgs args;
  set_call_args(args, problem, buffers, decode_constants(problem, plan).natural);
  args.q = tensor_arg(buffers.q);
  args.k = tensor_arg(buffers.k);
  args.v = tensor_arg(buffers.v);
  args.o = tensor_arg(buffers.o);
  args.lse = tensor_arg(buffers.lse);
  args.kv_heads = narrow(problem.kv_heads);
  set_cache(args, problem, buffers);
  set_line(args, problem, plan, buffers);
  if (bytes_of(plan, Sm80DecodeRegion::tickets) == 0) return args;
  args.tickets = reinterpret_cast<u32*>(scratch);
  scratch += bytes_of(plan, Sm80DecodeRegion::tickets);
  args.sums = reinterpret_cast<RowSum*>(scratch);
  args.outputs = reinterpret_cast<float*>(scratch + bytes_of(plan, Sm80DecodeRegion::sums));
  return args;
}

void run_decode(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const auto stream = static_cast<Stream>(buffers.stream);
  const Kernels kernels =
      kernels_of(problem, plan, [&](const ProgramKey& key, const auto& make_program) -> const Kernel& {
        return kernel(problem.device.index, key, stream, make_program);
      });
  if (!kernels.append && !kernels.decode) return;
  const Scratch scratch(plan, buffers);
  const DecodeArgs args = decode_args(problem, plan, buffers, scratch.data());
  if (kernels.append) launch(*kernels.append, {append_blocks(problem, plan), 32 * kAppendWarps, 0}, stream, args);
  if (!kernels.decode) return;
  if (args.tickets) clear(args.tickets, bytes_of(plan, Sm80DecodeRegion::tickets), stream);
  const Grid grid{static_cast<unsigned>(plan.blocks), static_cast<unsigned>(32 * plan.warps),
                  static_cast<unsigned>(plan.shared_bytes)};
  launch(*kernels.decode, grid, stream, args);
}

void prepare_decode(const Problem& problem, const Plan& plan) {
  const CurrentDevice current(problem.device.index);
  kernels_of(problem, plan, [&](const ProgramKey& key, const auto& make_program) -> const Kernel& {
    const Kernel* loaded = find_kernel(problem.device.index, key);
    return loaded ? *loaded : load_kernel(problem.device.index, key, make_program());
  });
}

}  // namespace narrows::cuda
