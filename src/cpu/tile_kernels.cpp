#include "cpu/tile_kernels.hpp"

#include "core/error.hpp"
#include "cpu/features.hpp"

#include <type_traits>
#include <vector>

namespace narrows::cpu {
namespace {

std::vector<const InstructionSet*> executable() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__)
  if (features().amx) sets.push_back(&kTileKernelsAmx);
  const bool slow_dots = features().slow_bf16_dots;
  if (features().avx512bf16 && !slow_dots) sets.push_back(&kTileKernelsAvx512Bf16);
  if (features().avx512) sets.push_back(&kTileKernelsAvx512);
  if (features().avx512bf16 && slow_dots) sets.push_back(&kTileKernelsAvx512Bf16);
  if (features().avx2) sets.push_back(&kTileKernelsAvx2);
#elif defined(__aarch64__)
  sets.push_back(&kTileKernelsNeon);
#endif
  sets.push_back(&kTileKernelsPortable);
  return sets;
}

template <class T> std::vector<const TileKernels<T>*> kernels_of(const std::vector<const InstructionSet*>& sets) {
  std::vector<const TileKernels<T>*> kernels;
  for (const InstructionSet* set : sets) {
    if constexpr (std::is_same_v<T, float>)
      kernels.push_back(&set->single);
    else if (set->twice.name)
      kernels.push_back(&set->twice);
  }
  return kernels;
}

std::vector<const InstructionSet*>& added() {
  static std::vector<const InstructionSet*> sets;
  return sets;
}

}  // namespace

template <class T> std::span<const TileKernels<T>* const> available_tile_kernels() {
  static const std::vector<const TileKernels<T>*> kernels = kernels_of<T>(executable());
  return kernels;
}

template <class T> const TileKernels<T>& tile_kernels(std::string_view instruction_set) {
  for (const TileKernels<T>* kernels : available_tile_kernels<T>())
    if (instruction_set == kernels->name) return *kernels;
  for (const TileKernels<T>* kernels : kernels_of<T>(added()))
    if (instruction_set == kernels->name) return *kernels;
  refuse(ErrorCode::internal, "instruction_set", instruction_set, "this CPU cannot execute it");
}

void add_tile_kernels(const InstructionSet& set) { added().push_back(&set); }

template std::span<const TileKernels<float>* const> available_tile_kernels<float>();
template std::span<const TileKernels<double>* const> available_tile_kernels<double>();
template const TileKernels<float>& tile_kernels(std::string_view);
template const TileKernels<double>& tile_kernels(std::string_view);

}  // namespace narrows::cpu
