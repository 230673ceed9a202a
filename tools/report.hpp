// What `narrows run` found out about one call, for people and for programs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/work.hpp"
#include "cpu/criterion.hpp"

namespace narrows::cli {

/// The largest |ours - the file's|; infinite where one of them alone is NaN.
struct Difference {
  std::string name;
  double largest = 0;
};

struct Report {
  std::string call;  // the prefix of its tensors
  Problem problem;
  Work work;
  Tensor q, k, v;
  std::string dout;             // of a backward call: where it is from
  std::string machine;          // name of the GPU or the CPU
  int threads = 0;              // of the CPU; 0 on a GPU
  std::vector<double> seconds;  // of the timed runs, sorted
  std::vector<Verdict> verdicts;
  std::vector<Difference> differences;

  double median() const;
  bool passed() const;
};

std::string text(const Report& report);
std::string json(const Report& report);  // one line

}  // namespace narrows::cli
