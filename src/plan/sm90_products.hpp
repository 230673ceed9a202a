// Text of the matrix products that a program of family sm90 is made of.
#pragma once

#include "shared/call_args.h"

#include <string>

namespace narrows::sm90 {

/// Functions multiply_scores (Q from shared memory or from registers) and multiply_output, each one wgmma: D (+)= A B for 16 terms
/// of the sum, with fp32 sums of 64 rows by key_block or value_width columns. Their operand lists, one register each, are why
/// they are written here and not by hand.
std::string products_text(Element element, i32 key_block, i32 value_width);

/// The same of the backward kernel: multiply_scores (S^T, dP^T: 64 keys by query_block), multiply_sums (dV, dK: 64 keys by a width) and
/// multiply_gradients (dQ: 64 queries by 64 columns, of which A runs down its tile's columns).
std::string backward_products_text(Element element, i32 query_block, i32 head_width, i32 value_width);

/// Of the kernel of wide heads: all operands lie in shared memory, and sums are of 64 or 128 columns.
std::string backward_wide_products_text(Element element, i32 query_block);

}  // namespace narrows::sm90
