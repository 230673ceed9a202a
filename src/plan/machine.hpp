// What a machine can do, as plain numbers: plans are made, cached and tested without one.
#pragma once

#include "core/problem.hpp"

#include <span>
#include <string_view>

namespace narrows {

struct Machine {
  Device device;
  std::string_view name;                               // of memory that outlives the machine
  std::span<const std::string_view> instruction_sets;  // CPU: the tile kernels it can run, best first
  int threads = 1;                                     // CPU: cores that this process may use
  double flops_per_second = 0;  // fp32 multiply-adds; 0 = not measured, then no time is predicted
  double bytes_per_second = 0;  // read from device memory
};

}  // namespace narrows
