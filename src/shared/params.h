// Words of every header in src/shared: one text for g++, clang and NVRTC (with -default-device), so no includes, no
// macros.
#pragma once

namespace narrows {

using i32 = int;
using u32 = unsigned;
using i64 = long long;
using u64 = unsigned long long;

// A window side without limit. Positions and lengths stay below 2^41 in magnitude, so sums of one of these and a few of
// those are far from overflow.
constexpr i64 kUnlimited = i64{1} << 61;

template <class T> constexpr T min_of(T a, T b) { return b < a ? b : a; }

template <class T> constexpr T max_of(T a, T b) { return a < b ? b : a; }

template <class T> constexpr T clamp_to(T x, T low, T high) { return min_of(max_of(x, low), high); }

// a >= 0, b > 0. Unlike (a + b - 1) / b it cannot overflow.
template <class T> constexpr T ceil_div(T a, T b) { return a / b + (a % b != 0 ? T{1} : T{0}); }

// Rounds towards minus infinity; b > 0.
constexpr i64 floor_div(i64 a, i64 b) { return a / b - (a % b < 0 ? 1 : 0); }

}  // namespace narrows
