// The tile operations of an instruction set with dot products of bf16 pairs, as tile_kernels.inl.hpp is the text of the others:
// after its Isa.
#include "cpu/tile_math.inl.hpp"

#include "cpu/tile_convert.inl.hpp"
#include "cpu/tile_transpose.inl.hpp"

#include "cpu/tile_bf16.inl.hpp"

#include "cpu/tile_pairs.inl.hpp"

#include "cpu/tile_softmax.inl.hpp"

#include "cpu/tile_table.inl.hpp"
