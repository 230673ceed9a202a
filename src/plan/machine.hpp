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
  double bytes_per_second = 0;  // read from device memory
};

}  // namespace narrows
