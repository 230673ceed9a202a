// Random key_begin and key_end.
#pragma once

#include "tests/support/tensors.hpp"

namespace narrows::test {

struct RandomBounds {
  Array begin, end;

  RandomBounds() = default;
  /// For the rows of q, (b, sq, h, d) or (total_q, h, d). Most begin on the keys and end behind their beginning, on the keys or
  /// not; one bound of eight is any int32.
  RandomBounds(std::uint64_t seed, const Dims& q, std::int64_t keys) {
    Gaussian random(seed);
    const Dims shape = q.rank() == 4 ? Dims{q[0], q[1]} : Dims{q[0]};
    const auto bound = [&](std::int64_t from, std::int64_t width) {
      if (random.below(8) == 0)
        return static_cast<double>(static_cast<std::int32_t>(random.below(std::uint64_t{1} << 32)));
      return static_cast<double>(from + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(width))));
    };
    begin = Array(DType::int32, shape);
    end = Array(DType::int32, shape, {.order = q.rank() == 4 ? Dims{1, 0} : Dims{0}, .gap = 2});
    begin.for_each([&](const Dims& at) {
      const double first = bound(-2, keys + 3);
      begin.set(at, first);
      end.set(at, bound(std::abs(first) <= static_cast<double>(keys) ? static_cast<std::int64_t>(first) : 0, keys + 1));
    });
  }

  /// Documents of 1, 2, 3, ... rows and as many keys.
  void fill_documents() {
    begin.for_each([&](const Dims& at) {
      std::int64_t first = 0, rows = 1;
      for (; first + rows <= at[at.rank() - 1]; ++rows) first += rows;
      begin.set(at, static_cast<double>(first));
      end.set(at, static_cast<double>(first + rows));
    });
  }
};

}  // namespace narrows::test
