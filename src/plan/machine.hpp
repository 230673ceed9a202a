// What a machine can do, as plain numbers: plans are made, cached and tested without one.
#pragma once

#include "core/problem.hpp"

#include <span>
#include <string_view>

namespace narrows {

struct Machine {
  Device device{};
  std::string_view name;                               // of memory that outlives the machine
  std::span<const std::string_view> instruction_sets;  // CPU: the tile kernels it can run, best first
  int threads = 1;                                     // CPU: cores that this process may use
  int compute_capability = 0;                          // CUDA: 10 major + minor
  int multiprocessors = 0;                             // CUDA
  i64 shared_bytes = 0;                                // CUDA: of a block at most
  i64 l2_bytes = 0;                                    // CUDA
  // CPU: fp32 multiply-adds; CUDA: 16-bit products of the tensor cores. 0 = not measured, then no time is predicted.
  double flops_per_second = 0;
  double bf16_flops_per_second = 0;  // CPU, of the best instruction set: dot products of bf16 where it has them
  double bytes_per_second = 0;       // read from device memory
};

/// FLOP/s of a CPU's products whose operands are of a type.
inline double product_rate(const Machine& machine, DType operand) {
  if (operand == DType::bf16) return machine.bf16_flops_per_second;
  return machine.flops_per_second / (operand == DType::fp64 ? 2 : 1);  // half the lanes
}

}  // namespace narrows
