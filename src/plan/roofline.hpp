// Predicted time: the machine is busy with arithmetic or waits for memory, whichever takes longer.
#pragma once

#include "plan/machine.hpp"

#include <algorithm>

namespace narrows {

struct Prediction {
  double seconds = 0;  // 0 where the machine's rates are not known
  std::string_view limited_by = "compute";
};

inline Prediction predict(double flops, i64 bytes, double flops_per_second, double bytes_per_second) {
  if (flops_per_second <= 0 || bytes_per_second <= 0) return {};
  const double compute = flops / flops_per_second;
  const double memory = static_cast<double>(bytes) / bytes_per_second;
  return {std::max(compute, memory), compute >= memory ? "compute" : "memory"};
}

}  // namespace narrows
