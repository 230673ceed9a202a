#include "tools/bench_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/calls.hpp"
#include "core/work.hpp"
#include "cpu/reference_numbers.hpp"
#include "tools/bench_table.hpp"

namespace narrows::cli {
namespace {

double next(std::uint64_t& state) {
  state = state * 6364136223846793005U + 1442695040888963407U;
  return static_cast<double>(state >> 11) * 0x1p-53;
}

/// A sum of twelve: close to a normal number.
double normal(std::uint64_t& state) {
  double sum = -6;
  for (int draw = 0; draw < 12; ++draw) sum += next(state);
  return sum;
}

/// Fills memory with its own beginning.
void repeat(std::span<std::byte> bytes, std::size_t period) {
  for (std::size_t at = period; at < bytes.size(); at += period)
    std::memcpy(bytes.data() + at, bytes.data(), std::min(period, bytes.size() - at));
}

constexpr std::size_t kPeriod = 65521;  // elements; prime, so that rows differ

}  // namespace

BenchCall::BenchCall(const Row& row) : row_(row) {
  const bool varlen = row.special == Case::varlen;
  const auto shape = [&](std::int64_t rows, std::int64_t heads, std::int64_t width) {
    return varlen ? Dims{rows, heads, width} : Dims{row.b, rows, heads, width};
  };
  const Dims queries = shape(row.sq, row.h, row.d), results = shape(row.sq, row.h, row.dv);
  in_.q = numbers(row.dtype, queries);
  out_.o = numbers(row.dtype, results);
  options_.causal = row.causal ? Causal::bottom_right : Causal::none;
  options_.threads = row.threads;
  if (row.op == Op::decode) {
    add_cache();
    return;
  }
  in_.k = numbers(row.dtype, shape(row.sk, row.hk, row.d));
  in_.v = numbers(row.dtype, shape(row.sk, row.hk, row.dv));
  add_rules();
  if (row.op == Op::forward) return;
  out_.lse = numbers(DType::fp32, varlen ? Dims{row.h, row.sq} : Dims{row.b, row.h, row.sq});
  forward(in_, out_, options_);
  saved_ = {in_.q, in_.k, in_.v, out_.o, out_.lse, numbers(row.dtype, results), {}};
  gradients_.dq = numbers(row.dtype, queries);
  gradients_.dk = numbers(row.dtype, in_.k.shape);
  gradients_.dv = numbers(row.dtype, in_.v.shape);
}

void BenchCall::add_rules() {
  constexpr double kSoftcap = 30, kDropout = 0.1;
  constexpr std::int64_t kWindow = 512;
  switch (row_.special) {
    case Case::bias: options_.bias = numbers(row_.dtype, {1, row_.h, row_.sq, row_.sk}); break;
    case Case::mask: options_.mask = booleans({1, 1, row_.sq, row_.sk}); break;
    case Case::softcap: options_.softcap = kSoftcap; break;
    case Case::alibi: options_.alibi_slopes = slopes(); break;
    case Case::dropout:
      options_.dropout = kDropout;
      options_.seed = Number(1);
      break;
    case Case::window512: options_.window = {kWindow - 1, 0}; break;
    case Case::varlen: {
      std::vector<std::int32_t> bounds{0};
      for (const std::int32_t length : zipf_lengths(row_.sq)) bounds.push_back(bounds.back() + length);
      options_.cu_seqlens_q = integers(std::move(bounds), {row_.b + 1});
      options_.cu_seqlens_k = options_.cu_seqlens_q;
      break;
    }
    case Case::plain:
    case Case::gqa4:
    case Case::paged16: break;
  }
}

/// The whole cache is filled; pages lie in no order.
void BenchCall::add_cache() {
  constexpr std::int64_t kPage = 16;
  options_.cache_seqlens =
      integers(std::vector(static_cast<std::size_t>(row_.b), static_cast<std::int32_t>(row_.sk)), {row_.b});
  if (row_.special == Case::plain) {
    in_.k = numbers(row_.dtype, {row_.b, row_.sk, row_.hk, row_.d});
    in_.v = numbers(row_.dtype, {row_.b, row_.sk, row_.hk, row_.dv});
    return;
  }
  const std::int64_t each = (row_.sk + kPage - 1) / kPage, pages = row_.b * each;
  in_.k = numbers(row_.dtype, {pages, kPage, row_.hk, row_.d});
  in_.v = numbers(row_.dtype, {pages, kPage, row_.hk, row_.dv});
  std::vector<std::int32_t> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  for (std::size_t left = table.size(); left > 1; --left)
    std::swap(table[left - 1], table[static_cast<std::size_t>(next(random_) * static_cast<double>(left))]);
  options_.block_table = integers(std::move(table), {row_.b, each});
}

Tensor BenchCall::numbers(DType dtype, const Dims& shape) {
  const auto size = static_cast<std::size_t>(files::dense_bytes("bench", shape, dtype));
  const std::span bytes = memory_.emplace_back(files::allocate("bench", size)).bytes;
  const std::size_t first = std::min(size / item_size(dtype), kPeriod);
  for (std::size_t n = 0; n < first; ++n)
    reference::store(bytes.data(), dtype, static_cast<reference::Index>(n), normal(random_));
  repeat(bytes, kPeriod * item_size(dtype));
  return {bytes.data(), dtype, shape, {}, Device{}};
}

Tensor BenchCall::booleans(const Dims& shape) {
  constexpr double kSeen = 0.75;
  const auto size = static_cast<std::size_t>(files::dense_bytes("bench", shape, DType::boolean));
  const std::span bytes = memory_.emplace_back(files::allocate("bench", size)).bytes;
  for (std::byte& byte : bytes.first(std::min(size, kPeriod))) byte = std::byte{next(random_) < kSeen};
  repeat(bytes, kPeriod);
  return {bytes.data(), DType::boolean, shape, {}, Device{}};
}

Tensor BenchCall::integers(std::vector<std::int32_t> values, const Dims& shape) {
  return view(integers_.emplace_back(std::move(values)).data(), shape);
}

/// 2^(-8 n / h) for n = 1..h, as ALiBi's paper has them.
Tensor BenchCall::slopes() {
  const Tensor tensor = numbers(DType::fp32, {row_.h});
  auto* const values = static_cast<float*>(tensor.data);
  for (std::int64_t n = 0; n < row_.h; ++n)
    values[n] = static_cast<float>(std::exp2(-8.0 * static_cast<double>(n + 1) / static_cast<double>(row_.h)));
  return tensor;
}

void BenchCall::run() const {
  if (row_.op == Op::backward)
    backward(saved_, gradients_, options_);
  else
    forward(in_, out_, options_);
}

double BenchCall::flops() const {
  const double per_pair =
      2.0 * static_cast<double>(row_.op == Op::backward ? 3 * row_.d + 2 * row_.dv : row_.d + row_.dv);
  if (row_.special == Case::window512 || row_.special == Case::varlen)
    return per_pair * static_cast<double>(work(check_call(in_, options_, false)).pairs);
  const double heads = static_cast<double>(row_.b * row_.h);
  const double pairs = heads * static_cast<double>(row_.sq) * static_cast<double>(row_.sk);
  return per_pair * pairs * (row_.causal ? 0.5 : 1.0);
}

std::int64_t BenchCall::bytes() const {
  const std::int64_t rows = row_.b * (row_.hk * row_.sk + row_.h * row_.sq);
  return rows * (row_.d + row_.dv) * static_cast<std::int64_t>(item_size(row_.dtype));
}

std::int64_t BenchCall::extra_bytes() const {
  return row_.op == Op::backward ? backward_workspace_size(in_, options_) : workspace_size(in_, options_);
}

}  // namespace narrows::cli
