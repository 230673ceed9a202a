#include "cpu/tile_kernels.hpp"

#include "core/error.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <type_traits>
#include <vector>

namespace narrows::cpu {
namespace {

#if defined(__x86_64__)
// clang 14's __builtin_cpu_supports does not know f16c.
bool has_f16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

std::vector<const InstructionSet*> executable() {
  std::vector<const InstructionSet*> sets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    sets.push_back(&kTileKernelsAvx512);
  if (avx2) sets.push_back(&kTileKernelsAvx2);
#endif
  sets.push_back(&kTileKernelsPortable);
  return sets;
}

template <class T> std::vector<const TileKernels<T>*> kernels_of(const std::vector<const InstructionSet*>& sets) {
  std::vector<const TileKernels<T>*> kernels;
  for (const InstructionSet* set : sets) {
    if constexpr (std::is_same_v<T, float>)
      kernels.push_back(&set->single);
    else
      kernels.push_back(&set->twice);
  }
  return kernels;
}

}  // namespace

template <class T> std::span<const TileKernels<T>* const> available_tile_kernels() {
  static const std::vector<const TileKernels<T>*> kernels = kernels_of<T>(executable());
  return kernels;
}

template <class T> const TileKernels<T>& tile_kernels(std::string_view instruction_set) {
  for (const TileKernels<T>* kernels : available_tile_kernels<T>())
    if (instruction_set == kernels->name) return *kernels;
  refuse(ErrorCode::internal, "instruction_set", instruction_set, "this CPU cannot execute it");
}

template std::span<const TileKernels<float>* const> available_tile_kernels<float>();
template std::span<const TileKernels<double>* const> available_tile_kernels<double>();
template const TileKernels<float>& tile_kernels(std::string_view);
template const TileKernels<double>& tile_kernels(std::string_view);

}  // namespace narrows::cpu
