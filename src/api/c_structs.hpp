// The C structs as their C++ counterparts. Refuses what C++ types could not hold: sizes, enumerators, flags, ranks.
#pragma once

#include <narrows/narrows.h>
#include <narrows/narrows.hpp>

namespace narrows::boundary {

// Nothing is copied but the structs: the results point to the caller's memory, the family's name included.
Inputs inputs_from(const narrows_inputs* caller);
Outputs outputs_from(const narrows_outputs* caller);
Options options_from(const narrows_options* caller);  // NULL: all defaults

}  // namespace narrows::boundary
