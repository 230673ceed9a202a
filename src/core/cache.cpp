#include "core/cache.hpp"

#include "core/lengths.hpp"

#include <algorithm>

namespace narrows {
namespace {

/// Slots of a sequence. Where there is no page no table's entry is one.
i64 capacity(const Problem& problem, const Tensor& block_table) {
  if (problem.key_form != KeyForm::pages) return problem.key_rows;
  if (problem.key_batches == 0) return 0;
  i64 slots = 0;
  return __builtin_mul_overflow(block_table.shape[1], problem.page_size, &slots) || slots > kMostRows ? kMostRows
                                                                                                      : slots;
}

void check_block_table(Call& call, const Options& options) {
  const Tensor& table = options.block_table;
  check_memory("block_table", table, call.problem.device, true);
  check_dtype("block_table", table, DType::int32, "must be int32");
  if (table.shape.rank() != 2)
    refuse_value("block_table", text("shape ", table.shape), "must have rank 2 (b, pages per sequence)");
  if (!options.cache_seqlens.given()) refuse_value("cache_seqlens", "not given", "block_table needs it");
  call.buffers.block_table = {static_cast<const std::int32_t*>(table.data), stride(table, 1), stride(table, 0)};
}

/// A (batch) tensor of values in [0, most].
Indices check_values(std::string_view argument, const Tensor& tensor, const Problem& problem, i64 most,
                     std::string_view meaning) {
  const Indices values = check_indices(argument, tensor, problem.device, problem.batch, "(b)");
  if (!are_read(problem.device)) return values;
  for (i64 b = 0; b < problem.batch; ++b)
    if (values[b] < 0 || values[b] > most)
      refuse_value(text(argument, "[", b, "]"), values[b], text("must be in [0, ", most, "], ", meaning),
                   to_text(std::clamp<i64>(values[b], 0, std::max<i64>(most, 0))));
  return values;
}

void check_new_keys(Call& call, const Options& options, bool needs_data) {
  Problem& problem = call.problem;
  const Tensor& k = options.k_new;
  const Tensor& v = options.v_new;
  if (!k.given() && !v.given()) {
    if (options.cu_seqlens_k_new.given()) refuse_value("cu_seqlens_k_new", "given", "needs k_new and v_new");
    return;
  }
  if (!k.given()) refuse_value("k_new", "not given", "v_new needs it");
  if (!v.given()) refuse_value("v_new", "not given", "k_new needs it");
  if (!options.cache_seqlens.given())
    refuse_value("cache_seqlens", "not given", "k_new needs it to know where to append");
  const bool varlen = options.cu_seqlens_k_new.given();
  check_memory("k_new", k, problem.device, needs_data);
  check_memory("v_new", v, problem.device, needs_data);
  check_dtype("k_new", k, problem.dtype, "must be q's dtype");
  check_dtype("v_new", v, problem.dtype, "must be q's dtype");
  const std::size_t rank = varlen ? 3 : 4;
  if (k.shape.rank() != rank)
    refuse_value(
        "k_new", text("shape ", k.shape),
        varlen ? "must have rank 3 (total, hk, d) with cu_seqlens_k_new" : "must have rank 4 (b, s_new, hk, d)");
  const i64 rows = k.shape[rank - 3];
  const auto shape = [&](i64 width) {
    return varlen ? Dims{rows, problem.kv_heads, width} : Dims{problem.batch, rows, problem.kv_heads, width};
  };
  check_shape("k_new", k, shape(problem.head_dim), varlen ? "(total, hk, d)" : "(b, s_new, hk, d)");
  check_shape("v_new", v, shape(problem.value_dim), varlen ? "(total, hk, dv)" : "(b, s_new, hk, dv)");
  if (varlen)
    call.buffers.cu_seqlens_k_new =
        check_bounds("cu_seqlens_k_new", options.cu_seqlens_k_new, problem.device, problem.batch, rows).values;
  problem.new_rows = rows;
  call.buffers.k_new = view_of(k, varlen ? kVarlen : kDense);
  call.buffers.v_new = view_of(v, varlen ? kVarlen : kDense);
  problem.appends = true;
}

/// Entries of the pages from the first to the last with a visible key of sequence b, and of those with an appended one.
void check_entries(const Call& call, const Sequence& sequence) {
  const Problem& problem = call.problem;
  const i64 pages = problem.key_batches;
  const auto check = [&](Range range) {
    if (range.begin >= range.end) return;
    for (i64 page = range.begin / problem.page_size; page <= (range.end - 1) / problem.page_size; ++page) {
      const i64 entry = call.buffers.block_table.at(sequence.key_batch, page);
      if (entry < 0 || entry >= pages)
        refuse_value(text("block_table[", sequence.key_batch, ", ", page, "]"), entry,
                     text("must be in [0, ", pages - 1, "]: a key that is seen or appended lies in this page"),
                     to_text(std::clamp<i64>(entry, 0, std::max<i64>(pages - 1, 0))));
    }
  };
  const Range seen =
      key_range(problem.rules.mask, sequence.bounds, {0, sequence.queries}, sequence.shift, sequence.keys);
  check({sequence.first_key + seen.begin, sequence.first_key + seen.end});
  const i64 end = sequence.first_key + sequence.keys;
  check({end - sequence.new_keys, end});
}

void check_rotary(Call& call, const Options& options, bool needs_data) {
  Problem& problem = call.problem;
  const Tensor& cosine = options.rotary_cos;
  const Tensor& sine = options.rotary_sin;
  if (!cosine.given() && !sine.given()) {
    if (options.rotary_base.given()) refuse_value("rotary_base", "given", "needs rotary_cos and rotary_sin");
    if (options.rotary_interleaved) refuse_value("rotary_interleaved", "true", "needs rotary_cos and rotary_sin");
    return;
  }
  if (!cosine.given()) refuse_value("rotary_cos", "not given", "rotary_sin needs it");
  if (!sine.given()) refuse_value("rotary_sin", "not given", "rotary_cos needs it");
  const Device& device = problem.device;
  check_memory("rotary_cos", cosine, device, needs_data);
  check_memory("rotary_sin", sine, device, needs_data);
  check_floating("rotary_cos", cosine);
  check_dtype("rotary_sin", sine, cosine.dtype, "must be rotary_cos's dtype");
  if (cosine.shape.rank() != 2)
    refuse_value("rotary_cos", text("shape ", cosine.shape), "must have rank 2 (positions, rotated / 2)");
  check_shape("rotary_sin", sine, cosine.shape, "rotary_cos's shape");
  const i64 pairs = cosine.shape[1];
  if (pairs < 1 || pairs > problem.head_dim / 2)
    refuse_value("rotary_cos", text("shape ", cosine.shape),
                 text("has one column for each rotated pair: from 1 to d / 2 = ", problem.head_dim / 2),
                 to_text(problem.head_dim / 2));
  if (options.rotary_base.given())
    call.buffers.rotary_base = check_indices("rotary_base", options.rotary_base, device, problem.batch, "(b)");
  problem.rotary_pairs = pairs;
  problem.rotary_rows = cosine.shape[0];
  problem.rotary_interleaved = options.rotary_interleaved;
  call.buffers.rotary_cos = view_of(cosine, Axes{0, 1, -1, -1});
  call.buffers.rotary_sin = view_of(sine, Axes{0, 1, -1, -1});
}

/// The last position that sequence b rotates must have a row in the tables.
void check_rotary_reach(const Call& call, const Tensor& rotary_cos, i64 b, const Sequence& sequence) {
  if (!call.problem.rotary_pairs) return;
  const i64 rows = rotary_cos.shape[0];
  const i64 end = sequence.first_key + sequence.keys;
  const i64 filled = end - sequence.new_keys;
  const i64 base = call.buffers.rotary_base ? call.buffers.rotary_base[b] : filled;
  if (base < 0) refuse_value(text("rotary_base[", b, "]"), base, "must be >= 0", "0");
  const i64 reach = std::max(sequence.queries ? base + sequence.queries : 0, sequence.new_keys ? end : 0);
  if (reach > rows)
    refuse_value("rotary_cos", text("shape ", rotary_cos.shape),
                 text("sequence ", b, " rotates position ", reach - 1, ": needs that many rows and one more"),
                 to_text(reach));
}

}  // namespace

bool is_cache_call(const Options& options) {
  return options.block_table.given() || options.cache_seqlens.given() || options.cache_batch_idx.given() ||
         options.leftpad.given() || options.k_new.given() || options.v_new.given() ||
         options.cu_seqlens_k_new.given() || options.rotary_cos.given() || options.rotary_sin.given() ||
         options.rotary_base.given();
}

void check_cache(Call& call, const Options& options, bool needs_data) {
  Problem& problem = call.problem;
  Buffers& buffers = call.buffers;
  const bool paged = problem.key_form == KeyForm::pages;
  if (paged) check_block_table(call, options);
  const i64 rows = paged ? options.block_table.shape[0] : problem.key_batches;
  const i64 slots = capacity(problem, options.block_table);
  problem.capacity = slots;
  problem.cache_rows = rows;
  if (options.cache_batch_idx.given())
    buffers.cache_batch_idx =
        check_values("cache_batch_idx", options.cache_batch_idx, problem, rows - 1, "the cache's rows");
  else if (rows != problem.batch)
    refuse_value(paged ? "block_table" : "k", text(rows, " rows"),
                 text("must have one for each of the ", problem.batch, " sequences, or cache_batch_idx be given"),
                 to_text(problem.batch));
  if (options.cache_seqlens.given())
    buffers.cache_seqlens =
        check_values("cache_seqlens", options.cache_seqlens, problem, slots, "the cache's capacity");
  problem.padded = options.leftpad.given();
  if (problem.padded)
    buffers.leftpad = check_values("leftpad", options.leftpad, problem, slots, "the cache's capacity");
  check_new_keys(call, options, needs_data);
  check_rotary(call, options, needs_data);
  problem.max_keys = problem.batch == 0 ? 0 : slots;
  if (problem.lengths_on_device) return;
  problem.max_keys = 0;
  for (i64 b = 0; b < problem.batch; ++b) {
    const Sequence sequence = narrows::sequence(problem, buffers, b);
    const i64 end = sequence.first_key + sequence.keys;
    const i64 filled = end - sequence.new_keys;
    if (sequence.first_key > filled)
      refuse_value(text("leftpad[", b, "]"), sequence.first_key, text("must be <= cache_seqlens[", b, "] = ", filled),
                   to_text(filled));
    if (end > slots)
      refuse_value(text("cache_seqlens[", b, "]"), filled,
                   text(sequence.new_keys, " new keys do not fit in the cache's capacity, ", slots),
                   to_text(std::max<i64>(slots - sequence.new_keys, 0)));
    problem.max_keys = std::max(problem.max_keys, sequence.keys);
    if (paged) check_entries(call, sequence);
    check_rotary_reach(call, options.rotary_cos, b, sequence);
  }
}

}  // namespace narrows
