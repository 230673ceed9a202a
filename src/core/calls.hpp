// From the public structs to a Call: what forward, backward and explain share.
#pragma once

#include "core/tensors.hpp"

namespace narrows {

/// Everything but the results. needs_data: elements of q, k, v and the score tensors will be read.
Call check_call(const Inputs& in, const Options& options, bool needs_data);

inline Axes query_axes(const Problem& problem) { return problem.query_form == QueryForm::varlen ? kVarlen : kDense; }
inline Axes key_axes(const Problem& problem) { return problem.key_form == KeyForm::varlen ? kVarlen : kDense; }
inline Axes lse_axes(const Problem& problem) {
  return problem.query_form == QueryForm::varlen ? kVarlenLse : kDenseLse;
}

}  // namespace narrows
