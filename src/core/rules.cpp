#include "core/rules.hpp"

#include "core/lengths.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace narrows {
namespace {

void check_side(std::string_view argument, i64 value) {
  if (value < -1) refuse_value(argument, value, "must be >= 0, or -1 for unlimited", "-1");
}

/// A number in host memory is as well known as one given by value.
LateNumber check_number(std::string_view argument, const Number& number, std::uint64_t most, const Device& device,
                        bool needs_data) {
  LateNumber late{number.value, nullptr};
  if (number.tensor.given()) {
    check_memory(argument, number.tensor, device, needs_data);
    check_dtype(argument, number.tensor, DType::int64, "must be one int64");
    check_shape(argument, number.tensor, Dims{1}, "(1)");
    late.place = static_cast<const std::int64_t*>(number.tensor.data);
    if (device.kind != DeviceKind::cpu || !needs_data) return late;
  }
  if (late.read() > most) refuse_value(argument, late.read(), text("must be <= ", most), to_text(most));
  return late;
}

/// A number for each query row.
Indices check_row_bound(std::string_view argument, const Tensor& tensor, const Problem& problem) {
  check_memory(argument, tensor, problem.device, true);
  check_dtype(argument, tensor, DType::int32, "must be int32");
  if (problem.query_form == QueryForm::varlen) {
    check_shape(argument, tensor, Dims{problem.query_rows}, "(total_q)");
    return {static_cast<const std::int32_t*>(tensor.data), stride(tensor, 0), 0};
  }
  check_shape(argument, tensor, Dims{problem.batch, problem.query_rows}, "(b, sq)");
  return {static_cast<const std::int32_t*>(tensor.data), stride(tensor, 1), stride(tensor, 0)};
}

/// What a bias or a mask has to broadcast to.
Broadcast broadcast_of(const Problem& problem, const Options& options) {
  const bool dense_q = problem.query_form == QueryForm::dense, dense_k = problem.key_form == KeyForm::dense;
  if (dense_q && dense_k) return {problem.batch, problem.heads, problem.query_rows, problem.key_rows, false};
  Broadcast full{problem.batch, problem.heads, problem.max_queries, problem.max_keys, true};
  if (!problem.lengths_on_device) return full;
  if (!dense_q || options.seqused_q.given()) full.queries = 0;
  if (!dense_k || options.seqused_k.given()) full.keys = 0;
  return full;
}

/// An axis of size 1 reaches everything.
void limit_reach(Problem& problem, const Tensor& tensor) {
  const std::size_t rank = tensor.shape.rank();
  const auto limit = [&](i64& reach, std::size_t from_last) {
    if (rank >= from_last && tensor.shape[rank - from_last] != 1)
      reach = std::min<i64>(reach, tensor.shape[rank - from_last]);
  };
  limit(problem.score_rows, 2);
  limit(problem.score_keys, 1);
}

}  // namespace

void check_numbers(Call& call, const Options& options) {
  Problem& problem = call.problem;
  Rules& rules = problem.rules;
  rules.scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)));
  if (!std::isfinite(rules.scale)) refuse_value("scale", rules.scale, "must be finite");
  if (!std::isfinite(options.softcap) || options.softcap < 0)
    refuse_value("softcap", options.softcap, "must be finite and >= 0 (0 = off)", "0");
  rules.softcap = options.softcap;
  check_side("window.left", options.window.left);
  check_side("window.right", options.window.right);
  if (options.chunk < 0) refuse_value("chunk", options.chunk, "must be >= 0 (0 = off)", "0");
  if (options.causal > Causal::top_left)
    refuse_value("causal", static_cast<int>(options.causal), "must be none, bottom_right or top_left");
  rules.causal = options.causal;
  rules.mask = make_mask(options.window.left, options.window.right, options.causal != Causal::none, options.chunk);
  if (options.shift.given()) {
    if (options.causal == Causal::top_left)
      refuse_value("shift", "given",
                   "causal = top_left sets the shift to 0; use bottom_right with a shift of your own");
    call.buffers.shift = check_indices("shift", options.shift, problem.device, problem.batch, "(b)");
    rules.own_shift = true;
  }
  rules.key_begin = options.key_begin.given();
  rules.key_end = options.key_end.given();
  if (rules.key_begin) call.buffers.key_begin = check_row_bound("key_begin", options.key_begin, problem);
  if (rules.key_end) call.buffers.key_end = check_row_bound("key_end", options.key_end, problem);
  problem.batch_invariant = options.batch_invariant;
  problem.deterministic = options.deterministic;
  if (options.num_splits < 0)
    refuse_value("num_splits", options.num_splits, "must be >= 0 (0 = the plan decides)", "0");
  problem.num_splits = options.num_splits;
  if (options.threads < 0 || options.threads > 1024)
    refuse_value("threads", options.threads, "must be in [0, 1024] (0 = every core)",
                 options.threads < 0 ? "0" : "1024");
  if (options.threads && problem.device.kind != DeviceKind::cpu)
    refuse_value("threads", options.threads, text("are the CPU's, and the tensors are on ", problem.device), "0");
  problem.threads = options.threads;
}

void check_dropout(Call& call, const Options& options, bool needs_data) {
  Problem& problem = call.problem;
  const double p = options.dropout;
  if (!(p >= 0 && p < 1)) refuse_value("dropout", p, "must be in [0, 1)", p >= 1 ? "0.9999" : "0");
  if (std::floor(65536.0 * (1.0 - p) + 0.5) < 1)
    refuse_value("dropout", p, "keeps less than 1 of 65536 probabilities", "0.99998");
  call.buffers.seed =
      check_number("seed", options.seed, std::numeric_limits<std::uint64_t>::max(), problem.device, needs_data);
  call.buffers.offset =
      check_number("offset", options.offset, std::numeric_limits<std::uint32_t>::max(), problem.device, needs_data);
  const Origin& origin = options.origin;
  if (origin.b < 0 || origin.h < 0 || origin.i < 0 || origin.j < 0 || origin.H < 0)
    refuse_value("origin", text("(", origin.b, ", ", origin.h, ", ", origin.i, ", ", origin.j, ", ", origin.H, ")"),
                 "(b, h, i, j, H) must be >= 0", "0");
  const i64 model_heads = origin.H ? origin.H : problem.heads;
  if (origin.h > model_heads - problem.heads)
    refuse_value("origin.H", model_heads,
                 text("origin.h + h = ", origin.h, " + ", problem.heads, " heads must fit in it"),
                 to_text(saturating_add(origin.h, problem.heads)));
  problem.rules.dropout = p;
  problem.rules.origin = origin;
  if (p == 0) return;                  // no Philox counter is made
  constexpr i64 kWord = i64{1} << 32;  // of a Philox counter
  i64 last_row = 0;
  if (__builtin_add_overflow(origin.b, problem.batch, &last_row) ||
      __builtin_mul_overflow(last_row, model_heads, &last_row) || last_row > kWord)
    refuse_value("origin.b", origin.b, text("(origin.b + b) * H must be <= 2^32, with H = ", model_heads), "0");
  if (origin.i > kWord - problem.max_queries)
    refuse_value("origin.i", origin.i, "query positions must stay below 2^32", "0");
  if (origin.j > 8 * kWord - problem.max_keys)
    refuse_value("origin.j", origin.j, "key positions must stay below 2^35", "0");
}

void check_score_tensors(Call& call, const Options& options, bool needs_data) {
  Problem& problem = call.problem;
  Buffers& buffers = call.buffers;
  const Device& device = problem.device;
  if (const Tensor& slopes = options.alibi_slopes; slopes.given()) {
    check_memory("alibi_slopes", slopes, device, needs_data);
    check_floating("alibi_slopes", slopes);
    const bool per_batch = slopes.shape.rank() == 2;
    check_shape("alibi_slopes", slopes, per_batch ? Dims{problem.batch, problem.heads} : Dims{problem.heads},
                per_batch ? "(b, h)" : "(h)");
    buffers.alibi_slopes = view_of(slopes, slope_axes(slopes));
    problem.alibi_slopes = layout_of(slopes);
  }
  if (const Tensor& sinks = options.sinks; sinks.given()) {
    check_memory("sinks", sinks, device, needs_data);
    check_floating("sinks", sinks);
    check_shape("sinks", sinks, Dims{problem.heads}, "(h)");
    buffers.sinks = view_of(sinks, Axes{0, -1, -1, -1});
    problem.sinks = layout_of(sinks);
  }
  const Broadcast full = broadcast_of(problem, options);
  if (options.bias.given()) {
    check_memory("bias", options.bias, device, needs_data);
    check_floating("bias", options.bias);
    check_broadcast("bias", options.bias, full);
    buffers.bias = broadcast_view(options.bias);
    limit_reach(problem, options.bias);
    problem.bias = layout_of(options.bias);
    problem.bias_dtype = options.bias.dtype;
  }
  if (options.mask.given()) {
    check_memory("mask", options.mask, device, needs_data);
    check_dtype("mask", options.mask, DType::boolean, "must be boolean, true = may attend; additive masks are bias");
    check_broadcast("mask", options.mask, full);
    buffers.mask = broadcast_view(options.mask);
    limit_reach(problem, options.mask);
    problem.mask = layout_of(options.mask);
  }
}

}  // namespace narrows
