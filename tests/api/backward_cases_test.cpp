// Every row of tests/cases.jsonl backward, by the public call: against the oracle, and bit for bit. The counting probes of
// backward are in tests/cpu.
#include "cpu/reference.hpp"
#include "tests/support/cases.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

const Arrangement kGaps{.order = {}, .gap = 3};

class BackwardCases : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    row_ = make_case(GetParam());
    Attention& call = row_.call;
    in_.dout = (call.dout = Array(row_.dtype, call.o.shape(), kGaps)).tensor();
    call.dout.fill_gaussian(71);
    in_.dlse = (call.dlse = Array(call.lse.dtype(), call.lse.shape())).tensor();
    call.dlse.fill_gaussian(72);
    const Inputs in = inputs(row_);
    in_.q = in.q;
    in_.k = in.k;
    in_.v = in.v;
    in_.o = call.o;
    in_.lse = call.lse;
    if (is_cache_call()) return;
    forward(in, call.out(), call.options);
    out_ = {result(in.q),
            result(in.k),
            result(in.v),
            result(call.options.bias),
            result(call.options.alibi_slopes),
            result(call.options.sinks)};
  }

  bool is_cache_call() const {
    const Options& options = row_.call.options;
    return options.cache_seqlens.given() || options.block_table.given() || options.k_new.given();
  }

  /// A gradient of `of`, NaN, with memory of its own.
  Tensor result(const Tensor& of) {
    if (!of.given()) return {};
    results_.push_back(Array(of.dtype, of.shape, kGaps));
    return results_.back();
  }

  Case row_;
  std::deque<Array> results_;
  BackwardInputs in_;
  Gradients out_;
};

TEST_P(BackwardCases, meet_the_criterion) {
  SCOPED_TRACE(row_.name());
  if (is_cache_call()) {  // forward only
    EXPECT_THROW(backward(in_, out_, row_.call.options), Error);
    return;
  }
  if (row_.judged) reference::forward(inputs(row_), row_.call.out(), row_.call.options);
  for (const std::string& family : row_.families) {
    row_.call.options.family = family;
    for (Array& array : results_) array.poison();
    backward(in_, out_, row_.call.options);
    if (row_.judged) {
      EXPECT_TRUE(backward_agrees(in_, out_, row_.call.options));
    }
    for (const Array& array : results_) EXPECT_TRUE(array.gaps_intact());
  }
}

TEST_P(BackwardCases, bits_do_not_depend_on_threads_and_repeat) {
  if (is_cache_call()) return;
  SCOPED_TRACE(row_.name());
  backward(in_, out_, row_.call.options);
  const std::deque<Array> first = results_;
  for (const int threads : {1, 2, 5}) {
    row_.call.options.threads = threads;
    for (Array& array : results_) array.poison();
    backward(in_, out_, row_.call.options);
    for (std::size_t x = 0; x < first.size(); ++x) EXPECT_TRUE(results_[x].same_bits(first[x])) << threads << " " << x;
  }
}

INSTANTIATE_TEST_SUITE_P(table, BackwardCases, testing::Range(std::size_t{0}, case_count()));

}  // namespace
}  // namespace narrows::test
