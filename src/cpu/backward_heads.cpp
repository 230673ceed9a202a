#include "cpu/backward_heads.hpp"

#include "cpu/pool.hpp"

#include <algorithm>
#include <cmath>

namespace narrows::cpu {
namespace {

/// Sum of exp(sink - LSE) (dLSE - D) over all rows of a head: those that see no key have the LSE of their sink.
template <class T> double sink_gradient(const BackwardCall<T>& call, i64 h, double sink, int thread) {
  const Problem& problem = call.problem;
  double sum = 0;
  for (i64 b = 0; b < problem.batch; ++b) {
    const QueryHeads heads = query_heads(call, b, h / problem.group());
    for (i64 i = 0; i < heads.sequence.queries; ++i) {
      const RowTerms<T> terms = row_terms(call, heads, h, i, call.template scratch<T>(thread, call.layout.terms));
      if (terms.lse == -kInfinity<T>) continue;
      sum -= std::exp(std::min(sink - double{terms.lse}, 0.0)) * double{terms.delta};
    }
  }
  return sum;
}

template <class T> double slope_sum(const BackwardCall<T>& call, i64 batch, i64 h) {
  const i64 group = call.problem.group();
  double sum = 0;
  for (i64 partial = 0; partial < call.partials; ++partial)
    sum += slope_sums(call, batch, h / group, partial)[h % group];
  return sum;
}

}  // namespace

template <class T> void write_sink_gradient(const BackwardCall<T>& call, int threads) {
  const View &sinks = call.buffers.sinks, &dsinks = call.buffers.dsinks;
  parallel_for(call.problem.heads, threads, [&](i64 h, int thread) {
    T sink = 0;
    call.kernels.convert(sinks.at(h), 0, sinks.dtype, 1, &sink);
    const T sum = sink == -kInfinity<T> ? T{0} : static_cast<T>(sink_gradient(call, h, double{sink}, thread));
    call.kernels.store(&sum, T{1}, 1, dsinks.at(h), 0, dsinks.dtype);
  });
}

/// dslope = -sum |p - j| dS, over the batch where the slopes are shared by it.
template <class T> void write_slope_gradient(const BackwardCall<T>& call) {
  const Problem& problem = call.problem;
  const View& dslopes = call.buffers.dslopes;
  const auto store = [&](double sum, i64 b, i64 h) {
    const T value = static_cast<T>(-sum);
    call.kernels.store(&value, T{1}, 1, dslopes.at(b, h), 0, dslopes.dtype);
  };
  for (i64 h = 0; h < problem.heads; ++h) {
    double total = 0;
    for (i64 b = 0; b < problem.batch; ++b) {
      const double sum = slope_sum(call, b, h);
      if (problem.dslopes_per_batch) store(sum, b, h);
      total += sum;
    }
    if (!problem.dslopes_per_batch) store(total, 0, h);
  }
}

template void write_sink_gradient(const BackwardCall<float>&, int);
template void write_sink_gradient(const BackwardCall<double>&, int);
template void write_slope_gradient(const BackwardCall<float>&);
template void write_slope_gradient(const BackwardCall<double>&);

}  // namespace narrows::cpu
