// What a machine can do, as plain numbers: plans are made, cached and tested without one.
#pragma once

#include "core/problem.hpp"

namespace narrows {

struct Machine {
  Device device;
  std::string_view name;        // of memory that outlives the machine
  std::string instruction_set;  // CPU: the tile kernels it will run
  int threads = 1;              // CPU: cores that this process may use
  double flops_per_second = 0;  // fp32 multiply-adds; 0 = not measured, then no time is predicted
  double bytes_per_second = 0;  // read from device memory
};

}  // namespace narrows
