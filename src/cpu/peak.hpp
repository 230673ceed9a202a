// What this CPU reaches, measured by loops that do nothing else.
#pragma once

#include "plan/machine.hpp"

#include <cstddef>

namespace narrows::cpu {

/// FLOP/s of fp32 multiply-adds in registers, on `threads` threads at once; instruction_set as in Machine. Throws Error for
/// one that this CPU cannot execute. Takes 50 ms.
double fma_rate(std::string_view instruction_set, int threads);

/// Bytes/s read from memory beyond the caches. Takes about 0.1 s and up to 128 MiB.
double read_rate(int threads);
/// The same over and over `bytes` in all, from whichever cache holds them. Takes about 0.1 s.
double read_rate(int threads, std::size_t bytes);

/// The machine with its rates, measured once in a process for each instruction set and number of threads.
Machine measured(Machine machine);

}  // namespace narrows::cpu
