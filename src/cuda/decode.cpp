#include "cuda/decode.hpp"

#include "cuda/call_args.hpp"
#include "cuda/scratch.hpp"
#include "plan/sm90_decode.hpp"
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
                          constants.mask, constants.dropout, constants.turned})
    bits.add(rule, 1);
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
  if (problem.batch != 0) args.cache_seqlens = indices(buffers.cache_seqlens);  // read ahead, of sequence 0 too
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

/// Sequences whose lengths every thread block of a plain call looks at.
constexpr i64 kMostPlain = 256;

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

/// One for each row of a sequence, where as many blocks of each are nearly all that there are.
i32 lines_of(i32 rows_of_sequence, i32 blocks) {
  constexpr i32 kFull = 95;  // of 100 blocks
  const i32 rows = std::max(rows_of_sequence, 1), used = blocks / rows * rows;
  return i64{100} * used >= i64{kFull} * blocks ? rows : 1;
}

/// Of a dense call. Its rows are no more than tiles, which the planner has counted.
void set_plain(DecodeArgs& args, const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const i32 rows_of_sequence = args.kv_heads * narrow(decode_row_tiles(problem, plan.query_block));
  const i32 rows = args.batch * rows_of_sequence;
  args.by_rows = divider(std::max(rows, 1));
  args.by_sequence_rows = divider(std::max(rows_of_sequence, 1));
  const i32 lines = lines_of(rows_of_sequence, args.line_blocks);
  args.by_lines = divider(lines);
  args.line_rows = rows_of_sequence / lines;
  const i32 wanted = most_splits(rows, args.line_blocks);
  const i32 splits = splits_of(ceil_div(args.capacity, narrow(kDecodeTile)), wanted);
  args.by_splits = divider(splits);
  args.cuts_alike = splits < wanted || spread_evenly(rows * splits, args.line_blocks, plan.resident_blocks);
  if (problem.batch <= kMostPlain) args.plain_filled = plain_filled(problem, plan, buffers);
  if (args.plain_filled >= 0 && args.cuts_alike)
    args.line_blocks = std::clamp(rows * splits, 1, args.line_blocks);  // those that there are, if lengths differ
}

void set_line(DecodeArgs& args, const Problem& problem, const Plan& plan, const Buffers& buffers) {
  args.splits = plan.most_splits;
  args.fixed_split = narrow(plan.split_keys / plan.key_block);
  args.line_blocks = narrow(plan.blocks);
  args.by_tile_rows = divider(args.kv_heads);
  args.by_group = divider(std::max(args.group, 1));  // without a query head rows may be appended all the same
  if (problem.query_form == QueryForm::dense && plan.key_block == kDecodeTile) set_plain(args, problem, plan, buffers);
  if (plan.family == "sm90" && problem.query_form == QueryForm::dense)
    args.plain_filled = plain_filled(problem, plan, buffers);
}

/// Thread blocks of the decode kernel: one for each piece of rows that may be alike, since the hardware hands out blocks as others
/// end, or those of the line. Blocks without a piece beside the others would cost 3% (20 sequences of 4096 keys, 76 of them).
unsigned decode_blocks(const DecodeArgs& args) {
  if (args.plain_filled < 0 || !args.cuts_alike) return static_cast<unsigned>(args.line_blocks);
  return static_cast<unsigned>(args.by_rows.divisor * args.by_splits.divisor);
}

bool has_whole_columns(const Problem& problem) {
  const int bytes = 4 * static_cast<int>(item_size(problem.dtype));
  return problem.o.unit_last && problem.o.alignment >= bytes && problem.value_dim % 4 == 0;
}

struct Kernels {
  const Kernel* append = nullptr;  // null: nothing is appended
  const Kernel* decode = nullptr;  // null: there is no query row
};

/// Rows behind a varlen call's last sequence are rows, also where there is no sequence.
bool has_rows(const Problem& problem) {
  const bool dense = problem.query_form == QueryForm::dense;
  return problem.heads * problem.query_rows != 0 && !(dense && problem.batch == 0);
}

/// find(key, make_program)
template <class Find> Kernels kernels_of(const Problem& problem, const Plan& plan, const Find& find) {
  Kernels kernels;
  const auto element = static_cast<Element>(problem.dtype);
  const DecodeConstants constants = decode_constants(problem, plan);
  if (appends_rows(problem)) kernels.append = &find(append_key(element), [&] { return append_program(element); });
  const bool on_hopper = plan.family == "sm90";  // its number of packed rows, in the key, is no other family's
  if (has_rows(problem))
    kernels.decode = &find(key_of(constants),
                           [&] { return on_hopper ? decode_sm90_program(constants) : decode_program(constants); });
  return kernels;
}

}  // namespace

bool appends_rows(const Problem& problem) {
  return problem.appends && problem.batch != 0 && problem.new_rows != 0 && problem.kv_heads != 0;
}

ProgramKey append_key(Element element) {
  KeyBits bits;
  bits.add(0, 64);
  bits.add(static_cast<i32>(DecodeKernel::append), 4);
  bits.add(static_cast<i32>(element), 8);
  return bits.key();
}

void launch_append(const Kernel& append, const Problem& problem, const DecodeArgs& args, i64 blocks, Stream stream) {
  const i64 of_sequence = std::clamp<i64>(ceil_div<i64>(4 * blocks, problem.batch), 1, problem.new_rows);
  launch(append, {static_cast<unsigned>(problem.batch * of_sequence), 32 * kAppendWarps, 0}, stream, args);
}

DecodeArgs cache_args(const Problem& problem, const Buffers& buffers, bool natural) {
  DecodeArgs args;
  set_call_args(args, problem, buffers, natural);
  args.q = tensor_arg(buffers.q);
  args.k = tensor_arg(buffers.k);
  args.v = tensor_arg(buffers.v);
  args.o = tensor_arg(buffers.o);
  args.lse = tensor_arg(buffers.lse);
  args.kv_heads = narrow(problem.kv_heads);
  set_cache(args, problem, buffers);
  args.by_page = divider(args.page_size);
  return args;
}

DecodeArgs decode_args(const Problem& problem, const Plan& plan, const Buffers& buffers, std::byte* scratch) {
  DecodeArgs args = cache_args(problem, buffers, decode_constants(problem, plan).natural);
  args.whole_columns = has_whole_columns(problem);
  set_line(args, problem, plan, buffers);
  const auto take = [&](Sm80DecodeRegion region) {
    const i64 bytes = bytes_of(plan, region);
    scratch += bytes;
    return bytes ? scratch - bytes : nullptr;
  };
  args.tickets = reinterpret_cast<u64*>(take(Sm80DecodeRegion::tickets));
  args.sums = reinterpret_cast<RowSum*>(take(Sm80DecodeRegion::sums));
  args.outputs = reinterpret_cast<float*>(take(Sm80DecodeRegion::outputs));
  if (appends_rows(problem)) args.refused = reinterpret_cast<i32*>(take(Sm80DecodeRegion::refused));
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
  if (kernels.append) launch_append(*kernels.append, problem, args, plan.blocks, stream);
  if (!kernels.decode) return;
  const Grid grid{decode_blocks(args), static_cast<unsigned>(32 * plan.warps),
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
