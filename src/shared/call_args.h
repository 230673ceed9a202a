// What every kernel of a call is given when it is launched: what may differ between two launches of one program, forward or
// backward. Addresses are the device's; strides are bytes.
#pragma once
#include "shared/mask.h"
#include "shared/philox.h"
#include "shared/score.h"

namespace narrows {

// The floating element types, as the library numbers them.
enum class Element : unsigned char { fp16, bf16, fp32, fp64 };

// (b, s, h, d), or (b, h, sq, sk) for a bias or a mask; an axis that is broadcast has stride 0, and so has the batch axis of a
// varlen tensor.
struct TensorArg {
  char* data = nullptr;
  i64 strides[4] = {};
  Element element = Element::fp32;
};

// int32 values; a null one is not given.
struct IndicesArg {
  const i32* data = nullptr;
  i64 stride = 0;  // elements
};

// int32 values of query rows, (b, s); not given as above.
struct RowIndicesArg {
  const i32* data = nullptr;
  i64 batch_stride = 0, stride = 0;  // elements
};

// A number, or the place to read it from.
struct LateArg {
  u64 value = 0;
  const i64* place = nullptr;
};

struct CallArgs {
  TensorArg bias, mask;    // null: none
  TensorArg alibi_slopes;  // (b, h)
  TensorArg sinks;         // strides[0] is the head's
  IndicesArg cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, shift;
  RowIndicesArg key_begin, key_end;
  i32 batch = 0, heads = 0, group = 1;  // group: query heads of a kv head
  i32 query_rows = 0, key_rows = 0;     // of the tensors: a sequence's, varlen all
  i32 head_dim = 0, value_dim = 0;
  i32 score_rows = 0, score_keys = 0;  // that bias and mask reach to
  bool top_left = false;               // shift 0 instead of sk - sq
  Mask visibility;
  Units<float> units;
  ScoreRules<float> rules;  // the slope is each head's own
  DropoutRule dropout;      // without seed and offset
  LateArg seed, offset;
  i32* status = nullptr;  // null: not wanted
};

}  // namespace narrows
