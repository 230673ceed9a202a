// A kernel before it is compiled: pure values, so that two programs are the same exactly when these are.
#pragma once

#include <string>
#include <string_view>

namespace narrows {

struct Program {
  std::string_view source;    // file of src/kernels, "forward_sm80.cu"
  std::string_view function;  // its extern "C" name
  std::string config;         // text of config.cuh: the constants
  bool exact_math = false;    // fp32 programs: no --use_fast_math
  // Whether it may be begun before the kernel ahead of it on the stream has ended: it waits for that one itself, by
  // wait_for_previous() of kernels/ptx_sm80.cuh. Counts on Hopper and later.
  bool begins_early = false;
};

}  // namespace narrows
