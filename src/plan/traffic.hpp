// What a plan moves on the way that its tiles shorten: between L2 and the multiprocessors.
#pragma once

#include "plan/plan.hpp"

namespace narrows {

/// Bytes of q, k, v, o and lse between L2 and the multiprocessors, forward on a GPU: a block of query rows reads every key that
/// one of its rows sees, and its value. N^2 d / query_block of them, and a query block's rows take a share of on-chip
/// memory: this is the Theta(N^2 d^2 / M). A bias and a mask are not counted. Lengths and bounds of rows on a device are not
/// read: then it is at most this. 0 for what no GPU's forward plan is. Goes through the query blocks of a sequence one by one.
i64 l2_bytes(const Call& call, const Plan& plan);

}  // namespace narrows
