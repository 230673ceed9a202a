// Multiply-adds in registers and reads of memory, loops for each instruction set. Compiled for it, so nothing of the
// standard library here.
#pragma once

namespace narrows::cpu {

struct PeakLoop {
  double flops_per_round;
  float (*run)(long rounds);  // the result depends on every round
};

/// The exclusive or of `blocks` blocks of kReadBlock bytes from `memory`, which is aligned to 64: eight loads of the widest
/// registers that do not wait for one another.
inline constexpr long kReadBlock = 512;
using ReadLoop = unsigned long long (*)(const void* memory, long blocks);

extern const PeakLoop kPeakLoopPortable;
extern const ReadLoop kReadLoopPortable;
#if defined(__x86_64__)
extern const PeakLoop kPeakLoopAvx2;
extern const PeakLoop kPeakLoopAvx512;
extern const PeakLoop kPeakLoopAvx512Bf16;  // of bf16 pairs: a product and a sum are two FLOPs
extern const PeakLoop kPeakLoopAmx;         // of bf16 tiles
extern const ReadLoop kReadLoopAvx2;
extern const ReadLoop kReadLoopAvx512;
#elif defined(__aarch64__)
extern const PeakLoop kPeakLoopNeon;
extern const ReadLoop kReadLoopNeon;
#endif

/// What the fp32 loops multiply by and add: values tend to 1, far from denormals. None begins there, where a compiler sees
/// that nothing changes.
inline constexpr float kPeakFactor = 0.5F, kPeakAddend = 0.5F;

}  // namespace narrows::cpu
