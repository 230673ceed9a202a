// One attention call with all its arrays, for tests that vary one thing at a time.
#pragma once

#include "tests/support/tensors.hpp"

namespace narrows::test {

struct Sizes {
  std::int64_t b = 1, sq = 1, sk = 1, h = 1, hk = 1, d = 8, dv = 8;
};

/// Inputs are Gaussian, results NaN. options holds views of whatever arrays the test keeps beside.
struct Attention {
  Array q, k, v, o, lse;
  Array dout, dlse, dq, dk, dv;
  Options options;

  Attention() = default;
  /// Dense: (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv).
  explicit Attention(const Sizes& s, DType dtype = DType::fp32, std::uint64_t seed = 1)
      : q(dtype, {s.b, s.sq, s.h, s.d}),
        k(dtype, {s.b, s.sk, s.hk, s.d}),
        v(dtype, {s.b, s.sk, s.hk, s.dv}),
        o(dtype, {s.b, s.sq, s.h, s.dv}),
        lse(lse_type(dtype), {s.b, s.h, s.sq}),
        dout(dtype, {s.b, s.sq, s.h, s.dv}),
        dq(dtype, q.shape()),
        dk(dtype, k.shape()),
        dv(dtype, v.shape()) {
    fill(seed);
  }
  /// Packed: (total_q, h, d), (total_k, hk, d), (total_k, hk, dv); the test sets cu_seqlens. sq and sk are the totals.
  static Attention packed(const Sizes& s, DType dtype = DType::fp32, std::uint64_t seed = 1) {
    Attention a;
    a.q = Array(dtype, {s.sq, s.h, s.d});
    a.k = Array(dtype, {s.sk, s.hk, s.d});
    a.v = Array(dtype, {s.sk, s.hk, s.dv});
    a.o = Array(dtype, {s.sq, s.h, s.dv});
    a.lse = Array(lse_type(dtype), {s.h, s.sq});
    a.dout = Array(dtype, a.o.shape());
    a.dq = Array(dtype, a.q.shape());
    a.dk = Array(dtype, a.k.shape());
    a.dv = Array(dtype, a.v.shape());
    a.fill(seed);
    return a;
  }

  Inputs in() const { return {q, k, v}; }
  Outputs out() const { return {o, lse}; }
  BackwardInputs backward_in() const { return {q, k, v, o, lse, dout, dlse}; }
  Gradients gradients() const { return {dq, dk, dv, {}, {}, {}}; }

 private:
  static DType lse_type(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }
  void fill(std::uint64_t seed) {
    q.fill_gaussian(4 * seed);
    k.fill_gaussian(4 * seed + 1);
    v.fill_gaussian(4 * seed + 2);
    dout.fill_gaussian(4 * seed + 3);
  }
};

}  // namespace narrows::test
