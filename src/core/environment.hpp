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

struct Variable {
  std::string_view name;
  std::string value;  // empty = not set
  std::string_view meaning;
};
std::vector<Variable> variables();  // each of them, as it is now

}  // namespace narrows::environment
