// Problems of one kind, at random: what must not make more programs.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string_view>

#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {

/// What makes a kernel: rules, dtype and bucket of head dims. The signs of scales belong to the rules, and the bias's dtype.
struct ProgramKind {
  std::string_view name;
  DType dtype;
  i64 head_width, value_width;
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false, negative = false;
  DType bias_dtype = DType::fp32;
  bool deterministic = false;  // backward
};

class RandomProblems {
 public:
  explicit RandomProblems(const ProgramKind& kind) : kind_(kind) {}

  Call next(Operation operation = Operation::forward) {
    const bool varlen = chance(3), varlen_keys = varlen || chance(4);
    sizes_ = {kind_.dtype, 1 + below(5), 1 + below(5000), 1 + below(9000), 0, 1 + below(8), 0, 0};
    sizes_.h = sizes_.hk * (1 + below(4));
    sizes_.d = in_bucket(kind_.head_width);
    sizes_.dv = in_bucket(kind_.value_width);
    Inputs in{tensor({sizes_.b, sizes_.sq, sizes_.h, sizes_.d}, varlen),
              tensor({sizes_.b, sizes_.sk, sizes_.hk, sizes_.d}, varlen_keys),
              tensor({sizes_.b, sizes_.sk, sizes_.hk, sizes_.dv}, varlen_keys)};
    Options options;
    if (varlen) options.cu_seqlens_q = ints(sizes_.b + 1);
    if (varlen_keys) options.cu_seqlens_k = ints(sizes_.b + 1);
    const Dims rows = varlen ? Dims{sizes_.sq} : Dims{sizes_.b, sizes_.sq};
    if (chance(3)) options.key_begin = on_gpu(DType::int32, rows);
    if (chance(3)) options.key_end = on_gpu(DType::int32, rows, varlen ? Dims{0} : Dims{0, 3});
    add_lengths(options);
    if (operation == Operation::backward) options.batch_invariant = false;  // which is a rule there
    options.deterministic = kind_.deterministic;
    add_masks(options);
    add_rules(options);
    return operation == Operation::backward ? make_explained_backward(in, options) : make_explained(in, options);
  }

 private:
  i64 below(i64 n) { return std::uniform_int_distribution<i64>(0, n - 1)(random_); }
  bool chance(i64 one_in) { return below(one_in) == 0; }
  static Tensor ints(i64 count) { return on_gpu(DType::int32, {count}); }

  /// A head dim of the bucket: mostly an even one.
  i64 in_bucket(i64 width) {
    const auto at = std::find(kChipWidths.begin(), kChipWidths.end(), width);
    const i64 above = at == kChipWidths.begin() ? 0 : at[-1];
    const i64 step = std::array{1, 2, 4, 8}[static_cast<std::size_t>(below(4))];
    return width - below((width - above - 1) / step + 1) * step;
  }
  /// (b, s, h, d) as rows anywhere; without the first axis if varlen.
  Tensor tensor(const Dims& shape, bool varlen) {
    const i64 last = chance(6) ? 1 + below(3) : 1;
    const i64 head = shape[3] * last + std::array{0, 0, 1, 2, 4, 8}[static_cast<std::size_t>(below(6))];
    const bool heads_first = chance(3);
    const i64 row = heads_first ? head : head * shape[2], of_head = heads_first ? head * shape[1] : head;
    const std::uintptr_t item = item_size(kind_.dtype);
    const std::uintptr_t begin = chance(3) ? item * static_cast<std::uintptr_t>(below(16)) : 0;
    if (varlen) return on_gpu(kind_.dtype, {shape[1], shape[2], shape[3]}, {row, of_head, last}, (1 << 20) + begin);
    return on_gpu(kind_.dtype, shape, {chance(5) ? 0 : head * shape[1] * shape[2], row, of_head, last},
                  (1 << 20) + begin);
  }
  void add_lengths(Options& options) {
    if (chance(3)) options.seqused_q = ints(sizes_.b);
    if (chance(3)) options.seqused_k = ints(sizes_.b);
    if (chance(3)) options.shift = ints(sizes_.b);
    if (chance(2)) options.sinks = on_gpu(kGpuDTypes[static_cast<std::size_t>(below(3))], {sizes_.h});
    options.batch_invariant = chance(4);
    options.num_splits = static_cast<int>(below(2));
  }
  void add_masks(Options& options) {
    if (!options.shift.given() && chance(2)) options.causal = chance(2) ? Causal::bottom_right : Causal::top_left;
    if (chance(2)) options.window = {below(5000) - 1, options.causal == Causal::none ? below(5000) - 1 : -1};
    if (chance(4)) options.chunk = 1 + below(3000);
  }
  /// Every number of a rule is any number.
  void add_rules(Options& options) {
    const double size = std::exp(std::normal_distribution<double>(0, 3)(random_));
    if (kind_.negative) options.scale = chance(4) ? 0 : -size;
    if (!kind_.negative && chance(2)) options.scale = size;
    if (kind_.softcap) options.softcap = size;
    if (kind_.alibi)
      options.alibi_slopes = chance(2) ? on_gpu(DType::fp32, {sizes_.h}) : on_gpu(DType::bf16, {sizes_.b, sizes_.h});
    const Dims broadcast{chance(2) ? 1 : sizes_.b, chance(2) ? 1 : sizes_.h, chance(4) ? 1 : sizes_.sq, sizes_.sk};
    if (kind_.bias) options.bias = on_gpu(kind_.bias_dtype, broadcast);
    if (kind_.mask) options.mask = on_gpu(DType::boolean, broadcast);
    if (!kind_.dropout) return;
    options.dropout = 0.001 + 0.1 * static_cast<double>(below(9));
    options.seed = static_cast<std::uint64_t>(below(1 << 30));
    options.origin = {below(9), below(9), below(99), below(99), sizes_.h + 20};
  }

  ProgramKind kind_;
  std::mt19937 random_{7};
  GpuSizes sizes_;
};

}  // namespace narrows::test
