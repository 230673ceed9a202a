#include "cpu/forward.hpp"

#include "cpu/append.hpp"
#include "cpu/arena.hpp"
#include "cpu/blank_rows.hpp"
#include "cpu/decode_group.hpp"
#include "cpu/head_tasks.hpp"
#include "cpu/pool.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <type_traits>

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
  call.progress = arena.take(regions[kHeadProgress]);
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

/// Some kv heads that are in scratch together, and their tasks.
template <class T> class ForwardWave {
 public:
  ForwardWave(const ForwardCall<T>& call, std::span<KvHead> room, i64 first_head, i64 heads_together)
      : call_(call), heads_(room), together_(heads_together) {
    i64 elements = 0, place = 0;
    for (KvHead& head : heads_) {
      const i64 number = first_head + place, kv_heads = call.problem.kv_heads;
      std::construct_at(&head, make_kv_head(call, number / kv_heads, number % kv_heads));
      head.place = place++;
      head.first_element = elements;
      head.first_block = last_block_;
      elements += packed_elements(call, head);
      if (leads(head)) last_block_ += blocks_of(head);
    }
  }

  /// A head's stages: its tiles are packed, where they are packed ahead; its blocks, or splits of them, are attended to; splits
  /// are merged.
  void run(int threads) const {
    const i64 splits = call_.partials.splits;
    const auto body = [this, splits](std::size_t stage, i64 place, i64 task, int thread) {
      const KvHead& head = heads_[static_cast<std::size_t>(place)];
      if (stage == 0)
        pack_tile(call_, head, head.tiles.begin + task, thread);
      else if (splits == 1)
        block(head, task, thread).run();
      else if (stage == 1)
        block(head, task / splits, thread).run_split(task % splits);
      else
        block(head, task, thread).merge_splits();
    };
    const auto progress = make_progress<3>(call_.progress, static_cast<i64>(heads_.size()), [&](i64 place) {
      const KvHead& head = heads_[static_cast<std::size_t>(place)];
      return std::array<i64, 3>{call_.heads ? length(head.tiles) : 0, blocks_of(head) * splits,
                                splits == 1 ? 0 : blocks_of(head)};
    });
    HeadTasks<3, decltype(body)>(progress, body).run(threads);
  }

  /// Where tasks read K and V from memory themselves: all heads of some keys before the next keys, since in most caches they
  /// are neighbours in memory. Block: QueryBlock, or DecodeGroup for heads together.
  template <class Block> void run_together(int threads) const {
    const i64 splits = call_.partials.splits, blocks = last_block_;
    const auto block_at = [this](i64 number, int thread) {
      const KvHead& head = head_of(number);
      if constexpr (std::is_same_v<Block, QueryBlock<T>>)
        return block(head, number - head.first_block, thread);
      else
        return Block(call_, together(head), block_rows(head, number - head.first_block), thread);
    };
    if (splits == 1)
      return parallel_for(blocks, threads, [&](i64 number, int thread) { block_at(number, thread).run(); });
    parallel_for(blocks * splits, threads,
                 [&](i64 task, int thread) { block_at(task % blocks, thread).run_split(task / blocks); });
    parallel_for(blocks * together_, threads, [&](i64 task, int thread) {
      const KvHead& first = head_of(task / together_);
      const std::span<const KvHead> heads = together(first);
      const i64 number = task % together_;
      if (number < static_cast<i64>(heads.size()))
        block(heads[static_cast<std::size_t>(number)], task / together_ - first.first_block, thread).merge_splits();
    });
  }

  /// The last rows see most keys under a causal mask: a head's blocks are handed out from the back, so that the small ones
  /// level the threads at the end.
  Range block_rows(const KvHead& head, i64 number) const {
    const i64 first = (blocks_of(head) - 1 - number) * call_.query_block;
    return {first, std::min(first + call_.query_block, rows_of(head))};
  }
  QueryBlock<T> block(const KvHead& head, i64 number, int thread) const {
    return {call_, head, block_rows(head, number), thread};
  }

 private:
  i64 rows_of(const KvHead& head) const { return head.sequence.queries * call_.problem.group(); }
  i64 blocks_of(const KvHead& head) const { return ceil_div(rows_of(head), call_.query_block); }

  /// Whether the head is the first of some that tasks attend to together. The others have no blocks of their own.
  bool leads(const KvHead& head) const { return head.place == 0 || head.kv_head % together_ == 0; }
  std::span<const KvHead> together(const KvHead& first) const {
    std::size_t count = 1;
    const std::span<const KvHead> all = heads_.subspan(static_cast<std::size_t>(first.place));
    while (count < all.size() && !leads(all[count])) ++count;
    return all.first(count);
  }

  /// The head that a block belongs to: the last that begins at it or before.
  const KvHead& head_of(i64 block) const {
    return *(std::upper_bound(heads_.begin(), heads_.end(), block,
                              [](i64 wanted, const KvHead& head) { return wanted < head.first_block; }) -
             1);
  }

  const ForwardCall<T>& call_;
  std::span<KvHead> heads_;
  i64 together_;
  i64 last_block_ = 0;
};

template <class T> void run_forward_in(const Problem& problem, const Plan& plan, const Buffers& buffers) {
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
    const ForwardWave<T> wave(call, {room, count}, begin, plan.reads_in_place ? plan.heads_together : 1);
    if (plan.reads_in_place)
      wave.template run_together<DecodeGroup<T>>(plan.threads);
    else if (!call.heads && call.partials.splits > 1)
      wave.template run_together<QueryBlock<T>>(plan.threads);
    else
      wave.run(plan.threads);
  }
}

}  // namespace

void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  if (problem.dtype == DType::fp64)
    run_forward_in<double>(problem, plan, buffers);
  else
    run_forward_in<float>(problem, plan, buffers);
}

}  // namespace narrows::cpu
