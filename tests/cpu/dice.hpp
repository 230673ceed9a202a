// Random choices for tests, the same on every machine.
#pragma once

#include "tests/support/tensors.hpp"

#include <initializer_list>

namespace narrows::test {

class Dice : public Gaussian {
 public:
  using Gaussian::Gaussian;
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low + 1)));
  }
  bool one_in(int n) { return below(static_cast<std::uint64_t>(n)) == 0; }
  template <class T> T of(std::initializer_list<T> choices) { return choices.begin()[below(choices.size())]; }
};

}  // namespace narrows::test
