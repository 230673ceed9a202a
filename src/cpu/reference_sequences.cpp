#include "cpu/reference_sequences.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace narrows::reference {
namespace {

Index entry(const Tensor& lengths, Index b) { return View(lengths).integer(b); }
Index entry_or(const Tensor& lengths, Index b, Index otherwise) {
  return lengths.given() ? entry(lengths, b) : otherwise;
}

Index floor_divide(Index a, Index positive) { return a >= 0 ? a / positive : -((-a + positive - 1) / positive); }

Index batch_of(const Tensor& q, const Options& options) {
  return options.cu_seqlens_q.given() ? options.cu_seqlens_q.shape[0] - 1 : q.shape[0];
}

/// Whether k and v are a cache. Pages and new keys come with cache_seqlens; without it every slot is filled.
bool is_cache(const Options& options) {
  return options.cache_seqlens.given() || options.cache_batch_idx.given() || options.leftpad.given() ||
         options.rotary_cos.given();
}

std::vector<double> row_of(const View& view, Place place, Index head, Index columns) {
  std::vector<double> row(static_cast<std::size_t>(columns));
  for (Index column = 0; column < columns; ++column)
    row[static_cast<std::size_t>(column)] = at(view, place, head, column);
  return row;
}

void round_row(std::vector<double>& row, DType dtype) {
  for (double& value : row) value = round_to(dtype, value);
}

}  // namespace

Call::Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Options& options_)
    : b(batch_of(q_, options_)),
      h(q_.shape[q_.shape.rank() - 2]),
      hk(k_.shape[k_.shape.rank() - 2]),
      d(q_.shape[q_.shape.rank() - 1]),
      dv(v_.shape[v_.shape.rank() - 1]),
      packed_queries(options_.cu_seqlens_q.given()),
      packed_keys(options_.cu_seqlens_k.given()),
      q(q_),
      k(k_),
      v(v_),
      k_new(options_.k_new),
      v_new(options_.v_new),
      bias(broadcast(options_.bias)),
      mask(broadcast(options_.mask)),
      slopes(options_.alibi_slopes),
      sinks(options_.sinks),
      key_begin(options_.key_begin),
      key_end(options_.key_end),
      options(options_),
      scale(options_.scale.value_or(1 / std::sqrt(static_cast<double>(q_.shape[q_.shape.rank() - 1])))),
      dropout(options_, q_.shape[q_.shape.rank() - 2]),
      cos_(options_.rotary_cos),
      sin_(options_.rotary_sin) {}

Sequence Call::sequence(Index batch) const {
  Sequence s;
  s.b = batch;
  s.first_query = packed_queries ? entry(options.cu_seqlens_q, batch) : 0;
  const Index query_rows = packed_queries ? entry(options.cu_seqlens_q, batch + 1) - s.first_query : q.size(1);
  s.sq = entry_or(options.seqused_q, batch, query_rows);
  set_keys(s);

  s.shift = options.causal == Causal::top_left ? 0 : s.sk - s.sq;
  if (options.shift.given()) s.shift = entry(options.shift, batch);
  return s;
}

void Call::set_keys(Sequence& s) const {
  s.key_batch = s.b;
  if (packed_keys) {
    s.first_key = entry(options.cu_seqlens_k, s.b);
    s.sk = entry_or(options.seqused_k, s.b, entry(options.cu_seqlens_k, s.b + 1) - s.first_key);
  } else if (is_cache(options)) {
    set_cache_keys(s);
  } else {
    s.sk = entry_or(options.seqused_k, s.b, k.size(1));
  }
}

// Slots [leftpad, cache_seqlens) hold keys already, [cache_seqlens, cache_seqlens + new) receive the new ones.
void Call::set_cache_keys(Sequence& s) const {
  if (options.cu_seqlens_k_new.given()) {
    s.first_new = entry(options.cu_seqlens_k_new, s.b);
    s.new_keys = entry(options.cu_seqlens_k_new, s.b + 1) - s.first_new;
  } else if (k_new.given()) {
    s.new_keys = k_new.size(1);
  }
  s.first_key = entry_or(options.leftpad, s.b, 0);
  s.first_new_slot = entry_or(options.cache_seqlens, s.b, k.size(1));
  s.sk = s.first_new_slot + s.new_keys - s.first_key;
  s.key_batch = entry_or(options.cache_batch_idx, s.b, s.b);
  s.rotary_query = entry_or(options.rotary_base, s.b, s.first_new_slot);
}

bool Call::visible(const Sequence& s, Index head, Index query, Index key) const {
  const Index position = query + s.shift;
  if (options.causal != Causal::none && key > position) return false;
  if (options.window.left >= 0 && position - key > options.window.left) return false;
  if (options.window.right >= 0 && key - position > options.window.right) return false;
  if (options.chunk > 0 && floor_divide(key, options.chunk) != floor_divide(position, options.chunk)) return false;
  if (key_begin.given() && key < bound(key_begin, s, query)) return false;
  if (key_end.given() && key >= bound(key_end, s, query)) return false;
  return !mask.given() || mask.at(s.b, head, query, key) != 0;
}

Index Call::bound(const View& bounds, const Sequence& s, Index query) const {
  return packed_queries ? bounds.integer(s.first_query + query) : bounds.integer(s.b, query);
}

Place Call::query_place(const Sequence& s, Index query) const { return {s.b, s.first_query + query}; }

Place Call::key_place(const Sequence& s, Index key) const {
  const Index slot = s.first_key + key;
  if (!options.block_table.given()) return {s.key_batch, slot};
  const Index page_size = k.size(1);
  return {View(options.block_table).integer(s.key_batch, slot / page_size), slot % page_size};
}

Place Call::new_place(const Sequence& s, Index new_key) const { return {s.b, s.first_new + new_key}; }

std::vector<double> Call::query_row(const Sequence& s, Index head, Index query) const {
  std::vector<double> row = row_of(q, query_place(s, query), head, d);
  if (cos_.given()) rotate(row, s.rotary_query + query);
  return row;
}

std::vector<double> Call::key_row(const Sequence& s, Index kv_head, Index key) const {
  const Index new_key = key - (s.sk - s.new_keys);
  if (new_key < 0) return row_of(k, key_place(s, key), kv_head, d);
  std::vector<double> row = row_of(k_new, new_place(s, new_key), kv_head, d);
  if (cos_.given()) rotate(row, s.first_new_slot + new_key);
  round_row(row, k.dtype());
  return row;
}

std::vector<double> Call::value_row(const Sequence& s, Index kv_head, Index key) const {
  const Index new_key = key - (s.sk - s.new_keys);
  if (new_key < 0) return row_of(v, key_place(s, key), kv_head, dv);
  std::vector<double> row = row_of(v_new, new_place(s, new_key), kv_head, dv);
  round_row(row, v.dtype());
  return row;
}

void Call::rotate(std::vector<double>& row, Index position) const {
  const Index pairs = cos_.size(1);
  for (Index pair = 0; pair < pairs; ++pair) {
    double& x = row[static_cast<std::size_t>(options.rotary_interleaved ? 2 * pair : pair)];
    double& y = row[static_cast<std::size_t>(options.rotary_interleaved ? 2 * pair + 1 : pair + pairs)];
    const double cosine = cos_.at(position, pair), sine = sin_.at(position, pair);
    const double turned = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = turned;
  }
}

double Call::slope(Index batch, Index head) const {
  if (!slopes.given()) return 0;
  return slopes.rank() == 1 ? slopes.at(head) : slopes.at(batch, head);
}

Dims Call::o_shape() const {
  if (packed_queries) return {q.size(0), h, dv};
  return {b, q.size(1), h, dv};
}

Dims Call::lse_shape() const {
  if (packed_queries) return {h, q.size(0)};
  return {b, h, q.size(1)};
}

double at(const View& view, Place place, Index head, Index column) {
  return view.rank() == 3 ? view.at(place.inner, head, column) : view.at(place.outer, place.inner, head, column);
}

void set(const View& view, Place place, Index head, Index column, double value) {
  if (view.rank() == 3)
    view.set(value, place.inner, head, column);
  else
    view.set(value, place.outer, place.inner, head, column);
}

Index lse_element(const Call& call, const Sequence& s, Index head, Index query) {
  if (call.packed_queries) return head * call.q.size(0) + s.first_query + query;
  return (s.b * call.h + head) * call.q.size(1) + query;
}

}  // namespace narrows::reference
