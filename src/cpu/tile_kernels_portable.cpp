// The baseline of the architecture, in 16-byte vectors.
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_generic.inl.hpp"

namespace narrows::cpu {
namespace {

struct Isa : GenericVectors {
  static constexpr const char* kName = "portable";
  static constexpr int kRows = 4;
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsPortable{kKernels<float>, kKernels<double>};
}  // namespace narrows::cpu
