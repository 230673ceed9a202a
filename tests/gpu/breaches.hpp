// Lengths on the device that break a rule, each in one place.
#pragma once

#include "tests/gpu/device_call.hpp"

#include <limits>
#include <string_view>
#include <vector>

namespace narrows::test {

inline constexpr int kMost = std::numeric_limits<int>::max(), kLeast = std::numeric_limits<int>::min();

/// Three sequences of 60, 71 and 69 queries, and of 90, 60 and 110 keys.
struct Varlen {
  Array cu_q = int32_array({0, 60, 131, 200}), cu_k = int32_array({0, 90, 150, 260});
  Array used_q = int32_array({60, 71, 69}), used_k = int32_array({90, 60, 110}), bias;
  Attention a = Attention::packed({1, 200, 260, 2, 1, 32, 40}, DType::bf16);

  explicit Varlen(std::string_view family = "sm80") {
    a.options.cu_seqlens_q = cu_q;
    a.options.cu_seqlens_k = cu_k;
    a.options.seqused_q = used_q;
    a.options.seqused_k = used_k;
    a.options.causal = Causal::bottom_right;
    a.options.family = family;
  }
  void give_bias(std::int64_t rows, std::int64_t keys) {
    bias = Array(DType::fp32, {rows, keys});
    bias.fill(0);
    a.options.bias = bias;
  }
};

struct Breaking {
  const char* name;
  Array Varlen::*lengths;
  std::int64_t index;
  int value;
  CallStatus status;
  int whole_from;  // sequences from this one on, but the broken one, are as they would be
};

inline const std::vector<Breaking> kBreaking{
    {"first query not 0", &Varlen::cu_q, 0, 1, {1, 0, 1, 0}, 3},
    {"first query negative", &Varlen::cu_q, 0, kLeast, {1, 0, kLeast, 0}, 3},
    {"queries out of order", &Varlen::cu_q, 2, 50, {2, 1, 50, 60}, 3},
    {"queries past the tensor", &Varlen::cu_q, 3, 201, {3, 2, 201, 200}, 3},
    {"queries far past the tensor", &Varlen::cu_q, 3, kMost, {3, 2, kMost, 200}, 3},
    {"first key not 0", &Varlen::cu_k, 0, 5, {4, 0, 5, 0}, 0},
    {"keys out of order", &Varlen::cu_k, 2, 80, {5, 1, 80, 90}, 3},
    {"keys past the tensor", &Varlen::cu_k, 3, 261, {6, 2, 261, 260}, 0},
    {"keys far past the tensor", &Varlen::cu_k, 3, kMost, {6, 2, kMost, 260}, 0},
    {"more queries used than there are", &Varlen::used_q, 1, 72, {7, 1, 72, 71}, 0},
    {"queries used negative", &Varlen::used_q, 1, -1, {7, 1, -1, 71}, 0},
    {"more keys used than there are", &Varlen::used_k, 2, 111, {8, 2, 111, 110}, 0},
    {"far more keys used than there are", &Varlen::used_k, 2, kMost, {8, 2, kMost, 110}, 0},
    {"keys used negative", &Varlen::used_k, 0, kLeast, {8, 0, kLeast, 90}, 0},
};

/// seqused would be a second breach beside broken bounds.
inline void leave_one_breach(Varlen& call, const Breaking& breaking) {
  if (breaking.lengths == &Varlen::cu_q || breaking.lengths == &Varlen::cu_k)
    call.a.options.seqused_q = call.a.options.seqused_k = {};
}

inline void expect_status(const CallStatus& found, const CallStatus& expected) {
  EXPECT_EQ(found.code, expected.code);
  EXPECT_EQ(found.sequence, expected.sequence);
  EXPECT_EQ(found.value, expected.value);
  EXPECT_EQ(found.limit, expected.limit);
}

}  // namespace narrows::test
