// Gradients with one number a head: dsinks, and dslopes from what the walk over the tiles summed.
#pragma once

#include "cpu/backward_call.hpp"

#include <vector>

namespace narrows::cpu {

template <class T> void write_sink_gradient(const BackwardCall<T>& call, int threads);

/// Sums of |p - j| dS: for each (batch, kv head), for each partial, for each head of the group.
class SlopeSums {
 public:
  /// Nothing is summed where the problem does not want dslopes.
  SlopeSums(const Problem& problem, i64 partials);
  double* at(i64 batch, i64 kv_head, i64 partial);

  template <class T> void write(const BackwardCall<T>& call) const;

 private:
  double sum(i64 batch, i64 h) const;

  i64 kv_heads_, group_, partials_;
  std::vector<double> sums_;
};

extern template void write_sink_gradient(const BackwardCall<float>&, int);
extern template void write_sink_gradient(const BackwardCall<double>&, int);
extern template void SlopeSums::write(const BackwardCall<float>&) const;
extern template void SlopeSums::write(const BackwardCall<double>&) const;

}  // namespace narrows::cpu
