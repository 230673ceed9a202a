// What forward and backward plans of family sm90 share: what the copy engine reads, and rules that neither kernel has.
#pragma once

#include "plan/plan.hpp"

namespace narrows::sm90 {

/// The copy engine's unit; tensors begin, and their strides are, at multiples of it.
inline constexpr i32 kUnitBytes = 16;
inline constexpr i64 kUnitColumns = 8;  // of 16 bits

std::string device_refusal(const Machine& machine);
std::string dtype_refusal(const Problem& problem);
std::string head_dim_refusal(const Problem& problem, i64 widest);
std::string rules_refusal(const Problem& problem);
std::string layout_refusal(std::string_view name, const Layout& layout);

}  // namespace narrows::sm90
