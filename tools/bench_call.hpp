// The call that a row of the table measures, with tensors of its own.
#pragma once

#include <cstdint>
#include <list>
#include <vector>

#include <narrows/narrows.hpp>

#include "tools/bench_row.hpp"
#include "tools/files/layout.hpp"

namespace narrows::cli {

class BenchCall {
 public:
  explicit BenchCall(const Row& row);
  BenchCall(const BenchCall&) = delete;
  BenchCall& operator=(const BenchCall&) = delete;

  void run() const;
  /// By the formulas that every peer is counted by: causal is half of all pairs, window512 and varlen are the pairs that
  /// are visible, and bias, mask and dropout leave all of them.
  double flops() const;
  /// Of q, k, v and o; k and v once for each kv head.
  std::int64_t bytes() const;
  /// Scratch that the plan asks for.
  std::int64_t extra_bytes() const;

 private:
  /// Normal-looking numbers, the same in every run.
  Tensor numbers(DType dtype, const Dims& shape);
  Tensor booleans(const Dims& shape);
  Tensor integers(std::vector<std::int32_t> values, const Dims& shape);
  Tensor slopes();
  void add_rules();
  void add_cache();

  Row row_;
  std::list<files::Memory> memory_;  // of the tensors
  std::list<std::vector<std::int32_t>> integers_;
  std::uint64_t random_ = 1;
  Inputs in_;
  Options options_;
  Outputs out_;
  BackwardInputs saved_;
  Gradients gradients_;
};

}  // namespace narrows::cli
