// dbias: dS of the logits, summed over the axes that the bias was broadcast along.
#pragma once

#include "cpu/backward_call.hpp"

namespace narrows::cpu {

/// A walk of its own over the tiles, so that each element is summed by one task in a fixed order.
template <class T> void write_bias_gradient(const BackwardCall<T>& call, int threads);
extern template void write_bias_gradient(const BackwardCall<float>&, int);
extern template void write_bias_gradient(const BackwardCall<double>&, int);

}  // namespace narrows::cpu
