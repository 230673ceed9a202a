#include "cpu/features.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace narrows::cpu {
namespace {

#if defined(__x86_64__)

// Read here and not by __builtin_cpu_supports where clang 14's does not know the name.
struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Leaf leaf(unsigned number, unsigned sub) {
  Leaf found;
  __get_cpuid_count(number, sub, &found.a, &found.b, &found.c, &found.d);
  return found;
}

bool has(unsigned word, int bit) { return (word >> bit & 1U) != 0; }

/// Whether the system saves the tiles' configuration and data (components 17 and 18) between processes.
bool system_keeps_tiles() {
  constexpr int kOsxsave = 27;
  constexpr unsigned kTiles = 3U << 17;
  if (!has(leaf(1, 0).c, kOsxsave)) return false;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTiles) == kTiles;
}

/// Linux gives tiles, whose state is 8 KiB a thread, to processes that ask.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, which older headers lack
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features found() {
  constexpr int kF16c = 29, kAvx512Bf16 = 5, kAmxBf16 = 22, kAmxTile = 24;
  __builtin_cpu_init();
  Features features;
  features.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has(leaf(1, 0).c, kF16c);
  features.avx512 = features.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  features.avx512bf16 = features.avx512 && has(leaf(7, 1).a, kAvx512Bf16);
  const unsigned tiles = leaf(7, 0).d;
  features.slow_bf16_dots = features.avx512bf16 && has(tiles, kAmxTile);
  features.amx =
      features.avx512bf16 && has(tiles, kAmxTile) && has(tiles, kAmxBf16) && system_keeps_tiles() && may_use_tiles();
  return features;
}

#else

Features found() { return {}; }

#endif

}  // namespace

const Features& features() {
  static const Features kFound = found();
  return kFound;
}

}  // namespace narrows::cpu
