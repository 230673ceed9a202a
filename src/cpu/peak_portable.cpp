// A product and a sum, not fused: what the portable kernels are made of. Twelve chains of them fit in 16 registers.
namespace narrows::cpu {
namespace {

struct Peak {
  static constexpr int kVectorBytes = 16, kChains = 12;
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  static Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/peak_vectors.inl.hpp"

namespace narrows::cpu {
const PeakLoop kPeakLoopPortable = kRun;
const ReadLoop kReadLoopPortable = read;
}  // namespace narrows::cpu
