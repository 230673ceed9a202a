// What a kernel finds wrong with a sequence whose lengths only the device knows. core/status.hpp puts it into words.
#pragma once
#include "shared/params.h"

namespace narrows {

// The numbers are public: callers read them from `status`.
enum class StatusCode : i32 {
  kept = 0,  // every rule
  cu_seqlens_q_start = 1,
  cu_seqlens_q_order = 2,
  cu_seqlens_q_end = 3,
  cu_seqlens_k_start = 4,
  cu_seqlens_k_order = 5,
  cu_seqlens_k_end = 6,
  seqused_q = 7,
  seqused_k = 8,
  score_rows = 9,  // of bias or mask: fewer than the sequence has query rows
  score_keys = 10,
  offset = 11,  // of dropout
  cu_seqlens_k_new_start = 12,
  cu_seqlens_k_new_order = 13,
  cu_seqlens_k_new_end = 14,
  cache_seqlens = 15,
  cache_batch_idx = 16,
  leftpad = 17,
  capacity = 18,     // slots that are filled, of which the new keys leave no more than the limit
  block_table = 19,  // an entry of a page in which a key is seen
  rotary_base = 20,
  rotary_reach = 21,  // positions; the tables have no more than the limit
};

// The four numbers of `status`; the first kernel that finds a breach writes them.
struct CallStatus {
  i32 code = 0;  // a StatusCode
  i32 sequence = 0;
  i32 value = 0;
  i32 limit = 0;
};

struct Breach {
  StatusCode code = StatusCode::kept;
  i32 value = 0;
  i32 limit = 0;
};

// Of the bounds of a sequence among a tensor's `rows`. start: cu_seqlens_q_start or cu_seqlens_k_start; first: sequence 0.
constexpr Breach bounds_breach(StatusCode start, i32 begin, i32 end, i32 rows, bool first) {
  const i32 code = static_cast<i32>(start);
  if (first ? begin != 0 : begin < 0) return {start, begin, 0};
  if (end < begin) return {static_cast<StatusCode>(code + 1), end, begin};
  if (end > rows) return {static_cast<StatusCode>(code + 2), end, rows};
  return {};
}

// code: seqused_q or seqused_k.
constexpr Breach used_breach(StatusCode code, i32 used, i32 length) {
  return used < 0 || used > length ? Breach{code, used, length} : Breach{};
}

// code: score_rows or score_keys; `reach` of them in bias and mask.
constexpr Breach reach_breach(StatusCode code, i32 length, i32 reach) {
  return length > reach ? Breach{code, length, reach} : Breach{};
}

// A value of a (b) tensor that must be in [0, limit].
constexpr Breach value_breach(StatusCode code, i32 value, i32 limit) {
  return value < 0 || value > limit ? Breach{code, value, limit} : Breach{};
}

// A Philox counter holds 32 bits of it; the value is what does not fit.
constexpr Breach offset_breach(u64 offset) {
  const u32 high = static_cast<u32>(offset >> 32);
  return high != 0 ? Breach{StatusCode::offset, static_cast<i32>(high), 0} : Breach{};
}

}  // namespace narrows
