// Rules for KV caches: slots, pages, appended keys and rotary tables.
#pragma once

#include "core/tensors.hpp"

namespace narrows {

bool is_cache_call(const Options& options);

/// Everything of a cache call but k and v's own shapes; fills max_keys. The mask must be known: a table entry is checked,
/// like it is read, only where a visible or an appended key lies in its page. What a GPU's int32 tensors hold is not looked at.
void check_cache(Call& call, const Options& options, bool needs_data);

}  // namespace narrows
