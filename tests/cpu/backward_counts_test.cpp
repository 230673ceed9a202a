// Backward by counting: with lse = 0, o = 0, v = 0, scale 1 and scores of 0, P is exactly 1 on every visible pair, and the
// gradients are counts. A tolerance cannot see one pair too many; a count can.
#include "shared/mask.h"
#include "tests/cpu/backward_run.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/counting.hpp"

namespace narrows::test {
namespace {

struct Probe {
  std::int64_t sq, sk;
  Causal causal;
  Window window;
  std::int64_t chunk;
  bool bounded;
};

/// One sequence of the call, as the test knows it.
struct Rows {
  std::int64_t first_query, queries, first_key, keys;
};

class BackwardCounting {
 public:
  BackwardCounting(const Probe& probe, bool packed, const std::string& set)
      : probe_(probe), packed_(packed), set_(set) {
    const DType dtype = type_for(set, DType::fp32);
    const std::int64_t sq = probe.sq, sk = probe.sk;
    if (packed) {
      c_ = BackwardCase(
          Attention::packed({.sq = 2 * sq + 3, .sk = 2 * sk + 5, .h = 4, .hk = 2, .d = kDim, .dv = kDim}, dtype));
      cu_q_ = int32_array({0, static_cast<double>(sq), static_cast<double>(2 * sq)});
      cu_k_ = int32_array({0, static_cast<double>(sk), static_cast<double>(2 * sk)});
      c_.options.cu_seqlens_q = cu_q_;
      c_.options.cu_seqlens_k = cu_k_;
    } else {
      c_ = BackwardCase({.b = 2, .sq = sq, .sk = sk, .h = 4, .hk = 2, .d = kDim, .dv = kDim}, dtype);
    }
    c_.options.scale = 1;
    c_.options.causal = probe.causal;
    c_.options.window = probe.window;
    c_.options.chunk = probe.chunk;
    c_.dlse = Array(DType::fp32, c_.lse.shape());
    if (probe.bounded) bound_rows();
  }

  void check() {
    for (const BackwardBlocks& blocks :
         {BackwardBlocks{.instruction_set = set_}, BackwardBlocks{.instruction_set = set_,
                                                   .threads = 3,
                                                   .query_block = 8,
                                                   .key_chunk = 32,
                                                   .partials = 3,
                                                   .heads_at_once = 1}}) {
      clear();
      c_.k.fill([&](const Dims& at) { return one_hot(at, 1); });
      c_.dlse.fill(1);
      expect("dq", c_.dq, blocks, true, 1);

      clear();
      c_.q.fill([&](const Dims& at) { return one_hot(at, 0); });
      c_.dlse.fill(1);
      expect("dk", c_.dk, blocks, false, 2);

      clear();
      c_.dout.fill([&](const Dims& at) { return one_hot(at, 0); });
      expect("dv", c_.dv, blocks, false, 2);
    }
  }

 private:
  static constexpr std::int64_t kDim = 20;

  void bound_rows() {
    const Dims shape = packed_ ? Dims{2 * probe_.sq + 3} : Dims{2, probe_.sq};
    const auto fill = [&](Array& array, auto bound_of) {
      array = Array(DType::int32, shape).fill([&](const Dims& at) {
        const std::int64_t s = packed_ ? at[0] / probe_.sq : at[0];
        return static_cast<double>(bound_of(s, packed_ ? at[0] - s * probe_.sq : at[1]));
      });
      return array.tensor();
    };
    c_.options.key_begin = fill(begins_, counted_key_begin);
    c_.options.key_end = fill(ends_, counted_key_end);
  }
  void clear() {
    for (Array* array : {&c_.q, &c_.k, &c_.v, &c_.o, &c_.dout, &c_.lse, &c_.dlse}) array->fill(0);
  }
  std::vector<Rows> sequences() const {
    if (!packed_) return {{0, probe_.sq, 0, probe_.sk}, {0, probe_.sq, 0, probe_.sk}};
    return {{0, probe_.sq, 0, probe_.sk}, {probe_.sq, probe_.sq, probe_.sk, probe_.sk}};
  }
  /// Position in its sequence, modulo the head dim; packed tensors have no batch axis.
  double one_hot(const Dims& at, int side) const {
    const std::int64_t row = packed_ ? at[0] % std::max<std::int64_t>(side ? probe_.sk : probe_.sq, 1) : at[1];
    return row % kDim == at[at.rank() - 1] ? 1 : 0;
  }
  void expect(const char* what, Array& result, const BackwardBlocks& blocks, bool of_rows, double times) {
    SCOPED_TRACE(what);
    c_.run(blocks);
    Array expected(result.dtype(), result.shape());
    expected.fill(0);
    const Mask mask = make_mask(probe_.window.left, probe_.window.right, probe_.causal != Causal::none, probe_.chunk);
    const std::int64_t shift = probe_.causal == Causal::top_left ? 0 : probe_.sk - probe_.sq;
    const std::vector<Rows> all = sequences();
    const std::int64_t heads = result.shape()[result.shape().rank() - 2];
    for (std::size_t b = 0; b < all.size(); ++b)
      for (std::int64_t i = 0; i < probe_.sq; ++i)
        for (std::int64_t j = 0; j < probe_.sk; ++j) {
          const std::int64_t s = static_cast<std::int64_t>(b);
          if (!visible(mask, i + shift, j, probe_.sk)) continue;
          if (probe_.bounded && (j < counted_key_begin(s, i) || j >= counted_key_end(s, i))) continue;
          const std::int64_t row = of_rows ? all[b].first_query + i : all[b].first_key + j;
          for (std::int64_t h = 0; h < heads; ++h) {
            const std::int64_t x = (of_rows ? j : i) % kDim;
            const Dims at = packed_ ? Dims{row, h, x} : Dims{s, row, h, x};
            expected.set(at, expected.at(at) + times);
          }
        }
    ASSERT_EQ(result.values(), expected.values());
  }

  Probe probe_;
  bool packed_;
  std::string set_;
  BackwardCase c_;
  Array cu_q_, cu_k_, begins_, ends_;
};

TEST(CpuBackward, counting_probes_see_exactly_the_visible_pairs) {
  std::vector<std::string> sets{""};
  for (const std::string& set : bf16_sets()) sets.push_back(set);
  const auto run = [&](const Probe& probe, const std::string& set, bool packed) {
    SCOPED_TRACE(testing::Message() << set << " sq " << probe.sq << " sk " << probe.sk << " causal "
                                    << static_cast<int>(probe.causal) << " window " << probe.window.left << " "
                                    << probe.window.right << " chunk " << probe.chunk << " bounded " << probe.bounded
                                    << " packed " << packed);
    BackwardCounting(probe, packed, set).check();
  };
  const int step = repeats(7, 29);  // all took 47 s; shares no factor with a loop
  int number = 0;
  for (const auto& [sq, sk] :
       {std::pair{1, 1}, std::pair{37, 101}, std::pair{101, 37}, std::pair{64, 64}, std::pair{3, 130}})
    for (const Causal causal : {Causal::none, Causal::bottom_right, Causal::top_left})
      for (const Window window : {Window{-1, -1}, Window{0, 0}, Window{33, 5}, Window{-1, 2}})
        for (const std::int64_t chunk : {0, 20})
          for (const std::string& set : sets)
            for (const bool packed : {false, true})
              for (int bounded = 0; bounded <= (chunk == 0); ++bounded)
                if (number++ % step == 0) run({sq, sk, causal, window, chunk, bounded != 0}, set, packed);
}

}  // namespace
}  // namespace narrows::test
