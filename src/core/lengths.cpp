#include "core/lengths.hpp"

#include <algorithm>

namespace narrows {
namespace {

struct Used {
  Indices values;
  i64 longest;
};

/// A (batch) tensor of rows used, each at most its sequence's length.
Used check_used(std::string_view argument, const Tensor& tensor, const Device& device, i64 batch, const Indices& bounds,
                i64 rows) {
  Used used{check_indices(argument, tensor, device, batch, "(b)"), 0};
  if (!are_read(device)) return {used.values, rows};
  for (i64 b = 0; b < batch; ++b) {
    const i64 length = bounds ? bounds[b + 1] - bounds[b] : rows;
    const i64 value = used.values[b];
    if (value < 0 || value > length)
      refuse_value(text(argument, "[", b, "]"), value, text("must be in [0, ", length, "], the length of sequence ", b),
                   to_text(std::clamp<i64>(value, 0, length)));
    used.longest = std::max(used.longest, value);
  }
  return used;
}

}  // namespace

bool any_lengths(const Options& options) {
  const auto lengths = {&options.cu_seqlens_q,    &options.cu_seqlens_k,     &options.seqused_q,   &options.seqused_k,
                        &options.shift,           &options.cache_seqlens,    &options.block_table, &options.leftpad,
                        &options.cache_batch_idx, &options.cu_seqlens_k_new, &options.rotary_base};
  return std::any_of(lengths.begin(), lengths.end(), [](const Tensor* tensor) { return tensor->given(); });
}

Indices check_indices(std::string_view argument, const Tensor& tensor, const Device& device, i64 count,
                      std::string_view named) {
  check_memory(argument, tensor, device, true);
  check_dtype(argument, tensor, DType::int32, "must be int32");
  check_shape(argument, tensor, Dims{count}, named);
  return {static_cast<const std::int32_t*>(tensor.data), stride(tensor, 0), 0};
}

Bounds check_bounds(std::string_view argument, const Tensor& tensor, const Device& device, i64 batch, i64 rows) {
  Bounds bounds{check_indices(argument, tensor, device, batch + 1, "(b + 1)"), 0};
  if (!are_read(device)) return {bounds.values, rows};
  const Indices& values = bounds.values;
  if (values[0] != 0) refuse_value(text(argument, "[0]"), values[0], "must be 0", "0");
  for (i64 b = 0; b < batch; ++b) {
    if (values[b + 1] < values[b])
      refuse_value(text(argument, "[", b + 1, "]"), values[b + 1], text("must be >= the bound before it, ", values[b]),
                   to_text(values[b]));
    bounds.longest = std::max(bounds.longest, values[b + 1] - values[b]);
  }
  if (values[batch] > rows)
    refuse_value(text(argument, "[", batch, "]"), values[batch], text("must be <= the tensor's rows, ", rows),
                 to_text(rows));
  return bounds;
}

void check_lengths(Call& call, const Options& options) {
  Problem& problem = call.problem;
  Buffers& buffers = call.buffers;
  const Device& device = problem.device;
  problem.max_queries = problem.query_rows;
  problem.max_keys = problem.key_rows;
  if (problem.query_form == QueryForm::varlen) {
    const Bounds bounds = check_bounds("cu_seqlens_q", options.cu_seqlens_q, device, problem.batch, problem.query_rows);
    buffers.cu_seqlens_q = bounds.values;
    problem.max_queries = bounds.longest;
  }
  if (options.seqused_q.given()) {
    const Used used =
        check_used("seqused_q", options.seqused_q, device, problem.batch, buffers.cu_seqlens_q, problem.query_rows);
    buffers.seqused_q = used.values;
    problem.max_queries = used.longest;
  }
  const bool cached = problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages;
  if (problem.key_form == KeyForm::varlen) {
    const Bounds bounds = check_bounds("cu_seqlens_k", options.cu_seqlens_k, device, problem.batch, problem.key_rows);
    buffers.cu_seqlens_k = bounds.values;
    problem.max_keys = bounds.longest;
  } else if (options.cu_seqlens_k.given()) {
    refuse_value("cu_seqlens_k", "given", cached ? "a cache's lengths are cache_seqlens" : "needs k and v of rank 3");
  }
  if (options.seqused_k.given()) {
    if (cached) refuse_value("seqused_k", "given", "a cache's lengths are cache_seqlens");
    const Used used =
        check_used("seqused_k", options.seqused_k, device, problem.batch, buffers.cu_seqlens_k, problem.key_rows);
    buffers.seqused_k = used.values;
    problem.max_keys = used.longest;
  }
  if (problem.batch == 0) problem.max_queries = problem.max_keys = 0;  // there is no longest sequence
}

}  // namespace narrows
