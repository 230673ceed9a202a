#include "cpu/backward.hpp"

#include "cpu/backward_bias.hpp"
#include "cpu/backward_chunk.hpp"
#include "cpu/backward_heads.hpp"
#include "cpu/blank_rows.hpp"
#include "cpu/pool.hpp"
#include "cpu/row_logits.hpp"

#include <algorithm>
#include <memory>

namespace narrows::cpu {
namespace {

constexpr i64 kRowsOfTask = 256;

/// Zeros in rows of dq, or of dk and dv, that are in no sequence or not used.
template <class T> void write_blanks(const BackwardCall<T>& call, int threads) {
  const Problem& problem = call.problem;
  const Buffers& buffers = call.buffers;
  const std::vector<T> zeros(static_cast<std::size_t>(std::max(problem.head_dim, problem.value_dim)), T{0});
  const auto clear = [&](const std::vector<BlankRows>& blanks, const View& view, i64 heads, i64 columns) {
    if (!view) return;
    parallel_for(static_cast<i64>(blanks.size()), threads, [&](i64 task, int) {
      const BlankRows& blank = blanks[static_cast<std::size_t>(task)];
      for (i64 row = blank.rows.begin; row < blank.rows.end; ++row)
        for (i64 h = 0; h < heads; ++h)
          call.kernels.store(zeros.data(), T{1}, columns, view.at(blank.batch, row, h), view.strides[3], view.dtype);
    });
  };
  const auto queries = [&](i64 b) {
    const Sequence lengths = sequence(problem, buffers, b);
    return Range{lengths.first_query, lengths.first_query + lengths.queries};
  };
  const auto keys = [&](i64 b) {
    const Sequence lengths = sequence(problem, buffers, b);
    return Range{lengths.first_key, lengths.first_key + lengths.keys};
  };
  const bool varlen_queries = problem.query_form == QueryForm::varlen,
             varlen_keys = problem.key_form == KeyForm::varlen;
  clear(blank_rows(varlen_queries, problem.batch, problem.query_rows, queries), buffers.dq, problem.heads,
        problem.head_dim);
  const std::vector<BlankRows> key_blanks = blank_rows(varlen_keys, problem.batch, problem.key_rows, keys);
  clear(key_blanks, buffers.dk, problem.kv_heads, problem.head_dim);
  clear(key_blanks, buffers.dv, problem.kv_heads, problem.value_dim);
}

/// Some kv heads whose sums of dQ are in scratch together.
template <class T> class Wave {
 public:
  Wave(const BackwardCall<T>& call, i64 begin, i64 end) : call_(call) {
    for (i64 number = begin; number < end; ++number) {
      const QueryHeads heads = query_heads(call, number / call.problem.kv_heads, number % call.problem.kv_heads);
      const i64 chunks = ceil_div(heads.sequence.keys, call.key_chunk);
      heads_.push_back({heads, std::min(chunks, call.partials), elements_});
      if (call.problem.wants_dq) elements_ += heads_.back().partials * heads.rows() * call.query_width;
    }
  }
  i64 elements() const { return elements_; }

  void sum(std::vector<std::unique_ptr<KeyChunk<T>>>& threads, T* dq, SlopeSums& slopes) const {
    struct Task {
      const Head* head;
      i64 partial;
    };
    std::vector<Task> tasks;
    for (const Head& head : heads_)
      for (i64 partial = 0; partial < head.partials; ++partial) tasks.push_back({&head, partial});
    parallel_for(static_cast<i64>(tasks.size()), static_cast<int>(threads.size()), [&](i64 number, int thread) {
      const auto& [head, partial] = tasks[static_cast<std::size_t>(number)];
      std::unique_ptr<KeyChunk<T>>& chunk = threads[static_cast<std::size_t>(thread)];
      if (!chunk) chunk = std::make_unique<KeyChunk<T>>(call_);
      chunk->run(head->heads, partial, call_.problem.wants_dq ? dq_of(*head, partial, dq) : nullptr,
                 slopes.at(head->heads.batch, head->heads.kv_head, partial));
    });
  }

  /// Adds a row's partial sums in their order and writes dQ.
  void store(T* dq, int threads) const {
    struct Task {
      const Head* head;
      Range rows;
    };
    std::vector<Task> tasks;
    for (const Head& head : heads_)
      for (i64 row = 0; row < head.heads.rows(); row += kRowsOfTask)
        tasks.push_back({&head, {row, std::min(row + kRowsOfTask, head.heads.rows())}});
    parallel_for(static_cast<i64>(tasks.size()), threads, [&](i64 number, int) {
      const auto& [head, rows] = tasks[static_cast<std::size_t>(number)];
      for (i64 row = rows.begin; row < rows.end; ++row) store_row(*head, row, dq);
    });
  }

 private:
  struct Head {
    QueryHeads heads;
    i64 partials;
    i64 first_element;
  };

  T* dq_of(const Head& head, i64 partial, T* dq) const {
    return dq + head.first_element + partial * head.heads.rows() * call_.query_width;
  }

  void store_row(const Head& head, i64 row, T* dq) const {
    const View& out = call_.buffers.dq;
    const i64 d = call_.problem.head_dim, width = head.heads.width();
    std::array<T, kLargestHeadDim> sum{};
    for (i64 partial = 0; partial < head.partials; ++partial) {
      const T* const part = dq_of(head, partial, dq) + row * call_.query_width;
      for (i64 x = 0; x < d; ++x) sum[static_cast<std::size_t>(x)] += part[x];
    }
    call_.kernels.store(
        sum.data(), fitted<T>(call_.problem.rules.scale), d,
        out.at(head.heads.batch, head.heads.sequence.first_query + row / width, head.heads.heads.begin + row % width),
        out.strides[3], out.dtype);
  }

  static constexpr std::size_t kLargestHeadDim = 576;
  const BackwardCall<T>& call_;
  std::vector<Head> heads_;
  i64 elements_ = 0;
};

template <class T> void walk_tiles(const BackwardCall<T>& call, const Plan& plan) {
  const Problem& problem = call.problem;
  std::vector<std::unique_ptr<KeyChunk<T>>> threads(static_cast<std::size_t>(plan.threads));
  SlopeSums slopes(problem, call.partials);
  Scratch<T> dq;
  i64 capacity = 0;
  const i64 heads = problem.batch * problem.kv_heads;
  for (i64 begin = 0; begin < heads; begin += plan.heads_at_once) {
    const Wave<T> wave(call, begin, std::min(begin + plan.heads_at_once, heads));
    if (wave.elements() > capacity) {
      dq.reset();
      dq = make_scratch<T>(static_cast<std::size_t>(wave.elements()));
      capacity = wave.elements();
    }
    wave.sum(threads, dq.get(), slopes);
    if (problem.wants_dq) wave.store(dq.get(), plan.threads);
  }
  if (problem.wants_dslopes) slopes.write(call);
}

template <class T> void run(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const BackwardCall<T> call = make_backward_call<T>(problem, plan, buffers);
  write_blanks(call, plan.threads);
  if (problem.wants_dsinks) write_sink_gradient(call, plan.threads);
  if (problem.wants_dbias) write_bias_gradient(call, plan.threads);
  if (problem.wants_dv || wants_score_gradients(problem)) walk_tiles(call, plan);
}

}  // namespace

template <class T>
BackwardCall<T> make_backward_call(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const TileKernels<T>& kernels = tile_kernels<T>(plan.instruction_set);
  const bool score_rules = has_score_rules(problem, buffers);
  const i64 key_block = round_up(plan.key_block, kernels.columns);
  return {.problem = problem,
          .buffers = buffers,
          .kernels = kernels,
          .units = score_rules ? natural_units<T>() : fused_units<T>(problem.rules.scale),
          .score_rules = score_rules,
          .dropout = dropout_rule(problem, buffers),
          .query_block = plan.query_block,
          .key_block = key_block,
          .key_chunk = round_up(plan.key_chunk, key_block),
          .partials = plan.partials,
          .query_width = round_up(problem.head_dim, kernels.columns),
          .value_width = round_up(problem.value_dim, kernels.columns)};
}

void run_backward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  if (problem.dtype == DType::fp64)
    run<double>(problem, plan, buffers);
  else
    run<float>(problem, plan, buffers);
}

template BackwardCall<float> make_backward_call<float>(const Problem&, const Plan&, const Buffers&);
template BackwardCall<double> make_backward_call<double>(const Problem&, const Plan&, const Buffers&);

}  // namespace narrows::cpu
