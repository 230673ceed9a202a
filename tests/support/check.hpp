// The acceptance criterion as assertions: EXPECT_TRUE(forward_agrees(in, out, options)).
#pragma once

#include <gtest/gtest.h>

#include "cpu/criterion.hpp"

namespace narrows::test {

inline testing::AssertionResult all_pass(const std::vector<Verdict>& verdicts) {
  testing::AssertionResult result = testing::AssertionSuccess();
  bool passed = true;
  for (const Verdict& verdict : verdicts) passed = passed && verdict.passed;
  if (!passed) result = testing::AssertionFailure();
  for (const Verdict& verdict : verdicts) result << verdict.text() << "\n";
  return result;
}

inline testing::AssertionResult forward_agrees(const Inputs& in, const Outputs& ours, const Options& options) {
  return all_pass(check_forward(in, ours, options));
}

inline testing::AssertionResult backward_agrees(const BackwardInputs& in, const Gradients& ours,
                                                const Options& options) {
  return all_pass(check_backward(in, ours, options));
}

}  // namespace narrows::test
