#include "core/problem.hpp"

#include "core/cache.hpp"
#include "core/calls.hpp"
#include "core/lengths.hpp"
#include "core/rules.hpp"

#include <algorithm>

namespace narrows {
namespace {

void check_dtypes(const Inputs& in) {
  if (in.q.dtype > DType::fp64) refuse_type("q", in.q.dtype, "must be fp16, bf16, fp32 or fp64 (fp8 comes later)");
  if (in.q.dtype == DType::fp64 && in.q.device.kind != DeviceKind::cpu)
    refuse_type("q", in.q.dtype, "fp64 is for the CPU", "fp32");
  check_dtype("k", in.k, in.q.dtype, "must be q's dtype");
  check_dtype("v", in.v, in.q.dtype, "must be q's dtype");
}

QueryForm query_form(const Tensor& q, const Options& options) {
  const bool bounded = options.cu_seqlens_q.given();
  const std::size_t rank = q.shape.rank();
  if (bounded && rank != 3)
    refuse_value("q", text("shape ", q.shape), "with cu_seqlens_q it must have rank 3, (total_q, h, d)");
  if (!bounded && rank != 4)
    refuse_value("q", text("shape ", q.shape),
                 "must have rank 4 (b, sq, h, d), or rank 3 (total_q, h, d) with cu_seqlens_q");
  return bounded ? QueryForm::varlen : QueryForm::dense;
}

KeyForm key_form(const Tensor& k, const Options& options) {
  const std::size_t rank = k.shape.rank();
  if (is_cache_call(options)) {
    if (rank != 4)
      refuse_value("k", text("shape ", k.shape),
                   options.block_table.given() ? "a cache of pages must have rank 4 (pages, page size, hk, d)"
                                               : "a cache must have rank 4 (b, capacity, hk, d)");
    return options.block_table.given() ? KeyForm::pages : KeyForm::cache;
  }
  if (rank == 3 && options.cu_seqlens_k.given()) return KeyForm::varlen;
  if (rank != 4)
    refuse_value("k", text("shape ", k.shape),
                 "must have rank 4 (b, sk, hk, d), or rank 3 (total_k, hk, d) with cu_seqlens_k");
  return KeyForm::dense;
}

i64 batch_of(const Inputs& in, const Options& options, QueryForm form) {
  if (form == QueryForm::dense) return in.q.shape[0];
  const Tensor& bounds = options.cu_seqlens_q;
  if (bounds.shape.rank() != 1 || bounds.shape[0] < 1)
    refuse_value("cu_seqlens_q", text("shape ", bounds.shape), "must be (b + 1)", "(1,)");
  return bounds.shape[0] - 1;
}

void check_head_dims(i64 head_dim, i64 value_dim) {
  if ((head_dim < 1 || head_dim > 512) && head_dim != kMostHeadDim)
    refuse_value("q", text("head dim ", head_dim), "must be in [1, 512], or 576",
                 to_text(std::clamp<i64>(head_dim, 1, 512)));
  if (value_dim < 1 || value_dim > kMostValueDim)
    refuse_value("v", text("head dim ", value_dim), "must be in [1, 512]", to_text(std::clamp<i64>(value_dim, 1, 512)));
}

void check_heads(i64 heads, i64 kv_heads) {
  if (kv_heads == 0 ? heads == 0 : heads % kv_heads == 0) return;
  i64 nearest = std::min(std::max<i64>(kv_heads, 1), std::max<i64>(heads, 1));
  while (heads % nearest != 0) --nearest;
  refuse_value("k", text(kv_heads, " kv heads"), text("q's ", heads, " heads must be a multiple of them"),
               to_text(nearest));
}

/// Shapes of q, k and v against each other.
void check_inputs(Problem& problem, const Inputs& in, const Options& options) {
  problem.query_form = query_form(in.q, options);
  problem.key_form = key_form(in.k, options);
  problem.batch = batch_of(in, options, problem.query_form);
  const std::size_t q_rows = problem.query_form == QueryForm::dense ? 1 : 0;
  const std::size_t k_rows = in.k.shape.rank() == 4 ? 1 : 0;
  problem.query_rows = in.q.shape[q_rows];
  problem.heads = in.q.shape[q_rows + 1];
  problem.head_dim = in.q.shape[q_rows + 2];
  problem.key_rows = in.k.shape[k_rows];
  problem.kv_heads = in.k.shape[k_rows + 1];
  problem.key_batches = k_rows ? in.k.shape[0] : 1;
  if (in.v.shape.rank() != in.k.shape.rank())
    refuse_value("v", text("shape ", in.v.shape), text("must have k's rank, ", in.k.shape.rank()));
  problem.value_dim = in.v.shape[k_rows + 2];
  check_head_dims(problem.head_dim, problem.value_dim);
  if (in.k.shape[k_rows + 2] != problem.head_dim)
    refuse_value("k", text("head dim ", in.k.shape[k_rows + 2]), "must be q's", to_text(problem.head_dim));
  check_heads(problem.heads, problem.kv_heads);
  if (problem.key_form == KeyForm::dense && in.k.shape[0] != problem.batch)
    refuse_value("k", text("shape ", in.k.shape), text("must have q's batch, ", problem.batch), to_text(problem.batch));
  Dims v_shape = in.k.shape;
  v_shape[k_rows + 2] = problem.value_dim;
  check_shape("v", in.v, v_shape, "k's shape but for the head dim");
  if (std::max(problem.query_rows, problem.key_rows) > kMostRows)
    refuse_value(problem.query_rows > kMostRows ? "q" : "k",
                 text(std::max(problem.query_rows, problem.key_rows), " rows"), "must be <= 2^40", to_text(kMostRows));
  if (problem.key_form == KeyForm::pages) {
    problem.page_size = problem.key_rows;
    if (problem.page_size < 1) refuse_value("k", "page size 0", "must be >= 1", "1");
  }
}

void check_state(Call& call, const Options& options, bool needs_data) {
  if (options.workspace.given()) {
    const Tensor& workspace = options.workspace;
    check_memory("workspace", workspace, call.problem.device, needs_data);
    check_dtype("workspace", workspace, DType::uint8, "must be uint8");
    if (workspace.shape.rank() != 1 || (workspace.shape[0] > 1 && stride(workspace, 0) != 1))
      refuse_value("workspace", text("shape ", workspace.shape), "must be one row of bytes without gaps");
    call.problem.workspace_bytes = workspace.shape[0];
    call.buffers.workspace = static_cast<std::byte*>(workspace.data);
  }
  if (options.status.given()) {
    check_memory("status", options.status, call.problem.device, needs_data);
    check_dtype("status", options.status, DType::int32, "must be int32");
    check_shape("status", options.status, Dims{4}, "(code, sequence, value, limit)");
    check_output_strides("status", options.status);
    if (!are_read(call.problem.device)) {  // written as one
      if (stride(options.status, 0) != 1)
        refuse_value("status", text("strides ", options.status.strides), "must be 4 values without gaps", "(1,)");
      call.buffers.status = static_cast<std::int32_t*>(options.status.data);
    }
  }
  if (options.stream && are_read(call.problem.device))
    refuse_value("stream", "given", "a call on the CPU has none", "null");
  call.buffers.stream = options.stream;
}

RowBounds row_bounds(const Buffers& buffers, i64 batch, i64 first_query) {
  RowBounds bounds;
  const auto place = [&](const Indices& values, const i32*& data, i64& stride) {
    if (!values) return;
    data = &values.data[batch * values.row_stride + first_query * values.stride];
    stride = values.stride;
  };
  place(buffers.key_begin, bounds.begin, bounds.begin_stride);
  place(buffers.key_end, bounds.end, bounds.end_stride);
  return bounds;
}

}  // namespace

Call check_call(const Inputs& in, const Options& options, bool needs_data) {
  check_memory("q", in.q, in.q.device, needs_data);
  check_memory("k", in.k, in.q.device, needs_data);
  check_memory("v", in.v, in.q.device, needs_data);
  check_dtypes(in);
  Call call;
  Problem& problem = call.problem;
  problem.device = in.q.device;
  problem.dtype = in.q.dtype;
  problem.lengths_on_device = !are_read(problem.device) && any_lengths(options);
  check_inputs(problem, in, options);
  check_lengths(call, options);
  check_numbers(call, options);
  if (is_cache_call(options)) check_cache(call, options, needs_data);
  check_dropout(call, options, needs_data);
  check_score_tensors(call, options, needs_data);
  check_state(call, options, needs_data);
  call.buffers.q = view_of(in.q, query_axes(problem));
  call.buffers.k = view_of(in.k, key_axes(problem));
  call.buffers.v = view_of(in.v, key_axes(problem));
  problem.q = layout_of(in.q);
  problem.k = layout_of(in.k);
  problem.v = layout_of(in.v);
  return call;
}

Sequence sequence(const Problem& problem, const Buffers& buffers, i64 index) {
  Sequence sequence;
  sequence.queries = problem.query_rows;
  if (buffers.cu_seqlens_q) {
    sequence.first_query = buffers.cu_seqlens_q[index];
    sequence.queries = buffers.cu_seqlens_q[index + 1] - sequence.first_query;
  }
  if (buffers.seqused_q) sequence.queries = buffers.seqused_q[index];
  sequence.key_batch = index;
  sequence.keys = problem.key_rows;
  if (problem.key_form == KeyForm::varlen) {
    sequence.key_batch = 0;
    sequence.first_key = buffers.cu_seqlens_k[index];
    sequence.keys = buffers.cu_seqlens_k[index + 1] - sequence.first_key;
  } else if (problem.key_form != KeyForm::dense) {
    const Indices& fresh = buffers.cu_seqlens_k_new;
    sequence.new_keys = fresh ? fresh[index + 1] - fresh[index] : problem.new_rows;
    sequence.first_key = buffers.leftpad ? buffers.leftpad[index] : 0;
    const i64 filled = buffers.cache_seqlens ? buffers.cache_seqlens[index] : problem.capacity;
    sequence.keys = filled + sequence.new_keys - sequence.first_key;
    if (buffers.cache_batch_idx) sequence.key_batch = buffers.cache_batch_idx[index];
  }
  if (buffers.seqused_k) sequence.keys = buffers.seqused_k[index];
  sequence.shift = sequence.keys - sequence.queries;
  if (problem.rules.causal == Causal::top_left) sequence.shift = 0;
  if (buffers.shift) sequence.shift = buffers.shift[index];
  sequence.bounds = row_bounds(buffers, index, sequence.first_query);
  return sequence;
}

}  // namespace narrows
