// Gradients with one number a head: dsinks, and dslopes from what the walk over the tiles summed.
#pragma once

#include "cpu/backward_call.hpp"

namespace narrows::cpu {

template <class T> void write_sink_gradient(const BackwardCall<T>& call, int threads);

/// From call.slope_sums.
template <class T> void write_slope_gradient(const BackwardCall<T>& call);

/// Where the sums of one (batch, kv head) and partial begin; null where dslopes is not wanted.
template <class T> double* slope_sums(const BackwardCall<T>& call, i64 batch, i64 kv_head, i64 partial) {
  if (!call.problem.wants_dslopes) return nullptr;
  return call.slope_sums + ((batch * call.problem.kv_heads + kv_head) * call.partials + partial) * call.problem.group();
}

extern template void write_sink_gradient(const BackwardCall<float>&, int);
extern template void write_sink_gradient(const BackwardCall<double>&, int);
extern template void write_slope_gradient(const BackwardCall<float>&);
extern template void write_slope_gradient(const BackwardCall<double>&);

}  // namespace narrows::cpu
