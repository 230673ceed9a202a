#include "cpu/forward.hpp"

#include "cpu/append.hpp"
#include "cpu/arena.hpp"
#include "cpu/blank_rows.hpp"
#include "cpu/decode_block.hpp"
#include "cpu/dropout.hpp"
#include "cpu/pool.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <span>

namespace narrows::cpu {
namespace {

template <class T> ForwardCall<T> make_forward_call(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  ForwardCall<T> call{kernel_call<T>(problem, plan, buffers)};
  call.split_keys = plan.split_keys ? round_up(plan.split_keys, call.key_block) : kMaxCount;
  call.layout = forward_thread_scratch(problem, plan);
  return call;
}

/// Gives the call its scratch; returns room for the heads of a wave.
template <class T> KvHead* lay_out(ForwardCall<T>& call, const Plan& plan, Arena& arena) {
  const Regions& regions = plan.workspace;
  call.heads = arena.take(regions[kPacked]);
  KvHead* const heads = reinterpret_cast<KvHead*>(arena.take(regions[kHeads]));
  call.threads = arena.take(regions[kThreads]);
  call.partials = {.outputs = reinterpret_cast<T*>(arena.take(regions[kPartialOutputs])),
                   .sums = reinterpret_cast<RunningSum<T>*>(arena.take(regions[kPartialSums])),
                   .splits = forward_splits(call.problem, plan),
                   .rows = call.problem.max_queries * call.problem.group(),
                   .width = call.value_width};
  return heads;
}

template <class T> void write_blank_rows(const ForwardCall<T>& call, int threads) {
  const Problem& problem = call.problem;
  const View &o = call.buffers.o, &lse = call.buffers.lse;
  const bool varlen = problem.query_form == QueryForm::varlen;
  if (!varlen && !call.buffers.seqused_q) return;
  static constexpr std::array<T, kMostValueDim> kZeros{};
  const T empty = -kInfinity<T>;
  const auto used = [&](i64 b) {
    const Sequence lengths = sequence(problem, call.buffers, b);
    return Range{lengths.first_query, lengths.first_query + lengths.queries};
  };
  parallel_for(problem.batch + (varlen ? 1 : 0), threads, [&](i64 b, int) {
    const Range rows = blank_rows(varlen, problem.batch, problem.query_rows, b, used);
    for (i64 i = rows.begin; i < rows.end; ++i)
      for (i64 h = 0; h < problem.heads; ++h) {
        const i64 batch = varlen ? 0 : b;
        if (o) call.kernels.store(kZeros.data(), T{1}, problem.value_dim, o.at(batch, i, h), o.strides[3], o.dtype);
        if (lse) call.kernels.store(&empty, T{1}, 1, lse.at(batch, h, i), 0, lse.dtype);
      }
  });
}

/// Some kv heads that are in scratch together, and their tasks by number.
template <class T> class Wave {
 public:
  Wave(const ForwardCall<T>& call, std::span<KvHead> room, i64 first_head) : call_(call), heads_(room) {
    i64 elements = 0, place = 0;
    for (KvHead& head : heads_) {
      const i64 number = first_head + place, kv_heads = call.problem.kv_heads;
      std::construct_at(&head, make_kv_head(call, number / kv_heads, number % kv_heads));
      head.place = place++;
      head.first_element = elements;
      head.first_tile = tiles_;
      head.first_block = blocks_;
      elements += packed_elements(call, head);
      tiles_ += head.tiles.end - head.tiles.begin;
      blocks_ += blocks_of(head);
    }
  }

  i64 tiles() const { return tiles_; }
  i64 blocks() const { return blocks_; }

  void pack(i64 number, int thread) const {
    const KvHead& head = head_of(number, &KvHead::first_tile);
    pack_tile(call_, head, head.tiles.begin + number - head.first_tile, thread);
  }

  /// The last rows see most keys under a causal mask: a head's blocks are handed out from the back, so that the small ones
  /// level the threads at the end.
  template <class Block> Block block(i64 number, int thread) const {
    const KvHead& head = head_of(number, &KvHead::first_block);
    const i64 first = (blocks_of(head) - 1 - (number - head.first_block)) * call_.query_block;
    return {call_, head, {first, std::min(first + call_.query_block, rows_of(head))}, thread};
  }

 private:
  i64 rows_of(const KvHead& head) const { return head.sequence.queries * call_.problem.group(); }
  i64 blocks_of(const KvHead& head) const { return ceil_div(rows_of(head), call_.query_block); }

  /// The head that a tile or block belongs to: the last that begins at it or before.
  const KvHead& head_of(i64 number, i64 KvHead::*first) const {
    return *(std::upper_bound(heads_.begin(), heads_.end(), number,
                              [&](i64 wanted, const KvHead& head) { return wanted < head.*first; }) -
             1);
  }

  const ForwardCall<T>& call_;
  std::span<KvHead> heads_;
  i64 tiles_ = 0, blocks_ = 0;
};

template <class T, class Block> void run_wave(const ForwardCall<T>& call, const Wave<T>& wave, int threads) {
  if (call.heads) parallel_for(wave.tiles(), threads, [&](i64 tile, int thread) { wave.pack(tile, thread); });
  const i64 splits = call.partials.splits;
  if (splits == 1) {
    parallel_for(wave.blocks(), threads,
                 [&](i64 block, int thread) { wave.template block<Block>(block, thread).run(); });
    return;
  }
  // All heads of some keys before the next keys: in most caches they are neighbours in memory.
  parallel_for(wave.blocks() * splits, threads, [&](i64 task, int thread) {
    wave.template block<Block>(task % wave.blocks(), thread).run_split(task / wave.blocks());
  });
  parallel_for(wave.blocks(), threads,
               [&](i64 block, int thread) { wave.template block<Block>(block, thread).merge_splits(); });
}

template <class T> void run(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  // Without results a batch needs no memory, and may be too large to walk through.
  const bool no_results = problem.query_rows == 0 || problem.heads == 0;
  if (no_results && !problem.appends) return;
  ForwardCall<T> call = make_forward_call<T>(problem, plan, buffers);
  if (no_results) return append_keys(problem, buffers, call.kernels, plan.threads);
  Arena arena(plan, buffers.workspace);
  KvHead* const room = lay_out(call, plan, arena);
  if (problem.appends) append_keys(problem, buffers, call.kernels, plan.threads);
  write_blank_rows(call, plan.threads);
  const i64 heads = problem.batch * problem.kv_heads;
  for (i64 begin = 0; begin < heads; begin += plan.heads_at_once) {
    const std::size_t count = static_cast<std::size_t>(std::min(plan.heads_at_once, heads - begin));
    const Wave<T> wave(call, {room, count}, begin);
    if (plan.reads_in_place)
      run_wave<T, DecodeBlock<T>>(call, wave, plan.threads);
    else
      run_wave<T, QueryBlock<T>>(call, wave, plan.threads);
  }
}

}  // namespace

void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  if (problem.dtype == DType::fp64)
    run<double>(problem, plan, buffers);
  else
    run<float>(problem, plan, buffers);
}

}  // namespace narrows::cpu
