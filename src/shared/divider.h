// Division by a number that the host knows, as a multiplication and a shift: a kernel's own division takes 20 instructions one after
// the other. (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.)
#pragma once
#include "shared/params.h"

namespace narrows {

struct Quotient {
  i32 quotient, rest;
};

struct Divider {
  i32 divisor = 1;
  i32 shift = 31;
  u32 factor = u32{1} << 31;  // 2^shift / divisor, rounded up

  // 0 <= x < 2^31
  constexpr i32 quotient(i32 x) const { return static_cast<i32>(u64{static_cast<u32>(x)} * factor >> shift); }
  constexpr Quotient divide(i32 x) const {
    const i32 whole = quotient(x);
    return {whole, x - whole * divisor};
  }
};

// 0 < divisor. With 2^n the power of two that is not less, the factor's error times x / 2^(31 + n) is less than 1 / divisor.
constexpr Divider divider(i32 divisor) {
  i32 shift = 31;
  while (i64{1} << (shift - 31) < divisor) ++shift;
  const u64 size = static_cast<u32>(divisor);
  return {divisor, shift, static_cast<u32>(((u64{1} << shift) + size - 1) / size)};
}

}  // namespace narrows
