#include "cpu/backward_bias.hpp"

#include "cpu/backward_tile.hpp"
#include "cpu/pool.hpp"

#include <algorithm>

namespace narrows::cpu {
namespace {

/// Elements of dbias that one task sums: a range of each of its axes (b, h, sq, sk).
struct Part {
  i64 b, h;
  Range rows, columns;
};

/// How the parts tile dbias. An axis of size 1 gathers all of the call's.
class Parts {
 public:
  Parts(const std::array<i64, 4>& sizes, i64 rows, i64 columns)
      : sizes_(sizes),
        rows_(rows),
        columns_(columns),
        row_parts_(ceil_div(sizes[2], rows)),
        column_parts_(ceil_div(sizes[3], columns)) {}

  i64 count() const { return sizes_[0] * sizes_[1] * row_parts_ * column_parts_; }
  Part operator[](i64 index) const {
    const i64 column = index % column_parts_ * columns_, row = index / column_parts_ % row_parts_ * rows_;
    const i64 head = index / column_parts_ / row_parts_;
    return {head / sizes_[1],
            head % sizes_[1],
            {row, std::min(row + rows_, sizes_[2])},
            {column, std::min(column + columns_, sizes_[3])}};
  }

 private:
  std::array<i64, 4> sizes_;
  i64 rows_, columns_, row_parts_, column_parts_;
};

template <class T> class BiasSum {
 public:
  BiasSum(const BackwardCall<T>& call, int thread)
      : call_(call),
        keys_(call, thread),
        rows_(call, call.template scratch<std::byte>(thread, call.layout.query_block)),
        terms_(call.template scratch<T>(thread, call.layout.terms)),
        tile_(call, {.gradients = true, .through_softcap = false}, thread),
        sums_(call.template scratch<T>(thread, call.layout.dbias)) {}

  void run(const Part& part) {
    const Problem& problem = call_.problem;
    const std::array<i64, 4>& sizes = problem.dbias_sizes;
    const i64 columns = part.columns.end - part.columns.begin;
    std::fill_n(sums_, (part.rows.end - part.rows.begin) * columns, T{0});
    const i64 first_batch = sizes[0] == 1 ? 0 : part.b, last_batch = sizes[0] == 1 ? problem.batch : part.b + 1;
    for (i64 b = first_batch; b < last_batch; ++b) {
      const Range all{0, problem.heads};
      const Range heads = sizes[1] == 1 ? all : Range{part.h, part.h + 1};
      for (i64 h = heads.begin; h < heads.end;) {
        const i64 kv_head = h / problem.group(), next = std::min((kv_head + 1) * problem.group(), heads.end);
        add_heads(part, {b, kv_head, {h, next}, sequence(problem, call_.buffers, b)});
        h = next;
      }
    }
    const View& dbias = call_.buffers.dbias;
    for (i64 row = part.rows.begin; row < part.rows.end; ++row)
      call_.kernels.store(sums_ + (row - part.rows.begin) * columns, T{1}, columns,
                          dbias.at(part.b, part.h, row, part.columns.begin), dbias.strides[3], dbias.dtype);
  }

 private:
  void add_heads(const Part& part, const QueryHeads& heads) {
    const std::array<i64, 4>& sizes = call_.problem.dbias_sizes;
    const Sequence& lengths = heads.sequence;
    const Range queries = sizes[2] == 1 ? Range{0, lengths.queries} : intersect(part.rows, {0, lengths.queries});
    const Range keys = sizes[3] == 1 ? Range{0, lengths.keys} : intersect(part.columns, {0, lengths.keys});
    for (i64 first = keys.begin; first < keys.end; first += call_.key_block) {
      const Range tile{first, std::min(first + call_.key_block, keys.end)};
      const Range seeing = query_range(call_.problem.rules.mask, tile, lengths.queries, lengths.shift);
      const Range numbers = heads.numbers(intersect(seeing, queries));
      if (numbers.begin >= numbers.end) continue;
      keys_.load(heads, tile);
      for (i64 number = numbers.begin; number < numbers.end; number += call_.query_block) {
        rows_.load(heads, {number, std::min(number + call_.query_block, numbers.end)}, terms_);
        tile_.compute(rows_, keys_.tiles().front(), nullptr);
        add_tile(part);
      }
    }
  }

  void add_tile(const Part& part) {
    const std::array<i64, 4>& sizes = call_.problem.dbias_sizes;
    const KeyTile& tile = keys_.tiles().front();
    const i64 columns = part.columns.end - part.columns.begin;
    for (i64 r = 0; r < rows_.count(); ++r) {
      const T* const ds = tile_.gradients(r);
      const i64 i = rows_.rows()[static_cast<std::size_t>(r)].i;
      T* const sums = sums_ + (sizes[2] == 1 ? 0 : (i - part.rows.begin) * columns);
      if (sizes[3] == 1)
        for (i64 key = 0; key < tile.count; ++key) sums[0] += ds[key];
      else
        for (i64 key = 0; key < tile.count; ++key) sums[tile.first - part.columns.begin + key] += ds[key];
    }
  }

  const BackwardCall<T>& call_;
  KeyTiles<T> keys_;
  QueryRows<T> rows_;
  T* terms_;
  GradientTile<T> tile_;
  T* sums_;
};

}  // namespace

template <class T> void write_bias_gradient(const BackwardCall<T>& call, int threads) {
  const Parts parts(call.problem.dbias_sizes, kBiasBlocks * call.query_block, call.key_block);
  parallel_for(parts.count(), threads, [&](i64 number, int thread) { BiasSum<T>(call, thread).run(parts[number]); });
}

template void write_bias_gradient(const BackwardCall<float>&, int);
template void write_bias_gradient(const BackwardCall<double>&, int);

}  // namespace narrows::cpu
