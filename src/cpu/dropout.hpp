// Dropout of a row's weights, in forward and backward, by the rule of shared/philox.h.
#pragma once

#include "core/problem.hpp"
#include "shared/philox.h"

namespace narrows::cpu {

/// The call's rule; seed and offset are read here, when the call runs. Threshold 65536 without dropout.
inline DropoutRule dropout_rule(const Problem& problem, const Buffers& buffers) {
  const Origin& origin = problem.rules.origin;
  return {buffers.seed.read(),
          static_cast<u32>(buffers.offset.read()),
          keep_threshold(problem.rules.dropout),
          origin.b,
          origin.h,
          origin.i,
          origin.j,
          origin.H ? origin.H : problem.heads};
}

/// Multiplies the weights of keys [first_key, first_key + count) by 0 or 65536 / n. A row's sum, and so its LSE, is taken
/// before.
template <class T> void drop(const DropoutRule& rule, i64 batch, i64 h, i64 i, i64 first_key, i64 count, T* weights) {
  const T factor = keep_factor<T>(rule);
  // Up to a multiple of 8 on the global axis: from there on a Philox block decides for 8 keys at once.
  for (i64 key = 0; key < count;) {
    const i64 keys = min_of(count - key, 8 - static_cast<i64>(global_key(rule, first_key + key) % 8));
    const u32 bits = keep_bits8(rule, batch, h, i, first_key + key);
    for (i64 next = 0; next < keys; ++next)
      weights[key + next] = (bits >> next & 1) != 0 ? weights[key + next] * factor : T{0};
    key += keys;
  }
}

}  // namespace narrows::cpu
