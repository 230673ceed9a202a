// Calls made of bytes: a consistent call of the whole contract, bent in a few places, over memory of exactly its bytes.
#pragma once

#include "tests/fuzz/small_memory.hpp"

#include <narrows/narrows.hpp>

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace narrows::fuzz {

constexpr int kPoison = 0xFF;  // NaN in every float type, and none that arithmetic makes

inline void require(bool holds) {
  if (!holds) std::abort();
}

template <class Body> bool accepts(Body body) {
  try {
    body();
    return true;
  } catch (const Error& error) {
    require(*error.what() != '\0');
    return false;
  }
}

class Caller {
 public:
  Caller(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

 protected:
  /// A call of forward, or with the gradients of a backward one.
  void make(bool backward);
  bool is_result(const Tensor* tensor) const;
  /// What a call may have written: nothing if it was refused, else its results wholly, and appended keys and its state.
  void check_results(bool accepted);
  /// The bytes of every result, which are then poisoned again.
  std::vector<std::vector<std::byte>> take_results();

  Inputs in_;
  Outputs out_;
  Tensor dout_, dlse_;
  Gradients gradients_;
  Options options_;

 private:
  i64 pick(i64 low, i64 high) { return bytes_.ConsumeIntegralInRange<i64>(low, high); }
  bool one_in(int n) { return bytes_.ConsumeIntegralInRange<int>(0, n - 1) == 1; }
  i64 odd_number();
  Tensor tensor(DType dtype, const Dims& shape);
  Tensor floats(const Dims& shape) { return tensor(static_cast<DType>(pick(0, 3)), shape); }
  std::vector<std::int32_t> bounds(i64 batch, i64 rows);
  std::vector<std::int32_t> values(i64 count, i64 most);
  Dims broadcast(i64 b, i64 h, i64 rows, i64 columns);

  void sizes();
  void shapes();
  void rules();
  void lengths();
  void cache();
  void method();
  void bend(Tensor& tensor);
  void bend();
  void place(Tensor& tensor);
  void fill(const Tensor& tensor, Memory& memory);
  void gradients();
  void check_untouched_between(const Tensor& tensor, const Memory& memory, bool whole);

  FuzzedDataProvider bytes_;
  i64 b_ = 1, sq_ = 1, sk_ = 1, h_ = 1, hk_ = 1, d_ = 1, dv_ = 1;
  DType dtype_ = DType::fp32;
  bool backward_ = false, varlen_q_ = false, varlen_k_ = false, cached_ = false, paged_ = false;
  std::string family_;
  std::deque<std::pair<Tensor*, std::vector<std::int32_t>>> contents_;
  std::deque<std::pair<const Tensor*, Memory>> memories_;

  std::vector<Tensor*> all() {
    Options& o = options_;
    std::vector<Tensor*> tensors{&in_.q,          &in_.k,           &in_.v,
                                 &out_.o,         &out_.lse,        &o.alibi_slopes,
                                 &o.bias,         &o.sinks,         &o.shift,
                                 &o.mask,         &o.seed.tensor,   &o.offset.tensor,
                                 &o.cu_seqlens_q, &o.cu_seqlens_k,  &o.seqused_q,
                                 &o.seqused_k,    &o.cache_seqlens, &o.block_table,
                                 &o.leftpad,      &o.k_new,         &o.v_new,
                                 &o.rotary_cos,   &o.rotary_sin,    &o.cu_seqlens_k_new,
                                 &o.rotary_base,  &o.workspace,     &o.cache_batch_idx,
                                 &o.status,       &o.key_begin,     &o.key_end};
    if (backward_)
      tensors.insert(tensors.end(), {&dout_, &dlse_, &gradients_.dq, &gradients_.dk, &gradients_.dv, &gradients_.dbias,
                                     &gradients_.dslopes, &gradients_.dsinks});
    return tensors;
  }
};

inline i64 Caller::odd_number() {
  constexpr i64 kMost = std::numeric_limits<i64>::max();
  constexpr std::array<i64, 16> kNumbers{
      0,     1,          -1,     2,  -2, 3, 7, i64{1} << 16, i64{1} << 31, i64{1} << 32, i64{1} << 40, i64{1} << 62,
      kMost, -kMost - 1, -kMost, 257};
  return one_in(4) ? bytes_.ConsumeIntegral<i64>() : bytes_.PickValueInArray(kNumbers);
}

/// Row-major, or with the axes in another order in memory, gaps, or turned around.
inline Tensor Caller::tensor(DType dtype, const Dims& shape) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  if (!one_in(3)) return tensor;
  tensor.strides = shape;
  i64 step = pick(1, 3);
  std::vector<std::size_t> order(shape.rank());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::rotate(order.begin(), order.begin() + pick(0, static_cast<i64>(order.size()) - 1), order.end());
  for (const std::size_t axis : order) {
    tensor.strides[axis] = one_in(8) ? -step : step;
    step *= std::max<i64>(shape[axis], 1) + pick(0, 1);
  }
  return tensor;
}

inline std::vector<std::int32_t> Caller::bounds(i64 batch, i64 rows) {
  std::vector<std::int32_t> bounds{0};
  for (i64 s = 0; s < batch; ++s) bounds.push_back(static_cast<std::int32_t>(pick(bounds.back(), rows)));
  return bounds;
}

inline std::vector<std::int32_t> Caller::values(i64 count, i64 most) {
  std::vector<std::int32_t> values;
  for (i64 s = 0; s < count; ++s) values.push_back(static_cast<std::int32_t>(pick(0, most)));
  return values;
}

inline Dims Caller::broadcast(i64 b, i64 h, i64 rows, i64 columns) {
  Dims shape;
  const std::array<i64, 4> full{b, h, rows, columns};
  for (std::size_t axis = static_cast<std::size_t>(pick(0, 3)); axis < 4; ++axis)
    shape.push_back(one_in(3) ? 1 : full[axis]);
  return shape;
}

inline void Caller::sizes() {
  b_ = pick(0, 3);
  hk_ = pick(0, 3);
  h_ = hk_ * pick(1, 3);
  sq_ = pick(0, 20);
  sk_ = pick(0, 24);
  d_ = one_in(8) ? pick(1, 576) : pick(1, 20);
  dv_ = one_in(3) ? pick(1, 20) : d_;
  dtype_ = static_cast<DType>(pick(0, 3));
  cached_ = one_in(6);
  paged_ = cached_ && one_in(2);
  varlen_q_ = one_in(4);
  varlen_k_ = !cached_ && one_in(4);
}

inline void Caller::shapes() {
  const auto rows = [](bool varlen, i64 batch, i64 length, i64 heads, i64 width) {
    return varlen ? Dims{length, heads, width} : Dims{batch, length, heads, width};
  };
  const i64 batches = paged_ ? pick(1, 4) : b_;
  const i64 k_rows = paged_ ? pick(1, 5) : sk_;
  in_.q = tensor(dtype_, rows(varlen_q_, b_, sq_, h_, d_));
  in_.k = tensor(dtype_, rows(varlen_k_, batches, k_rows, hk_, d_));
  in_.v = tensor(dtype_, rows(varlen_k_, batches, k_rows, hk_, dv_));
  out_.o = tensor(dtype_, rows(varlen_q_, b_, sq_, h_, dv_));
  if (one_in(2))
    out_.lse = tensor(dtype_ == DType::fp64 ? DType::fp64 : DType::fp32, varlen_q_ ? Dims{h_, sq_} : Dims{b_, h_, sq_});
}

inline void Caller::rules() {
  Options& o = options_;
  constexpr std::array<double, 8> kScales{1,    0, -1, 0.125, 1e30, -1e-30, std::numeric_limits<double>::infinity(),
                                          1e300};
  if (one_in(3)) o.scale = bytes_.PickValueInArray(kScales);
  if (one_in(6)) o.softcap = bytes_.PickValueInArray({1.0, 30.0, 1e-3, -1.0, 1e300});
  if (one_in(6)) o.alibi_slopes = floats(one_in(2) ? Dims{h_} : Dims{b_, h_});
  if (one_in(4)) o.bias = floats(broadcast(b_, h_, sq_, sk_));
  if (one_in(6)) o.sinks = floats(Dims{h_});
  if (one_in(3)) o.causal = static_cast<Causal>(pick(0, 3));
  if (one_in(6)) contents_.emplace_back(&o.shift, values(b_, 40));
  if (one_in(3)) o.window = {one_in(8) ? odd_number() : pick(-1, 20), one_in(8) ? odd_number() : pick(-1, 20)};
  if (one_in(6)) o.chunk = one_in(4) ? odd_number() : pick(0, 20);
  if (one_in(4)) o.mask = tensor(DType::boolean, broadcast(b_, h_, sq_, sk_));
  if (!one_in(12)) return;
  o.dropout = bytes_.PickValueInArray({0.5, 0.1, 0.99999, 1.0, -0.5, std::numeric_limits<double>::quiet_NaN()});
  o.seed = bytes_.ConsumeIntegral<std::uint64_t>();
  o.offset = bytes_.ConsumeIntegral<std::uint64_t>();
  if (one_in(4)) o.seed.tensor = tensor(DType::int64, Dims{1});
  if (one_in(4)) o.offset.tensor = tensor(DType::int64, Dims{1});
  if (one_in(2)) o.origin = {odd_number(), odd_number(), odd_number(), odd_number(), odd_number()};
}

/// Of everything that has one, in a layout of its own, and rarely of something that has none.
inline void Caller::gradients() {
  const Options& o = options_;
  dout_ = tensor(dtype_, out_.o.shape);
  out_.lse = tensor(dtype_ == DType::fp64 ? DType::fp64 : DType::fp32, varlen_q_ ? Dims{h_, sq_} : Dims{b_, h_, sq_});
  if (one_in(3)) dlse_ = tensor(out_.lse.dtype, out_.lse.shape);
  const auto want = [&](Tensor& gradient, const Tensor& of) {
    if (of.given() ? !one_in(4) : one_in(64)) gradient = tensor(of.dtype, of.given() ? of.shape : Dims{h_});
  };
  want(gradients_.dq, in_.q);
  want(gradients_.dk, in_.k);
  want(gradients_.dv, in_.v);
  want(gradients_.dbias, o.bias);
  want(gradients_.dslopes, o.alibi_slopes);
  want(gradients_.dsinks, o.sinks);
}

inline void Caller::lengths() {
  if (varlen_q_) contents_.emplace_back(&options_.cu_seqlens_q, bounds(b_, sq_));
  if (varlen_k_) contents_.emplace_back(&options_.cu_seqlens_k, bounds(b_, sk_));
  if (one_in(5)) contents_.emplace_back(&options_.seqused_q, values(b_, varlen_q_ ? 2 : sq_));
  if (one_in(5)) contents_.emplace_back(&options_.seqused_k, values(b_, varlen_k_ ? 2 : sk_));
  const Dims rows = varlen_q_ ? Dims{sq_} : Dims{b_, sq_};
  for (Tensor* bound : {&options_.key_begin, &options_.key_end})
    if (one_in(6)) contents_.emplace_back(&(*bound = tensor(DType::int32, rows)), values(b_ * sq_, sk_ + 2));
}

inline void Caller::cache() {
  Options& o = options_;
  contents_.emplace_back(&o.cache_seqlens, values(b_, paged_ ? 6 : sk_));
  if (paged_) {
    contents_.emplace_back(&o.block_table, values(b_ * 3, 3));
    o.block_table.shape = {b_, 3};
  }
  if (one_in(4)) contents_.emplace_back(&o.leftpad, values(b_, 3));
  if (one_in(4)) contents_.emplace_back(&o.cache_batch_idx, values(b_, 3));
  if (one_in(3)) {
    const bool varlen = one_in(3);
    const i64 rows = pick(0, 4);
    o.k_new = tensor(dtype_, varlen ? Dims{rows, hk_, d_} : Dims{b_, rows, hk_, d_});
    o.v_new = tensor(dtype_, varlen ? Dims{rows, hk_, dv_} : Dims{b_, rows, hk_, dv_});
    if (varlen) contents_.emplace_back(&o.cu_seqlens_k_new, bounds(b_, rows));
  }
  if (!one_in(3)) return;
  const Dims table{pick(0, 60), pick(0, d_ / 2)};
  o.rotary_cos = floats(table);
  o.rotary_sin = tensor(o.rotary_cos.dtype, table);
  o.rotary_interleaved = one_in(2);
  if (one_in(3)) contents_.emplace_back(&o.rotary_base, values(b_, 30));
}

inline void Caller::method() {
  Options& o = options_;
  o.threads = one_in(16) ? static_cast<int>(odd_number()) : static_cast<int>(pick(1, 3));
  if (one_in(12)) o.deterministic = true;
  if (one_in(12)) o.batch_invariant = true;
  if (one_in(12)) o.num_splits = static_cast<int>(one_in(2) ? odd_number() : pick(1, 4));
  if (one_in(12)) o.workspace = tensor(DType::uint8, Dims{pick(0, 2000)});
  if (one_in(12)) o.status = tensor(DType::int32, Dims{4});
  if (one_in(12)) o.check = true;
  if (one_in(16)) family_ = one_in(2) ? "cpu" : bytes_.ConsumeRandomLengthString(8);
  o.family = family_;
}

inline void Caller::bend(Tensor& tensor) {
  const auto axis = [&] { return static_cast<std::size_t>(pick(0, static_cast<i64>(tensor.shape.rank()) - 1)); };
  switch (pick(0, 7)) {
    case 0: tensor.dtype = static_cast<DType>(pick(0, 9)); return;
    case 1: tensor.device = {static_cast<DeviceKind>(pick(0, 2)), static_cast<int>(odd_number())}; return;
    case 2:
      if (tensor.shape.rank() < Dims::kMaxRank) tensor.shape.push_back(odd_number());
      return;
    case 3: tensor = Tensor{}; return;
    case 4:
      tensor.strides = {};
      for (i64 i = pick(0, 5); i > 0; --i) tensor.strides.push_back(odd_number());
      return;
    case 5:
      if (tensor.given() && !tensor.strides.empty()) tensor.strides[axis() % tensor.strides.rank()] = odd_number();
      return;
    default:
      if (tensor.given()) tensor.shape[axis()] = odd_number();
  }
}

inline void Caller::bend() {
  const auto tensors = all();
  for (i64 bends = one_in(2) ? pick(0, 4) : 0; bends > 0; --bends) {
    Tensor& target = *tensors[static_cast<std::size_t>(pick(0, static_cast<i64>(tensors.size()) - 1))];
    bend(target);
    if (one_in(4)) {  // the same odd size everywhere along an axis stays consistent
      const i64 size = odd_number();
      for (Tensor* tensor : {&in_.q, &in_.k, &in_.v, &out_.o, &out_.lse})
        if (tensor->given()) tensor->shape[0] = size;
    }
  }
  if (!contents_.empty() && one_in(4)) {
    auto& numbers = contents_[static_cast<std::size_t>(pick(0, static_cast<i64>(contents_.size()) - 1))].second;
    if (!numbers.empty())
      numbers[static_cast<std::size_t>(pick(0, static_cast<i64>(numbers.size()) - 1))] =
          static_cast<std::int32_t>(odd_number());
  }
}

/// Memory of exactly the bytes that the strides reach, or none.
inline void Caller::place(Tensor& tensor) {
  Wide low = 0;
  Wide high = 0;
  if (!tensor.given() || item_size(tensor.dtype) == 0 || !small_reach(tensor, low, high)) return;
  const auto item = static_cast<Wide>(item_size(tensor.dtype));
  Memory& memory = memories_.emplace_back(&tensor, Memory{}).second;
  memory.size = static_cast<std::size_t>((high - low + 1) * item);
  memory.first = static_cast<std::size_t>(-low * item);
  memory.bytes = std::make_unique<std::byte[]>(memory.size);
  tensor.data = memory.bytes.get() + memory.first;
  fill(tensor, memory);
  memory.remember();
}

inline void Caller::fill(const Tensor& tensor, Memory& memory) {
  if (is_result(&tensor)) {
    std::memset(memory.bytes.get(), kPoison, memory.size);
    return;
  }
  fill_elements(tensor, bytes_.ConsumeIntegral<std::uint16_t>());
  const auto numbers =
      std::find_if(contents_.begin(), contents_.end(), [&](const auto& content) { return content.first == &tensor; });
  if (numbers == contents_.end() || tensor.dtype != DType::int32) return;
  auto value = numbers->second.begin();
  each_element(tensor, [&](std::byte* element) {
    if (value != numbers->second.end()) std::memcpy(element, &*value++, 4);
  });
}

/// None of the bytes between elements was written, and if `whole` every element was.
inline void Caller::check_untouched_between(const Tensor& tensor, const Memory& memory, bool whole) {
  std::vector<bool> written(memory.size, false);
  const std::size_t item = item_size(tensor.dtype);
  each_element(tensor, [&](const std::byte* element) {
    bool poisoned = true;
    for (std::size_t i = 0; i < item; ++i) {
      written[static_cast<std::size_t>(element - memory.bytes.get()) + i] = true;
      poisoned = poisoned && element[i] == static_cast<std::byte>(kPoison);
    }
    require(!whole || !poisoned);
  });
  for (std::size_t i = 0; i < memory.size; ++i) require(written[i] || memory.bytes[i] == memory.before[i]);
}

inline void Caller::check_results(bool accepted) {
  for (const auto& [tensor, memory] : memories_) {
    const bool grows = options_.k_new.given() && (tensor == &in_.k || tensor == &in_.v);
    const bool state = tensor == &options_.workspace || tensor == &options_.status;
    if (accepted && (grows || is_result(tensor)))
      check_untouched_between(*tensor, memory, !grows);
    else if (!accepted || !state)
      require(std::equal(memory.before.begin(), memory.before.end(), memory.bytes.get()));
  }
}

inline bool Caller::is_result(const Tensor* tensor) const {
  const Gradients& g = gradients_;
  if (!backward_) return tensor == &out_.o || tensor == &out_.lse;
  const std::array<const Tensor*, 6> results{&g.dq, &g.dk, &g.dv, &g.dbias, &g.dslopes, &g.dsinks};
  return std::find(results.begin(), results.end(), tensor) != results.end();
}

inline std::vector<std::vector<std::byte>> Caller::take_results() {
  std::vector<std::vector<std::byte>> taken;
  for (auto& [tensor, memory] : memories_) {
    if (!is_result(tensor)) continue;
    taken.emplace_back(memory.bytes.get(), memory.bytes.get() + memory.size);
    std::memset(memory.bytes.get(), kPoison, memory.size);
  }
  return taken;
}

inline void Caller::make(bool backward) {
  backward_ = backward;
  sizes();
  shapes();
  rules();
  lengths();
  if (cached_) cache();
  if (backward_) gradients();
  method();
  for (auto& [tensor, numbers] : contents_) {
    tensor->dtype = DType::int32;
    if (!tensor->given()) tensor->shape = {static_cast<i64>(numbers.size())};
  }
  bend();
  for (Tensor* tensor : all()) place(*tensor);
}

}  // namespace narrows::fuzz
