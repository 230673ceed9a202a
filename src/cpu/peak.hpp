// What this CPU reaches, measured by loops that do nothing else.
#pragma once

#include "plan/machine.hpp"

#include <cstddef>

namespace narrows::cpu {

/// FLOP/s of what the kernels of an instruction set are made of, in registers, on `threads` threads at once: of bf16 dot
/// products for bf16 where it has them ("avx512bf16", "amx"), else of fp32 multiply-adds. Throws Error for an instruction
/// set that this CPU cannot execute and for dtypes but fp32, fp16 and bf16. Takes 50 ms.
double peak_rate(std::string_view instruction_set, DType dtype, int threads);

/// Bytes/s read from memory beyond the caches. Takes about 0.1 s and up to 128 MiB.
double read_rate(int threads);
/// The same over and over `bytes` in all, from whichever cache holds them. Takes about 0.1 s.
double read_rate(int threads, std::size_t bytes);

/// The machine with its rates, measured once in a process for each instruction set and number of threads.
Machine measured(Machine machine);

}  // namespace narrows::cpu
