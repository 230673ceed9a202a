// A row of tests/cases.jsonl backward, with every gradient that it has.
#pragma once

#include "tests/support/cases.hpp"

#include <deque>

namespace narrows::test {

/// dout and the gradients, which are NaN, lie as `arrangement` says. O and LSE are for the test to compute, by in.q, in.k, in.v.
struct BackwardRow {
  BackwardRow() = default;
  BackwardRow(std::size_t index, const Arrangement& arrangement) : row(make_case(index)) {
    Attention& call = row.call;
    in.dout = (call.dout = Array(row.dtype, call.o.shape(), arrangement)).tensor();
    call.dout.fill_gaussian(71);
    in.dlse = (call.dlse = Array(call.lse.dtype(), call.lse.shape())).tensor();
    call.dlse.fill_gaussian(72);
    const Inputs inputs = forward_in();
    in.q = inputs.q;
    in.k = inputs.k;
    in.v = inputs.v;
    in.o = call.o;
    in.lse = call.lse;
    if (is_cache_call()) return;
    const auto gradient = [&](const Tensor& of) {
      return of.given() ? results.emplace_back(of.dtype, of.shape, arrangement).tensor() : Tensor{};
    };
    const Options& options = call.options;
    out.dq = gradient(in.q);
    out.dk = gradient(in.k);
    out.dv = gradient(in.v);
    out.dbias = gradient(options.bias);
    out.dslopes = gradient(options.alibi_slopes);
    out.dsinks = gradient(options.sinks);
  }
  BackwardRow(BackwardRow&&) = default;
  BackwardRow& operator=(BackwardRow&&) = default;

  Inputs forward_in() const { return inputs(row); }
  const Options& options() const { return row.call.options; }
  /// These are forward only.
  bool is_cache_call() const {
    return options().cache_seqlens.given() || options().block_table.given() || options().k_new.given();
  }
  void poison() {
    for (Array& array : results) array.poison();
  }

  Case row;
  std::deque<Array> results;
  BackwardInputs in;
  Gradients out;
};

}  // namespace narrows::test
