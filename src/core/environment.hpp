// The environment variables, all of them, read nowhere else. Each is read when asked for, so a test may change it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace narrows::environment {

// NARROWS_FAMILY: force a family, or cpu/NAME an instruction set of the CPU's. Empty = the plan decides.
std::string family();
std::string instruction_set();
int threads();  // NARROWS_THREADS: CPU threads; 0 = every core. Throws Error on anything but a whole number in [1, 1024]
std::string cache();  // NARROWS_CACHE: folder of compiled kernels, or "off"; empty = the default folder
std::string nvrtc();  // NARROWS_NVRTC: the CUDA run-time compiler, a file or its folder; empty = looked for
bool check();  // NARROWS_CHECK: 1 = wait for each GPU call and throw what it found wrong. Throws Error on anything but 0, 1

/// The cache folder where NARROWS_CACHE says nothing: narrows in XDG_CACHE_HOME, else in ~/.cache. Empty: there is neither.
std::string default_cache();

struct Variable {
  std::string_view name;
  std::string value;  // empty = not set
  std::string_view meaning;
};
std::vector<Variable> variables();  // each of them, as it is now

}  // namespace narrows::environment
