// Which entries of P dropout keeps.
#pragma once

#include <narrows/narrows.hpp>

#include <array>
#include <cstdint>

namespace narrows::reference {

/// Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

class Dropout {
 public:
  /// `heads`: of this call; the counter uses origin.H in its place where that is given.
  Dropout(const Options& options, std::int64_t heads);

  /// What P(b, h, i, j) is multiplied by: 0 or 65536 / n, where n of 65536 draws are kept; 1 without dropout.
  double factor(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;

 private:
  bool on_;
  std::uint32_t kept_ = 65536;
  std::array<std::uint32_t, 2> key_{};
  std::uint32_t offset_ = 0;
  Origin origin_;
};

}  // namespace narrows::reference
