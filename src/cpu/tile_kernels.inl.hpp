// The tile operations of one instruction set, for operands of the compute type. A file defines its vectors
// (tile_vectors.inl.hpp) and its Isa, then includes this text. The rules for inline functions of tile_vectors.inl.hpp hold in all
// of it.
#include "cpu/tile_math.inl.hpp"

#include "cpu/tile_convert.inl.hpp"
#include "cpu/tile_transpose.inl.hpp"

#include "cpu/tile_products.inl.hpp"

#include "cpu/tile_softmax.inl.hpp"

#include "cpu/decode_kernels.inl.hpp"

#include "cpu/tile_table.inl.hpp"
