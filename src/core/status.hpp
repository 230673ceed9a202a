// The four numbers of `status` in words.
#pragma once

#include "core/problem.hpp"
#include "shared/status.h"

#include <string>

namespace narrows {

/// The text that the same values would be refused with if the host had read them, then the problem's. status.code is not 0.
std::string status_text(const Problem& problem, const CallStatus& status);

}  // namespace narrows
