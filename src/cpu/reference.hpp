// The oracle: the whole contract once more, in double and plain loops, written from its text alone and sharing nothing
// with the code that it judges. Slow on purpose: O(sq sk) logits, one row at a time.
//
// Read in this order: reference_sequences (lengths, positions, where keys lie), reference_scores (logits),
// reference_forward.cpp, reference_backward.cpp; reference_philox (dropout) and reference_numbers (element types) beside.
#pragma once

#include <narrows/narrows.hpp>

#include <vector>

namespace narrows::reference {

/// A result that stays in double, row-major in the shape of the tensor that it stands for.
struct Result {
  Dims shape;
  std::vector<double> value;
  std::vector<double> magnitude;  // E of the acceptance criterion: the value's sum taken over absolute values
  std::vector<double> logit;      // L: the largest finite |logit| among those that the value depends on
};

struct ForwardResult {
  Result o, lse;
};

/// dbias, dslopes and dsinks are empty where the call has no bias, slopes or sinks.
struct BackwardResult {
  Result dq, dk, dv, dbias, dslopes, dsinks;
};

// Every function takes a call that has been validated. None but forward() writes anything; new keys are read as if they
// had been appended, rounded to the cache's type.

ForwardResult exact_forward(const Inputs& in, const Options& options);
/// Standard attention as three kernels: products accumulated in fp32, S, P and O rounded to q's type. fp64 stays fp64.
ForwardResult plain_forward(const Inputs& in, const Options& options);

/// Where in.o and in.lse are not given they are computed, in double (exact) or as plain_forward does (plain).
BackwardResult exact_backward(const BackwardInputs& in, const Options& options);
BackwardResult plain_backward(const BackwardInputs& in, const Options& options);

/// exact_forward, rounded to the types of the outputs, and the new keys appended to the cache.
void forward(const Inputs& in, const Outputs& out, const Options& options);
void backward(const BackwardInputs& in, const Gradients& out, const Options& options);

}  // namespace narrows::reference
