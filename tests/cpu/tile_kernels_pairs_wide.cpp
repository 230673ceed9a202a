// The tile kernels of AVX512-BF16 for machines that have none: the same text but for the intrinsics.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_generic.inl.hpp"

#include "tests/cpu/tile_bf16_generic.hpp"

namespace narrows::cpu {
namespace {

struct Isa : GenericBf16 {
  static constexpr const char* kName = "pairs";
  static constexpr int kRows = 12, kDepth = 2;
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels_pairs.inl.hpp"

namespace narrows::cpu {
extern const InstructionSet kTileKernelsPairsWide;
constinit const InstructionSet kTileKernelsPairsWide{kKernels<float>, {}};
}  // namespace narrows::cpu
