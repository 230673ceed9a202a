// Addresses and strides of one call. Everything else about it is in Problem.
#pragma once

#include "core/types.hpp"

#include <array>
#include <cstddef>

namespace narrows {

/// Up to four axes, in the order that the comment beside each member of Buffers says. Broadcast axes have stride 0, and a
/// varlen tensor has stride 0 on its batch axis: its rows are found through Sequence.
struct View {
  std::byte* data = nullptr;
  DType dtype = DType::fp32;
  std::array<i64, 4> strides{};  // bytes

  explicit operator bool() const { return data != nullptr; }
  std::byte* at(i64 a, i64 b = 0, i64 c = 0, i64 d = 0) const {
    return data + a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
  }
};

/// int32 values in memory of the call's device.
struct Indices {
  const std::int32_t* data = nullptr;
  i64 stride = 0;      // elements, between values
  i64 row_stride = 0;  // elements, between rows (block_table, key_begin, key_end)

  explicit operator bool() const { return data != nullptr; }
  i64 operator[](i64 index) const { return data[index * stride]; }
  i64 at(i64 row, i64 index) const { return data[row * row_stride + index * stride]; }
};

/// A 64-bit number, or the place to read it from when the call runs.
struct LateNumber {
  std::uint64_t value = 0;
  const std::int64_t* place = nullptr;

  std::uint64_t read() const { return place ? static_cast<std::uint64_t>(*place) : value; }
};

struct Buffers {
  View q, k, v, o;              // (b, s, h, d); pages: k and v are (page, slot, kv head, d)
  View lse;                     // (b, h, s)
  View bias, mask;              // (b, h, sq, sk)
  View alibi_slopes;            // (b, h)
  View sinks;                   // (h)
  View k_new, v_new;            // (b, s, kv head, d)
  View rotary_cos, rotary_sin;  // (position, pair)

  View dout, dq, dk, dv;  // (b, s, h, d)
  View dlse;              // (b, h, s)
  View dbias;             // (b, h, sq, sk)
  View dslopes;           // (b, h)
  View dsinks;            // (h)

  Indices cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, shift;
  LateNumber seed, offset;
  std::byte* workspace = nullptr;  // the caller's; null = the backend allocates
  std::int32_t* status = nullptr;  // of a GPU, 4 values; null = not wanted
  void* stream = nullptr;          // of a GPU

  Indices key_begin, key_end;  // (b, sq)

  Indices cache_seqlens, cache_batch_idx, leftpad, rotary_base, block_table;
};

}  // namespace narrows
