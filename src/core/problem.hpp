// The facts of a call, without addresses, and the only validation there is.
#pragma once

#include "core/buffers.hpp"
#include "core/types.hpp"
#include "shared/mask.h"

#include <array>

namespace narrows {

enum class Operation : std::uint8_t { forward, backward };
enum class QueryForm : std::uint8_t { dense, varlen };
enum class KeyForm : std::uint8_t { dense, varlen, cache, pages };

/// What a kernel may assume of a tensor's memory.
struct Layout {
  bool given = false;
  bool unit_last = false;     // the last stride is 1
  bool expanded = false;      // some axis longer than 1 has stride 0
  bool near_strides = true;   // every axis longer than 1 has a stride of 0 or more, and of less than 2^40 bytes
  bool heads_adjoin = false;  // of q, k, v: rows of one position's heads follow each other without gaps
  i64 elements = 0;           // that are stored: expanded axes count once
  int alignment = 128;        // bytes: the largest power of two up to 128 that divides the base and every byte stride
};

struct Rules {
  double scale = 1;
  double softcap = 0;                       // 0 = off
  Mask mask;                                // window, causal and chunk
  Causal causal = Causal::none;             // top_left: shift 0; otherwise shift = sk - sq unless own_shift
  bool own_shift = false;                   // a shift is given for each sequence
  bool key_begin = false, key_end = false;  // bounds of each query row's keys are given
  double dropout = 0;
  Origin origin;
};

inline constexpr i64 kMostHeadDim = 576, kMostValueDim = 512;  // of q and k; of v
inline constexpr i64 kMostRows = i64{1} << 40;                 // of a sequence; keeps every position far from overflow

/// One sequence of the batch. Key j lies in slot first_key + j of its row of k and v (or of its pages).
struct Sequence {
  i64 first_query = 0, queries = 0;  // row in q's sequence axis; rows used
  i64 first_key = 0, keys = 0;
  i64 shift = 0;      // query i stands at position i + shift
  i64 key_batch = 0;  // row of k, v (cache: cache_batch_idx) or of block_table
  i64 new_keys = 0;   // of `keys`, the last ones, still in k_new
  RowBounds bounds;   // key_begin and key_end of its query rows, in memory of the call's device
};

struct Problem {
  Operation operation = Operation::forward;
  Device device;
  DType dtype = DType::fp32;
  QueryForm query_form = QueryForm::dense;
  KeyForm key_form = KeyForm::dense;

  i64 batch = 0, heads = 0, kv_heads = 0;
  i64 head_dim = 0, value_dim = 0;
  i64 query_rows = 0, key_rows = 0;   // of the tensors: dense a sequence's, varlen the total, cache the capacity
  i64 max_queries = 0, max_keys = 0;  // of the longest sequence; with lengths_on_device at most
  i64 key_batches = 0;                // of k and v: batch rows of a dense k or a cache, pages of a pool
  i64 page_size = 0, capacity = 0;    // slots of a page, of a sequence's cache
  i64 cache_rows = 0;                 // of a cache, or of block_table
  i64 new_rows = 0;                   // of k_new: a sequence's, varlen the total
  i64 rotary_pairs = 0;               // 0 = no rotary
  i64 rotary_rows = 0;                // positions in the tables
  bool rotary_interleaved = false;
  bool appends = false;  // k_new, v_new are given
  bool padded = false;   // leftpad is given: keys of a cache begin behind its first slot
  // A GPU's int32 tensors are given. The host reads none of them: a varlen sequence may have every row of its tensor, and the
  // kernel checks each sequence.
  bool lengths_on_device = false;
  i64 score_rows = kMostRows, score_keys = kMostRows;  // query rows and keys that bias and mask reach to

  Rules rules;
  Layout q, k, v, o, lse, bias, mask, alibi_slopes, sinks, dout, dq, dk, dv;
  DType bias_dtype = DType::fp32;
  bool wants_lse = false, wants_dq = false, wants_dk = false, wants_dv = false;
  bool wants_dbias = false, wants_dslopes = false, wants_dsinks = false;
  std::array<i64, 4> dbias_sizes{};  // (b, h, sq, sk), 1 where the bias is broadcast
  bool dslopes_per_batch = false;    // dslopes is (b, h), not (h)

  bool batch_invariant = false, deterministic = false;
  int num_splits = 0, threads = 0;  // 0 = the plan decides
  i64 workspace_bytes = -1;         // that the caller owns; -1 = none given

  i64 group() const { return kv_heads ? heads / kv_heads : 1; }
  std::string text() const;  // one line
};

struct Call {
  Problem problem;
  Buffers buffers;
};

/// Checks everything about a call and reads no element of q, k, v. Throws Error before anything is written.
Call make_forward(const Inputs& in, const Outputs& out, const Options& options);
Call make_backward(const BackwardInputs& in, const Gradients& out, const Options& options);
/// As make_forward for shapes alone: data of all but the int32 tensors may be null, and there are no outputs.
Call make_explained(const Inputs& in, const Options& options);
/// The same of a backward that wants every gradient which its options allow.
Call make_explained_backward(const Inputs& in, const Options& options);

/// Sequence number `index` of the batch. Reads the length tensors, which make_* has checked: not with lengths_on_device.
Sequence sequence(const Problem& problem, const Buffers& buffers, i64 index);

}  // namespace narrows
