#include "cpu/forward.hpp"

#include "core/error.hpp"
#include "cpu/forward_call.hpp"
#include "cpu/pool.hpp"
#include "cpu/query_block.hpp"

#include <algorithm>
#include <memory>
#include <vector>

namespace narrows::cpu {
namespace {

constexpr i64 kBlankRowsOfTask = 256;

template <class T> const TileKernels<T>& kernels_named(std::string_view name) {
  for (const TileKernels<T>* kernels : available_tile_kernels<T>())
    if (name == kernels->name) return *kernels;
  refuse(ErrorCode::internal, "instruction_set", name, "this CPU cannot execute it");
}

/// Query rows [rows.begin, rows.end) of a batch row that belong to no sequence or lie beyond its used rows.
struct BlankRows {
  i64 batch;
  Range rows;
};

std::vector<BlankRows> blank_rows(const Problem& problem, const Buffers& buffers) {
  std::vector<BlankRows> blanks;
  const auto add = [&](i64 batch, i64 begin, i64 end) {
    for (; begin < end; begin += kBlankRowsOfTask)
      blanks.push_back({batch, {begin, std::min(begin + kBlankRowsOfTask, end)}});
  };
  const bool varlen = problem.query_form == QueryForm::varlen;
  i64 next = 0;
  for (i64 b = 0; b < problem.batch; ++b) {
    const Sequence lengths = sequence(problem, buffers, b);
    if (varlen) add(0, next, lengths.first_query);
    next = lengths.first_query + lengths.queries;
    if (!varlen) add(b, next, problem.query_rows);
  }
  if (varlen) add(0, next, problem.query_rows);
  return blanks;
}

template <class T> void write_blank(const ForwardCall<T>& call, const BlankRows& blank) {
  const Problem& problem = call.problem;
  const View &o = call.buffers.o, &lse = call.buffers.lse;
  const std::vector<T> zeros(static_cast<std::size_t>(problem.value_dim), T{0});
  const T empty = -kInfinity<T>;
  for (i64 i = blank.rows.begin; i < blank.rows.end; ++i)
    for (i64 h = 0; h < problem.heads; ++h) {
      if (o) call.kernels.store(zeros.data(), T{1}, problem.value_dim, o.at(blank.batch, i, h), o.strides[3], o.dtype);
      if (lse) call.kernels.store(&empty, T{1}, 1, lse.at(blank.batch, h, i), 0, lse.dtype);
    }
}

struct Task {
  const KvHead* head;
  Range range;  // query rows, or one key tile
};

/// Some kv heads whose packed keys and values are in scratch together.
template <class T> class Wave {
 public:
  Wave(const ForwardCall<T>& call, i64 begin, i64 end) : call_(call) {
    heads_.reserve(static_cast<std::size_t>(end - begin));
    for (i64 number = begin; number < end; ++number) {
      heads_.push_back(make_kv_head(call, number / call.problem.kv_heads, number % call.problem.kv_heads, elements_));
      elements_ += packed_elements(call, heads_.back());
    }
  }
  i64 elements() const { return elements_; }

  std::vector<Task> tiles() const {
    std::vector<Task> tasks;
    for (const KvHead& head : heads_)
      for (i64 tile = head.tiles.begin; tile < head.tiles.end; ++tile) tasks.push_back({&head, {tile, tile + 1}});
    return tasks;
  }

  /// The last rows see most keys under a causal mask: a head's blocks are handed out from the back, so that the small ones
  /// level the threads at the end.
  std::vector<Task> query_blocks() const {
    std::vector<Task> tasks;
    for (const KvHead& head : heads_) {
      const i64 rows = head.sequence.queries * call_.problem.group();
      for (i64 block = ceil_div(rows, call_.query_block) - 1; block >= 0; --block)
        tasks.push_back({&head, {block * call_.query_block, std::min((block + 1) * call_.query_block, rows)}});
    }
    return tasks;
  }

 private:
  const ForwardCall<T>& call_;
  std::vector<KvHead> heads_;
  i64 elements_ = 0;
};

template <class T> void run(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const ForwardCall<T> call = make_forward_call<T>(problem, plan, buffers);
  const std::vector<BlankRows> blanks = blank_rows(problem, buffers);
  parallel_for(static_cast<i64>(blanks.size()), plan.threads,
               [&](i64 task, int) { write_blank(call, blanks[static_cast<std::size_t>(task)]); });

  std::vector<std::unique_ptr<QueryBlock<T>>> blocks(static_cast<std::size_t>(plan.threads));
  Scratch<T> packed;
  i64 capacity = 0;
  const i64 heads = problem.batch * problem.kv_heads;
  for (i64 begin = 0; begin < heads; begin += plan.heads_at_once) {
    const Wave<T> wave(call, begin, std::min(begin + plan.heads_at_once, heads));
    if (wave.elements() > capacity) {
      packed.reset();
      packed = make_scratch<T>(static_cast<std::size_t>(wave.elements()));
      capacity = wave.elements();
    }
    const std::vector<Task> tiles = wave.tiles();
    parallel_for(static_cast<i64>(tiles.size()), plan.threads, [&](i64 number, int) {
      const Task& task = tiles[static_cast<std::size_t>(number)];
      pack_tile(call, *task.head, packed.get(), task.range.begin);
    });
    const std::vector<Task> tasks = wave.query_blocks();
    parallel_for(static_cast<i64>(tasks.size()), plan.threads, [&](i64 number, int thread) {
      const Task& task = tasks[static_cast<std::size_t>(number)];
      std::unique_ptr<QueryBlock<T>>& block = blocks[static_cast<std::size_t>(thread)];
      if (!block) block = std::make_unique<QueryBlock<T>>(call);
      block->run(*task.head, packed.get(), task.range);
    });
  }
}

}  // namespace

template <class T> ForwardCall<T> make_forward_call(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const TileKernels<T>& kernels = kernels_named<T>(plan.instruction_set);
  const bool score_rules = problem.rules.softcap != 0 || buffers.alibi_slopes || buffers.bias;
  return {problem,
          buffers,
          kernels,
          score_rules ? natural_units<T>() : fused_units<T>(problem.rules.scale),
          score_rules,
          plan.query_block,
          round_up(plan.key_block, kernels.columns),
          round_up(problem.value_dim, kernels.columns)};
}

void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  // Without results a batch needs no memory, and may be too large to walk through.
  if (problem.heads == 0 || problem.query_rows == 0) return;
  if (problem.dtype == DType::fp64)
    run<double>(problem, plan, buffers);
  else
    run<float>(problem, plan, buffers);
}

template ForwardCall<float> make_forward_call<float>(const Problem&, const Plan&, const Buffers&);
template ForwardCall<double> make_forward_call<double>(const Problem&, const Plan&, const Buffers&);

}  // namespace narrows::cpu
