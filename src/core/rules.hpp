// Rules for scores, masks and dropout.
#pragma once

#include "core/tensors.hpp"

namespace narrows {

/// scale, softcap, causal, shift, window, chunk, key_begin, key_end and the numbers that say how to compute.
void check_numbers(Call& call, const Options& options);
/// dropout, seed, offset, origin: after the lengths are known.
void check_dropout(Call& call, const Options& options, bool needs_data);
/// alibi_slopes, sinks, bias, mask: after the lengths are known.
void check_score_tensors(Call& call, const Options& options, bool needs_data);

}  // namespace narrows
