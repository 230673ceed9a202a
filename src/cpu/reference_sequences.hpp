// What a call means: how long each sequence is, which keys its queries see, where its rows lie.
#pragma once

#include "cpu/reference_numbers.hpp"
#include "cpu/reference_philox.hpp"

namespace narrows::reference {

/// One row of a tensor: (outer, inner, head, column), or (inner, head, column) where the tensor is packed (varlen).
struct Place {
  Index outer = 0;
  Index inner = 0;
};

struct Sequence {
  Index b = 0;
  Index sq = 0, sk = 0;      // used queries and keys, new keys included, left padding not
  Index shift = 0;           // query i stands at position i + shift on the keys' axis
  Index first_query = 0;     // row of q that is query 0
  Index first_key = 0;       // row of k (cache: slot) that is key 0
  Index key_batch = 0;       // row of a dense or contiguous k
  Index new_keys = 0;        // the last ones of sk: rows of k_new
  Index first_new = 0;       // row of a packed k_new that is its first
  Index first_new_slot = 0;  // slot of the cache that receives it, and its rotary position
  Index rotary_query = 0;    // rotary position of query 0
};

/// A call's tensors, sizes and rules, without arithmetic.
class Call {
 public:
  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Options& options);

  Index b, h, hk, d, dv;
  bool packed_queries, packed_keys;
  View q, k, v, k_new, v_new;
  View bias, mask, slopes, sinks;  // bias and mask as (b, h, sq, sk)
  View key_begin, key_end;         // (b, sq), packed (total_q)
  Options options;
  double scale;
  Dropout dropout;

  Index group() const { return hk == 0 ? 1 : h / hk; }  // query heads of one kv head
  Sequence sequence(Index b) const;
  bool visible(const Sequence& sequence, Index head, Index query, Index key) const;

  Place query_place(const Sequence& sequence, Index query) const;
  Place key_place(const Sequence& sequence, Index key) const;      // in k and v, also of a key still to be appended
  Place new_place(const Sequence& sequence, Index new_key) const;  // in k_new and v_new

  /// Rows as attention uses them: a query and a new key rotated, a new key and value rounded to the cache's type.
  std::vector<double> query_row(const Sequence& sequence, Index head, Index query) const;
  std::vector<double> key_row(const Sequence& sequence, Index kv_head, Index key) const;
  std::vector<double> value_row(const Sequence& sequence, Index kv_head, Index key) const;

  double slope(Index batch, Index head) const;

  Dims o_shape() const;
  Dims lse_shape() const;

 private:
  Index bound(const View& bounds, const Sequence& sequence, Index query) const;
  void set_keys(Sequence& sequence) const;
  void set_cache_keys(Sequence& sequence) const;
  void rotate(std::vector<double>& row, Index position) const;

  View cos_, sin_;
};

/// Element (place, head, column) of a tensor of rank 3 (packed) or 4.
double at(const View& view, Place place, Index head, Index column);
void set(const View& view, Place place, Index head, Index column, double value);

/// The element of a result in lse's shape that belongs to (sequence, head, query).
Index lse_element(const Call& call, const Sequence& sequence, Index head, Index query);

}  // namespace narrows::reference
