// The numbers of a call's rules, one head's.
#pragma once
#include "kernels/elements.cuh"

namespace narrows {

// What the call adds to one head's scores.
struct HeadRules {
  ScoreRules<float> scores;

  HeadRules(const CallArgs& args, i32 sequence, i32 head) : scores(args.rules) {
    const TensorArg& slopes = args.alibi_slopes;
    if constexpr (kAlibi)
      scores.slope =
          load_element(slopes.data + sequence * slopes.strides[0] + head * slopes.strides[1], slopes.element);
  }
};

inline DropoutRule dropout_rule(const CallArgs& args) {
  DropoutRule rule = args.dropout;
  rule.seed = args.seed.place ? static_cast<u64>(*args.seed.place) : args.seed.value;
  rule.offset = static_cast<u32>(args.offset.place ? static_cast<u64>(*args.offset.place) : args.offset.value);
  return rule;
}

}  // namespace narrows
