// Sixteen chains: four units of latency 4 never wait.
#include <arm_neon.h>

namespace narrows::cpu {
namespace {

struct Peak {
  static constexpr int kVectorBytes = 16, kChains = 16;
  static float32x4_t multiply_add(float32x4_t a, float32x4_t b, float32x4_t c) { return vfmaq_f32(c, a, b); }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/peak_vectors.inl.hpp"

namespace narrows::cpu {
const PeakLoop kPeakLoopNeon = kRun;
const ReadLoop kReadLoopNeon = read;
}  // namespace narrows::cpu
