#include "cpu/backward_chunk.hpp"

#include "cpu/prefetch.hpp"

#include <algorithm>

namespace narrows::cpu {

template <class T>
KeyChunk<T>::KeyChunk(const BackwardCall<T>& call, int thread)
    : call_(call),
      keys_(call, thread),
      tile_(call, {.gradients = wants_score_gradients(call.problem)}, thread),
      dk_(call.problem.wants_dk ? call.template scratch<T>(thread, call.layout.dk) : nullptr),
      dv_(call.problem.wants_dv ? call.template scratch<T>(thread, call.layout.dv) : nullptr) {}

template <class T>
void KeyChunk<T>::run(const QueryHeads& heads, std::byte* query_blocks, i64 partial, T* dq, double* slopes) {
  const Sequence& lengths = heads.sequence;
  if (dq) std::fill_n(dq, heads.rows() * call_.query_width, T{0});
  const i64 step = call_.key_chunk * call_.partials;
  for (i64 first = partial * call_.key_chunk; first < lengths.keys; first += step) {
    const Range keys{first, std::min(first + call_.key_chunk, lengths.keys)};
    keys_.load(heads, keys);
    if (dk_) std::fill_n(dk_, (keys.end - keys.begin) * call_.query_width, T{0});
    if (dv_) std::fill_n(dv_, (keys.end - keys.begin) * call_.value_width, T{0});
    const Range rows = heads.numbers(query_range(call_.problem.rules.mask, keys, lengths.queries, lengths.shift));
    for (i64 block = rows.begin / call_.query_block; block * call_.query_block < rows.end; ++block) {
      const i64 row = block * call_.query_block;
      QueryRows<T> packed(call_, query_blocks + block * call_.query_block_layout.bytes);
      packed.refer(heads, {row, std::min(row + call_.query_block, heads.rows())});
      add_block(packed, dq ? dq + row * call_.query_width : nullptr, slopes);
    }
    store(heads, keys);
  }
}

template <class T> void KeyChunk<T>::add_block(const QueryRows<T>& rows, T* dq, double* slopes) {
  for (const KeyTile& tile : keys_.tiles()) {
    const Range seen = seen_columns(call_, rows, 0, rows.count(), tile);
    if (seen.begin >= seen.end) continue;
    tile_.compute(rows, tile, slopes);
    tile_.pack(rows, tile);
    add_to_keys(rows, tile, tile.first - keys_.tiles().front().first);
    if (dq) add_to_queries(rows, tile, dq);
  }
}

/// dV += P^T dO and dK += dS^T Q, a panel of keys at a time against the rows that see it.
template <class T> void KeyChunk<T>::add_to_keys(const QueryRows<T>& block, const KeyTile& tile, i64 first_key) {
  if (!dk_ && !dv_) return;
  const QueryHeads& heads = block.heads();
  const Sequence& lengths = heads.sequence;
  const TileKernels<T>& kernels = call_.kernels;
  for (i64 key = 0; key < tile.count; key += kernels.rows) {
    const int count = static_cast<int>(std::min<i64>(kernels.rows, tile.count - key));
    const Range keys{tile.first + key, tile.first + key + count};
    const Range seeing = heads.numbers(query_range(call_.problem.rules.mask, keys, lengths.queries, lengths.shift));
    const Range rows =
        intersect({seeing.begin - block.numbers().begin, seeing.end - block.numbers().begin}, {0, block.count()});
    if (rows.begin >= rows.end) continue;
    const i64 begin = rows.begin / kernels.depth * kernels.depth,
              count_rows = round_up(rows.end, kernels.depth) - begin;
    if (dv_)
      kernels.accumulate_transposed(tile_.packed_probabilities(), tile_.stride(), begin, key, count,
                                    block.gradient_strips(begin), block.strip_stride(), count_rows,
                                    call_.problem.value_dim, dv_ + (first_key + key) * call_.value_width,
                                    call_.value_width);
    if (dk_)
      kernels.accumulate_transposed(tile_.packed_gradients(), tile_.stride(), begin, key, count,
                                    block.query_strips(begin), block.strip_stride(), count_rows, call_.problem.head_dim,
                                    dk_ + (first_key + key) * call_.query_width, call_.query_width);
  }
}

/// dQ += dS K, a panel of rows at a time against the keys that it sees.
template <class T> void KeyChunk<T>::add_to_queries(const QueryRows<T>& rows, const KeyTile& tile, T* dq) {
  const TileKernels<T>& kernels = call_.kernels;
  for (i64 row = 0; row < rows.count(); row += kernels.rows) {
    const int count = static_cast<int>(std::min<i64>(kernels.rows, rows.count() - row));
    const Range seen = seen_columns(call_, rows, row, count, tile);
    if (seen.begin >= seen.end) continue;
    kernels.accumulate(tile_.narrowed_gradients(row, seen.begin), tile_.stride(), count,
                       tile.key_rows + call_.packed(seen.begin * kernels.columns), tile.columns * kernels.columns,
                       length(seen), call_.problem.head_dim, dq + row * call_.query_width, call_.query_width);
  }
}

template <class T> void KeyChunk<T>::store(const QueryHeads& heads, Range keys) const {
  const Problem& problem = call_.problem;
  const View &dk = call_.buffers.dk, &dv = call_.buffers.dv;
  const Sequence& lengths = heads.sequence;
  const auto ask_for = [&](const View& view, i64 length, i64 row) {
    prefetch_row<Access::write>(view.at(lengths.key_batch, row, heads.kv_head), length, view.strides[3]);
  };
  for (i64 j = keys.begin; j < keys.end; ++j) {
    const i64 row = lengths.first_key + j, key = j - keys.begin;
    if (j + kRowsAhead < keys.end) {
      if (dk_) ask_for(dk, problem.head_dim, row + kRowsAhead);
      if (dv_) ask_for(dv, problem.value_dim, row + kRowsAhead);
    }
    if (dk_)
      call_.kernels.store(dk_ + key * call_.query_width, fitted<T>(problem.rules.scale), problem.head_dim,
                          dk.at(lengths.key_batch, row, heads.kv_head), dk.strides[3], dk.dtype);
    if (dv_)
      call_.kernels.store(dv_ + key * call_.value_width, T{1}, problem.value_dim,
                          dv.at(lengths.key_batch, row, heads.kv_head), dv.strides[3], dv.dtype);
  }
}

template class KeyChunk<float>;
template class KeyChunk<double>;

}  // namespace narrows::cpu
