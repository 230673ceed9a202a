// Each tile operation of every instruction set that this CPU executes, alone and with its tiles in cache: products in FLOP/s
// and as fractions of the peak loop, the others in elements (packing and dropout: elements written) a second.
#include "cpu/tile_kernels.hpp"

#include <benchmark/benchmark.h>

#include "cpu/peak.hpp"

#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

namespace narrows::cpu {
namespace {

using Kernels = TileKernels<float>;

constexpr i64 kKeys = 512;
constexpr i64 kHeadDims[] = {64, 128};

/// Zeros, aligned as tiles must be, with the room that packing may write beyond.
class Tile {
 public:
  explicit Tile(i64 count) : memory_(new (kAlignment) std::byte[bytes(count)]) {
    std::memset(memory_.get(), 0, bytes(count));
  }
  float* numbers() const { return reinterpret_cast<float*>(memory_.get()); }
  Packed* packed() const { return memory_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete[](bytes, kAlignment); }
  };
  static std::size_t bytes(i64 count) { return static_cast<std::size_t>(count) * sizeof(float) + 64; }

  std::unique_ptr<std::byte[], Free> memory_;
};

/// Rows of normal numbers in fp32.
struct Source {
  std::vector<float> numbers;
  std::vector<const std::byte*> pointers;
  Rows rows{};

  Source(i64 count, i64 length) : numbers(static_cast<std::size_t>(count * length)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (float& number : numbers) number = normal(random);
    for (i64 row = 0; row < count; ++row)
      pointers.push_back(reinterpret_cast<const std::byte*>(numbers.data() + row * length));
    rows = {pointers.data(), count, length, sizeof(float), DType::fp32};
  }
};

double peak_of(const Kernels& kernels) {
  static std::map<std::string, double> known;
  double& rate = known[kernels.name];
  if (rate == 0) rate = peak_rate(kernels.name, kernels.operand, 1);
  return rate;
}

void count_flops(benchmark::State& state, const Kernels& kernels, double flops) {
  using benchmark::Counter;
  state.counters["FLOP/s"] = Counter(flops, Counter::kIsIterationInvariantRate);
  state.counters["of_peak"] = Counter(flops / peak_of(kernels), Counter::kIsIterationInvariantRate);
}

void count_elements(benchmark::State& state, i64 elements) { state.SetItemsProcessed(state.iterations() * elements); }

void scores(benchmark::State& state, const Kernels& kernels, i64 d) {
  const Source queries(kernels.rows, d), keys(kKeys, d);
  const Tile panel(kernels.rows * d), strips(kKeys * d), s(kernels.rows * kKeys);
  kernels.pack_query(queries.rows, 1, panel.packed());
  kernels.pack_keys(keys.rows, strips.packed());
  for (auto _ : state) {
    kernels.scores(panel.packed(), kernels.rows, strips.packed(), kKeys / kernels.columns, d, s.numbers(), kKeys);
    benchmark::ClobberMemory();
  }
  count_flops(state, kernels, 2.0 * static_cast<double>(kernels.rows * kKeys * d));
}

void accumulate(benchmark::State& state, const Kernels& kernels, i64 dv) {
  const Source values(kKeys, dv);
  const Tile p(kernels.rows * kKeys), strips(kKeys * dv), o(kernels.rows * dv);
  kernels.pack_values(values.rows, strips.packed());
  for (auto _ : state) {
    kernels.accumulate(p.numbers(), kKeys, kernels.rows, strips.packed(), kKeys * kernels.columns, kKeys, dv,
                       o.numbers(), dv);
    benchmark::ClobberMemory();
  }
  count_flops(state, kernels, 2.0 * static_cast<double>(kernels.rows * kKeys * dv));
}

void accumulate_transposed(benchmark::State& state, const Kernels& kernels, i64 dv) {
  constexpr i64 kQueries = 96;
  const Source values(kQueries, dv);
  const Tile p(kQueries * kKeys), out(kQueries * kKeys), strips(kQueries * dv), o(kernels.rows * dv);
  kernels.pack_values(values.rows, strips.packed());
  const Packed* const turned = kernels.transposed(p.numbers(), kKeys, kQueries, kKeys, out.packed());
  for (auto _ : state) {
    kernels.accumulate_transposed(turned, kKeys, 0, 0, kernels.rows, strips.packed(), kQueries * kernels.columns,
                                  kQueries, dv, o.numbers(), dv);
    benchmark::ClobberMemory();
  }
  count_flops(state, kernels, 2.0 * static_cast<double>(kernels.rows * kQueries * dv));
}

void maximum(benchmark::State& state, const Kernels& kernels) {
  const Tile s(kKeys);
  for (auto _ : state) benchmark::DoNotOptimize(kernels.maximum(s.numbers(), kKeys));
  count_elements(state, kKeys);
}

/// In place over and over: what it leaves, in [0, 1] also where it is narrowed, is what it can begin with.
void weights(benchmark::State& state, const Kernels& kernels, bool dropout) {
  const Tile s(kKeys);
  const std::vector<std::uint8_t> keep(kKeys / 8, 0xAA);
  const Dropout<float> rule{dropout ? keep.data() : nullptr, dropout ? 2.0F : 1.0F};
  const Units<float> units = fused_units<float>(0.125);
  const Reference<float> reference{1, 0, units.c};
  for (auto _ : state) {
    benchmark::DoNotOptimize(kernels.weights(s.numbers(), kKeys, units, reference, rule));
    benchmark::ClobberMemory();
  }
  count_elements(state, kKeys);
}

void logits(benchmark::State& state, const Kernels& kernels, const ScoreRules<float>& rules, bool with_bias) {
  const Tile s(kKeys), bias(kKeys);
  for (auto _ : state) {
    kernels.logits(s.numbers(), kKeys, rules, 0, with_bias ? bias.numbers() : nullptr);
    benchmark::ClobberMemory();
  }
  count_elements(state, kKeys);
}

void gradients(benchmark::State& state, const Kernels& kernels) {
  const Tile s(kKeys), dp(kKeys);
  const BackwardReference<float> reference{};
  for (auto _ : state) {
    kernels.gradients(s.numbers(), dp.numbers(), kKeys, reference, 0.5F, {});
    benchmark::ClobberMemory();
  }
  count_elements(state, kKeys);
}

void keep_bits(benchmark::State& state, const Kernels& kernels) {
  DropoutRule rule{};
  rule.threshold = 1U << 15;
  std::vector<std::uint8_t> keep(kKeys / 8);
  i64 row = 0;
  for (auto _ : state) {
    kernels.keep_bits(rule, 0, 0, row++, 0, kKeys / 8, keep.data());
    benchmark::ClobberMemory();
  }
  count_elements(state, kKeys);
}

void pack(benchmark::State& state, void (*packing)(const Rows& source, Packed* strips), i64 d) {
  const Source source(kKeys, d);
  const Tile strips(kKeys * d);
  for (auto _ : state) {
    packing(source.rows, strips.packed());
    benchmark::ClobberMemory();
  }
  count_elements(state, kKeys * d);
}

template <class Function> void add(const Kernels& kernels, const std::string& name, Function function) {
  benchmark::RegisterBenchmark((std::string(kernels.name) + "/" + name).c_str(), function);
}

void add_all(const Kernels& kernels) {
  const Kernels* const set = &kernels;
  for (const i64 d : kHeadDims) {
    const std::string with_d = "/d" + std::to_string(d);
    add(kernels, "scores" + with_d, [=](benchmark::State& state) { scores(state, *set, d); });
    add(kernels, "accumulate" + with_d, [=](benchmark::State& state) { accumulate(state, *set, d); });
    add(kernels, "accumulate_transposed" + with_d,
        [=](benchmark::State& state) { accumulate_transposed(state, *set, d); });
    add(kernels, "pack_keys" + with_d, [=](benchmark::State& state) { pack(state, set->pack_keys, d); });
    add(kernels, "pack_values" + with_d, [=](benchmark::State& state) { pack(state, set->pack_values, d); });
  }
  add(kernels, "maximum", [=](benchmark::State& state) { maximum(state, *set); });
  add(kernels, "weights", [=](benchmark::State& state) { weights(state, *set, false); });
  add(kernels, "weights_dropout", [=](benchmark::State& state) { weights(state, *set, true); });
  add(kernels, "logits_softcap",
      [=](benchmark::State& state) { logits(state, *set, score_rules(1, 30, 0.0F), false); });
  add(kernels, "logits_alibi", [=](benchmark::State& state) { logits(state, *set, score_rules(1, 0, 0.1F), false); });
  add(kernels, "logits_bias", [=](benchmark::State& state) { logits(state, *set, score_rules(1, 0, 0.0F), true); });
  add(kernels, "gradients", [=](benchmark::State& state) { gradients(state, *set); });
  add(kernels, "keep_bits", [=](benchmark::State& state) { keep_bits(state, *set); });
}

}  // namespace
}  // namespace narrows::cpu

int main(int count, char** arguments) {
  benchmark::Initialize(&count, arguments);
  if (benchmark::ReportUnrecognizedArguments(count, arguments)) return 2;
  for (const narrows::cpu::TileKernels<float>* kernels : narrows::cpu::available_tile_kernels<float>())
    narrows::cpu::add_all(*kernels);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
