// The C structs as their C++ counterparts. Refuses what C++ types could not hold: sizes, enumerators, flags, ranks.
#pragma once

#include <narrows/narrows.h>
#include <narrows/narrows.hpp>

#include <string_view>
#include <vector>

namespace narrows::boundary {

// Nothing is copied but the structs: the results point to the caller's memory, the family's name included.
Inputs inputs_from(const narrows_inputs* caller);
Outputs outputs_from(const narrows_outputs* caller);
BackwardInputs backward_inputs_from(const narrows_backward_inputs* caller);
Gradients gradients_from(const narrows_gradients* caller);
/// `count` structs of one size, whatever release that size is of. NULL is an array of none.
std::vector<Outputs> parts_from(std::string_view argument, const narrows_outputs* caller, std::size_t count);
Tensor optional_tensor_from(std::string_view argument, const narrows_tensor* caller);  // NULL: not given

/// The C++ struct points to its parts.
struct OwnedMergeGradients {
  std::vector<Outputs> parts;
  MergeGradients gradients;
};
OwnedMergeGradients merge_gradients_from(const narrows_merge_gradients* caller, std::size_t count);
Options options_from(const narrows_options* caller);  // NULL: all defaults

}  // namespace narrows::boundary
