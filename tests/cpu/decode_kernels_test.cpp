// The kernels that read K and V where they lie against plain loops.
#include <gtest/gtest.h>

#include "tests/cpu/tile_run.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace narrows::cpu {

extern const InstructionSet kTileKernelsWide;

namespace {

template <class T> std::vector<const TileKernels<T>*> all_kernels() {
  const auto available = available_tile_kernels<T>();
  std::vector<const TileKernels<T>*> kernels(available.begin(), available.end());
  if constexpr (std::is_same_v<T, float>) kernels.push_back(&kTileKernelsWide.single);
  if constexpr (std::is_same_v<T, double>) kernels.push_back(&kTileKernelsWide.twice);
  return kernels;
}

template <class T> class DecodeKernelsTest : public testing::Test {};
using ComputeTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(DecodeKernelsTest, ComputeTypes);

/// Rows in an order of their own, one element off their alignment, with NaN between them.
struct ScatteredRows {
  std::vector<std::uint64_t> memory;
  std::vector<const std::byte*> row;
  PlacedRows rows;
  i64 span;

  ScatteredRows(DType dtype, i64 count, i64 length) : span(length + 3) {
    const i64 size = static_cast<i64>(item_size(dtype)), all = count * span + 1;
    memory.resize(static_cast<std::size_t>(all * size / 8 + 1));
    for (i64 x = 0; x < all; ++x) reference::store(memory.data(), dtype, x, std::nan(""));
    test::Gaussian next(11);
    for (i64 r = 0; r < count; ++r) {
      row.push_back(reinterpret_cast<const std::byte*>(memory.data()) + first(count, r) * size);
      for (i64 x = 0; x < length; ++x) reference::store(memory.data(), dtype, first(count, r) + x, next());
    }
    rows = {row.data(), count, length, dtype};
  }
  i64 first(i64 count, i64 r) const { return (count - 1 - r) * span + 1; }
  double at(i64 r, i64 x) const { return reference::load(memory.data(), rows.dtype, first(rows.count, r) + x); }
};

template <class T> Scratch<T> gaussian_scratch(i64 count) {
  Scratch<T> values = make_scratch<T>(static_cast<std::size_t>(count));
  test::Gaussian next(5);
  for (i64 x = 0; x < count; ++x) values[static_cast<std::size_t>(x)] = static_cast<T>(next());
  return values;
}

/// Sets whose operands are narrower than their sums leave decoding to the next.
template <class T> std::vector<const TileKernels<T>*> decoding_kernels() {
  std::vector<const TileKernels<T>*> kernels = all_kernels<T>();
  std::erase_if(kernels, [](const TileKernels<T>* set) { return !set->decode.scores; });
  return kernels;
}

TYPED_TEST(DecodeKernelsTest, products_of_any_number_of_rows_and_keys) {
  using T = TypeParam;
  const double epsilon = std::numeric_limits<T>::epsilon();
  for (const auto* set : decoding_kernels<T>())
    for (const DType dtype : storage_types<T>())
      for (const i64 vectors : {1, 2, 7})
        for (const i64 keys : {1, 7, 8, 9, 29})
          for (const i64 rows : {1, 2, 3, 4, 5, 11}) {
            const i64 length = vectors * set->decode.lanes, stride = 40;
            ScatteredRows source(dtype, keys, length);
            source.rows.later = {source.row.data(), rows % 3 ? keys : 0, length};  // asked for and not read
            const Scratch<T> q = gaussian_scratch<T>(rows * length), p = gaussian_scratch<T>(rows * stride);
            std::vector<T> s(static_cast<std::size_t>(rows * stride), static_cast<T>(std::nan("")));
            set->decode.scores(q.get(), length, rows, source.rows, s.data(), stride);
            Scratch<T> o = gaussian_scratch<T>(rows * length), before = gaussian_scratch<T>(rows * length);
            set->decode.accumulate(p.get(), stride, rows, source.rows, o.get(), length);
            SCOPED_TRACE(std::string(set->name) + " " + std::to_string(length) + " x " + std::to_string(keys) + " x " +
                         std::to_string(rows));
            for (i64 r = 0; r < rows; ++r) {
              for (i64 key = 0; key < stride; ++key) {
                const T found = s[static_cast<std::size_t>(r * stride + key)];
                if (key >= keys) {
                  ASSERT_TRUE(std::isnan(found)) << "written beyond the keys";
                  continue;
                }
                double sum = 0, size = 0;
                for (i64 x = 0; x < length; ++x) {
                  const double term = double{q[static_cast<std::size_t>(r * length + x)]} * source.at(key, x);
                  sum += term;
                  size += std::abs(term);
                }
                ASSERT_NEAR(found, sum, size * epsilon * 8);
              }
              for (i64 x = 0; x < length; ++x) {
                const std::size_t at = static_cast<std::size_t>(r * length + x);
                double sum = before[at], size = std::abs(sum);
                for (i64 key = 0; key < keys; ++key) {
                  const double term = double{p[static_cast<std::size_t>(r * stride + key)]} * source.at(key, x);
                  sum += term;
                  size += std::abs(term);
                }
                ASSERT_NEAR(o[at], sum, size * epsilon * 16);
              }
            }
          }
}

TYPED_TEST(DecodeKernelsTest, bits_do_not_depend_on_the_rows_and_keys_beside) {
  using T = TypeParam;
  constexpr i64 kKeys = 21, kRows = 9;
  for (const auto* set : decoding_kernels<T>()) {
    const i64 length = 5 * set->decode.lanes;
    const ScatteredRows source(storage_types<T>().back(), kKeys, length);
    const Scratch<T> q = gaussian_scratch<T>(kRows * length);
    std::vector<T> all(kRows * kKeys);
    set->decode.scores(q.get(), length, kRows, source.rows, all.data(), kKeys);
    for (i64 r = 0; r < kRows; ++r)
      for (i64 key = 0; key < kKeys; ++key) {
        PlacedRows one = source.rows;
        one.row += key;
        one.count = 1;
        T alone = 0;
        set->decode.scores(q.get() + r * length, length, 1, one, &alone, 1);
        ASSERT_EQ(alone, all[static_cast<std::size_t>(r * kKeys + key)]) << set->name << " " << r << " " << key;
      }
  }
}

}  // namespace
}  // namespace narrows::cpu
