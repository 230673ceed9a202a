// tests/cases.jsonl, the one table of configurations, as calls with all their arrays.
#pragma once

#include "core/problem.hpp"
#include "tests/support/attention.hpp"

#include <deque>
#include <string>
#include <vector>

namespace narrows::test {

/// One case in one dtype. The views in `options` look at `arrays` and at the vectors here.
struct Case {
  std::string id, note, layout;
  std::vector<std::string> families;  // of the CPU; each must accept it
  DType dtype = DType::fp32;
  Attention call;
  std::deque<Array> arrays;

  Case() = default;
  Case(Case&&) = default;  // views follow: Array's memory moves with it
  Case& operator=(Case&&) = default;

  std::string name() const;  // "E01 bf16: causal bottom-right, 2 queries, 5 keys"
};

/// The number of (case, dtype) pairs in the table, under NARROWS_TEST_SMALL=1 of one dtype of each case, in turn, and without
/// those marked large (two of them took 117 of 849 s of sanitized tests); and one of them. Arrays are made when asked for.
std::size_t case_count();
Case make_case(std::size_t index);
/// "E01 bf16" of one, without its arrays.
std::string case_label(std::size_t index);
/// The families of a device that must accept it.
std::vector<std::string> case_families(std::size_t index, DeviceKind device, Operation operation = Operation::forward);

/// q, k and v in layouts that no array of its own can have: views of the call's.
Inputs inputs(const Case& row);

}  // namespace narrows::test
