// What this CPU, and the system for this process, execute beyond the architecture's baseline.
#pragma once

namespace narrows::cpu {

/// In the names of the instruction sets of tile kernels; each needs those before it.
struct Features {
  bool avx2 = false;        // AVX2, FMA and F16C
  bool avx512 = false;      // AVX-512 F, DQ, BW and VL
  bool avx512bf16 = false;  // and AVX512-BF16
  // Cores with AMX: bf16 forward makes 63 to 71 GFLOP/s by it and 130 to 140 by multiply-adds (Sapphire Rapids).
  bool slow_bf16_dots = false;
  bool amx = false;  // and AMX-TILE and AMX-BF16, for which the system gave this process permission
};

/// Found once in a process. On x86-64 Linux it asks for permission to use AMX tiles where there are any.
const Features& features();

}  // namespace narrows::cpu
