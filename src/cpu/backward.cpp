#include "cpu/backward.hpp"

#include "cpu/arena.hpp"
#include "cpu/backward_bias.hpp"
#include "cpu/backward_chunk.hpp"
#include "cpu/backward_heads.hpp"
#include "cpu/blank_rows.hpp"
#include "cpu/head_tasks.hpp"
#include "cpu/pool.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/row_logits.hpp"

#include <algorithm>
#include <array>

namespace narrows::cpu {
namespace {

constexpr i64 kRowsOfDqTask = 256;
template <class T> constexpr std::array<T, kMostHeadDim> kZeros{};

template <class T>
BackwardCall<T> make_backward_call(const Problem& problem, const Plan& plan, const Buffers& buffers, Arena& arena) {
  BackwardCall<T> call{kernel_call<T>(problem, plan, buffers)};
  call.key_chunk = round_up(plan.key_chunk, call.key_block);
  call.partials = plan.partials;
  call.query_width = round_up(problem.head_dim, call.kernels.columns);
  call.query_blocks = arena.take(plan.workspace[kQueryBlocks]);
  call.progress = arena.take(plan.workspace[kBackwardProgress]);
  call.query_sums = reinterpret_cast<T*>(arena.take(plan.workspace[kQuerySums]));
  call.slope_sums = reinterpret_cast<double*>(arena.take(plan.workspace[kSlopeSums]));
  call.threads = arena.take(plan.workspace[kBackwardThreads]);
  call.blocks_of_head = query_blocks_of_head(problem, plan);
  call.query_block_layout = query_block_scratch(problem, plan);
  call.layout = backward_thread_scratch(problem, plan);
  return call;
}

/// Zeros in rows of dq, or of dk and dv, that are in no sequence or not used.
template <class T> void write_blanks(const BackwardCall<T>& call, int threads) {
  const Problem& problem = call.problem;
  const Buffers& buffers = call.buffers;
  const auto clear = [&](bool varlen, i64 rows, const View& view, i64 heads, i64 columns, auto used) {
    if (!view) return;
    parallel_for(problem.batch + (varlen ? 1 : 0), threads, [&](i64 gap, int) {
      const Range blank = blank_rows(varlen, problem.batch, rows, gap, used);
      for (i64 row = blank.begin; row < blank.end; ++row)
        for (i64 h = 0; h < heads; ++h)
          call.kernels.store(kZeros<T>.data(), T{1}, columns, view.at(varlen ? 0 : gap, row, h), view.strides[3],
                             view.dtype);
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
  const bool varlen_keys = problem.key_form == KeyForm::varlen;
  clear(problem.query_form == QueryForm::varlen, problem.query_rows, buffers.dq, problem.heads, problem.head_dim,
        queries);
  clear(varlen_keys, problem.key_rows, buffers.dk, problem.kv_heads, problem.head_dim, keys);
  clear(varlen_keys, problem.key_rows, buffers.dv, problem.kv_heads, problem.value_dim, keys);
}

/// (batch, kv head) pairs [begin, end), whose sums of dQ are in scratch together. A head's stages: its rows of Q and dO are
/// packed, once for all the chunks of keys that meet them; its partial sums are made; dQ is their sum.
template <class T> class BackwardWave {
 public:
  BackwardWave(const BackwardCall<T>& call, i64 begin, i64 end) : call_(call), begin_(begin), end_(end) {}

  void run(int threads) const {
    const auto body = [this](std::size_t stage, i64 place, i64 task, int thread) {
      if (stage == 0) return pack_queries(place, task, thread);
      if (stage == 1) return walk(place, task, thread);
      write_query_gradients(place, task);
    };
    const auto progress = make_progress<3>(call_.progress, end_ - begin_, [this](i64 place) {
      const i64 rows = heads_at(place).rows();
      return std::array<i64, 3>{ceil_div(rows, call_.query_block), call_.partials,
                                call_.problem.wants_dq ? ceil_div(rows, kRowsOfDqTask) : 0};
    });
    HeadTasks<3, decltype(body)>(progress, body).run(threads);
  }

 private:
  void pack_queries(i64 place, i64 block, int thread) const {
    const QueryHeads heads = heads_at(place);
    const i64 first = block * call_.query_block;
    QueryRows<T>(call_, query_blocks(place) + block * call_.query_block_layout.bytes)
        .load(heads, {first, std::min(first + call_.query_block, heads.rows())},
              call_.template scratch<T>(thread, call_.layout.terms));
  }

  void walk(i64 place, i64 partial, int thread) const {
    const QueryHeads heads = heads_at(place);
    double* const slopes = slope_sums(call_, heads.batch, heads.kv_head, partial);
    if (slopes) std::fill_n(slopes, heads.width(), 0.0);
    if (partial < partials_of(heads))
      KeyChunk<T>(call_, thread).run(heads, query_blocks(place), partial, sums(place, partial), slopes);
  }

  /// Adds the partial sums of some rows in their order and writes dQ.
  void write_query_gradients(i64 place, i64 task) const {
    const QueryHeads heads = heads_at(place);
    const i64 end = std::min((task + 1) * kRowsOfDqTask, heads.rows());
    for (i64 row = task * kRowsOfDqTask; row < end; ++row) {
      if (row + kRowsAhead < end)
        prefetch_row<Access::write>(target(heads, row + kRowsAhead), call_.problem.head_dim,
                                    call_.buffers.dq.strides[3]);
      write_row(heads, place, row);
    }
  }

  QueryHeads heads_at(i64 place) const {
    const i64 kv_heads = call_.problem.kv_heads;
    return query_heads(call_, (begin_ + place) / kv_heads, (begin_ + place) % kv_heads);
  }
  i64 partials_of(const QueryHeads& heads) const {
    return std::min(ceil_div(heads.sequence.keys, call_.key_chunk), call_.partials);
  }
  std::byte* query_blocks(i64 place) const {
    return call_.query_blocks + place * call_.blocks_of_head * call_.query_block_layout.bytes;
  }
  T* sums(i64 place, i64 partial) const {
    if (!call_.problem.wants_dq) return nullptr;
    const i64 rows = call_.problem.max_queries * call_.problem.group();
    return call_.query_sums + (place * call_.partials + partial) * rows * call_.query_width;
  }

  std::byte* target(const QueryHeads& heads, i64 row) const {
    return call_.buffers.dq.at(heads.batch, heads.sequence.first_query + row / heads.width(),
                               heads.heads.begin + row % heads.width());
  }

  void write_row(const QueryHeads& heads, i64 place, i64 row) const {
    const View& dq = call_.buffers.dq;
    const i64 d = call_.problem.head_dim;
    std::array<T, kZeros<T>.size()> sum{};
    for (i64 partial = 0; partial < partials_of(heads); ++partial) {
      const T* const part = sums(place, partial) + row * call_.query_width;
      for (i64 x = 0; x < d; ++x) sum[static_cast<std::size_t>(x)] += part[x];
    }
    call_.kernels.store(sum.data(), fitted<T>(call_.problem.rules.scale), d, target(heads, row), dq.strides[3],
                        dq.dtype);
  }

  const BackwardCall<T>& call_;
  i64 begin_, end_;
};

template <class T> void run_backward_in(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  Arena arena(plan, buffers.workspace);
  const BackwardCall<T> call = make_backward_call<T>(problem, plan, buffers, arena);
  write_blanks(call, plan.threads);
  if (problem.wants_dsinks) write_sink_gradient(call, plan.threads);
  if (problem.wants_dbias) write_bias_gradient(call, plan.threads);
  if (!problem.wants_dv && !wants_score_gradients(problem)) return;
  const i64 heads = problem.batch * problem.kv_heads;
  for (i64 begin = 0; begin < heads; begin += plan.heads_at_once)
    BackwardWave<T>(call, begin, std::min(begin + plan.heads_at_once, heads)).run(plan.threads);
  if (problem.wants_dslopes) write_slope_gradient(call);
}

}  // namespace

void run_backward(const Problem& given, const Plan& plan, const Buffers& buffers) {
  Problem problem = given;
  // Without rows a batch needs no memory, and may be too large to walk through; what is shared by it still gets its zeros.
  const bool no_rows = (problem.query_rows == 0 && problem.key_rows == 0) || problem.heads == 0;
  if (no_rows && !(problem.dslopes_per_batch && problem.heads) && problem.kv_heads * problem.key_rows == 0)
    problem.batch = 0;
  if (problem.dtype == DType::fp64)
    run_backward_in<double>(problem, plan, buffers);
  else
    run_backward_in<float>(problem, plan, buffers);
}

}  // namespace narrows::cpu
