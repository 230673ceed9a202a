// Multiply-adds in registers, one loop for each instruction set. Compiled for it, so nothing of the standard library here.
#pragma once

namespace narrows::cpu {

struct PeakLoop {
  double flops_per_round;
  float (*run)(long rounds);  // the result depends on every round
};

extern const PeakLoop kPeakLoopPortable;
#if defined(__x86_64__)
extern const PeakLoop kPeakLoopAvx2;
extern const PeakLoop kPeakLoopAvx512;
#endif

/// What the loops multiply by and add: values stay near 1, far from denormals.
inline constexpr float kPeakFactor = 0.5F, kPeakAddend = 0.5F;

}  // namespace narrows::cpu
