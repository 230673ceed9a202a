// What explain says of any call, forward or backward.
#pragma once

#include "core/problem.hpp"

#include <string_view>

namespace narrows {

/// `family`: forced by name, or empty.
Explanation explained(const Call& call, std::string_view family);

}  // namespace narrows
