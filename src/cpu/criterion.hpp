// When a result counts as right: |ours - exact| <= 2 max |plain - exact| over its row + u E, element by element.
//
// plain is standard attention in three kernels at the same precision, so that exact attention may err as much as rounding
// makes anyone err and no more. u is 2^-8 for bf16, 2^-11 for fp16, 2^-21 (1 + L) for fp32 and 2^-48 (1 + L) for fp64, with
// L the largest |logit| and E the sum of absolute values behind the element (see reference.hpp). A row is a tensor's last
// axis. LSE: within 2e-5 (1 + L / 8); fp64 within 1e-13 (1 + L / 8). Slopes and sinks: within u E.
#pragma once

#include "cpu/reference.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace narrows {

struct Verdict {
  std::string name;  // o, lse, dq, ...
  bool passed = true;
  double worst = 0;  // the largest |ours - exact| / limit; infinite where a limit of 0 or a NaN rule is broken
  Dims where;        // the element that it belongs to, and its numbers:
  double ours = 0, exact = 0, limit = 0;
  double error = 0;          // ||ours - exact|| / ||exact||, Frobenius, over the elements that are finite in both
  double plain_error = 0;    // the same of the three-kernel computation
  std::string text() const;  // one line
};

/// `compute`: the dtype of q. `ours` has the shape of `exact` and any strides. `name` decides the rule (lse, dslopes, dsinks).
Verdict judge(std::string_view name, const Tensor& ours, const reference::Result& exact, const reference::Result& plain,
              DType compute);

/// One verdict for each tensor that `ours` has. Call before or after the cache has been appended to.
std::vector<Verdict> check_forward(const Inputs& in, const Outputs& ours, const Options& options);
/// in.o and in.lse are ignored: the gradients are judged against those of the exact forward.
std::vector<Verdict> check_backward(const BackwardInputs& in, const Gradients& ours, const Options& options);

}  // namespace narrows
