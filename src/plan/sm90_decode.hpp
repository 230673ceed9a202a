// Family sm90, few query rows of wide heads (MLA) against keys in a cache, in pages or in tensors.
#pragma once

#include "plan/sm80_decode.hpp"

namespace narrows {

/// Of a problem that decodes_wide().
std::variant<Plan, Refusal> consider_sm90_decode(const Problem& problem, const Work& work, const Machine& machine);

/// constants: those of such a plan.
Program decode_sm90_program(const DecodeConstants& constants);

/// Plain and with every rule in bf16, plain in fp16.
std::vector<Program> planned_decode_sm90_programs(const Machine& machine);

}  // namespace narrows
