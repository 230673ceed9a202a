// The results of packed rows, and what takes parts of a row to one reference.
#pragma once
#include "kernels/decode_facts.cuh"
#include "kernels/softmax.cuh"
#include "shared/ticket.h"

namespace narrows {

// What includes this has a kernel's kColumns, of the output.
constexpr int kColumnGroups = kColumns / 4;

// What a part's weights are relative to: score.h's Reference, by selections instead of branches. A part without keys is far out.
struct Origin {
  float base, subtrahend;

  Origin(const Units<float>& units, float maximum) {
    const float product = ScalarMath::multiply(maximum, units.c);
    const bool far = kNatural || !(fabsf(product) <= kFar);
    base = far ? maximum : 0.f;
    subtrahend = far ? 0.f : product;
  }
};

// Takes parts of a row to the reference of the largest of their maxima.
class Rescale {
 public:
  Rescale(const Units<float>& units, float most) : units_(units), to_(units, most == kHidden ? 0.f : most) {}

  float factor(float maximum) const {
    const Origin from(units_, maximum);
    return exp2_approx(__fmaf_rn(from.base - to_.base, units_.c, from.subtrahend - to_.subtrahend));
  }

 private:
  const Units<float>& units_;
  Origin to_;
};

inline void add(float4& to, float factor, const float4& x) {
  to.x = __fmaf_rn(factor, x.x, to.x);
  to.y = __fmaf_rn(factor, x.y, to.y);
  to.z = __fmaf_rn(factor, x.z, to.z);
  to.w = __fmaf_rn(factor, x.w, to.w);
}

inline void store_columns(const DecodeArgs& args, char* row, i32 column, const float (&x)[4]) {
  const i64 stride = args.o.strides[3];
  char* const at = row + column * stride;
  if (!args.whole_columns) {
#pragma unroll 1
    for (i32 i = 0; i < 4 && column + i < args.value_dim; ++i)
      store_number(at + i * stride, kElement, i < 2 ? i == 0 ? x[0] : x[1] : i == 2 ? x[2] : x[3]);
  } else if constexpr (kElementBytes == 2) {
    store_global2(at, pack(x[0], x[1]), pack(x[2], x[3]));
  } else {
    store_global4(reinterpret_cast<float*>(at), {x[0], x[1], x[2], x[3]});
  }
}

// Of packed row r: where its results go, and what is known of it without its columns.
struct ResultRow {
  char* to;
  float factor;
};

inline ResultRow result_of_row(const Block& block, int r, const RowSum& sum, bool first) {
  const DecodeArgs& args = block.args;
  const CacheFacts& sequence = block.facts.sequence;
  const PackedRow row = packed_row(args, block.facts, r);
  const float nan = as_float(0x7fffffffu);
  RowResult result = row_result(args.units, sum.maximum, sum.sum, args.sinks, row.head);
  if (row.query >= sequence.queries) result = {kHidden, 0.f};  // no query: no sink either
  if (sequence.broken) result = {nan, nan};
  if constexpr (kDropout) result.factor *= keep_factor<float>(args.dropout);
  const i64 query = sequence.first_query + row.query;
  if (first && args.lse.data != nullptr)
    *reinterpret_cast<float*>(args.lse.data + sequence.sequence * args.lse.strides[0] + row.head * args.lse.strides[1] +
                              query * args.lse.strides[2]) = result.lse;
  return {
      args.o.data + sequence.sequence * args.o.strides[0] + query * args.o.strides[1] + row.head * args.o.strides[2],
      result.factor};
}

// Where no key weighs O is 0, which NaN from values of the other rows' keys must not become.
inline void store_result(const Block& block, const ResultRow& row, i32 column, const float4& x) {
  if (column >= block.args.value_dim) return;
  const auto result = [&](float sum) { return row.factor == 0.f ? 0.f : sum * row.factor; };
  store_columns(block.args, row.to, column, {result(x.x), result(x.y), result(x.z), result(x.w)});
}

}  // namespace narrows
