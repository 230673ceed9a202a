// How a row is measured.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>

#include "tools/bench_peers.hpp"
#include "tools/bench_row.hpp"

namespace narrows::cli {

/// The best rates of this machine seen so far in this run: of arithmetic for each dtype and number of threads, and of reads
/// for each number of threads and bytes.
class Peaks {
 public:
  /// TFLOP/s, of decode rows GB/s. bytes: that a call reads and writes.
  double measure(const Row& row, std::int64_t bytes);

 private:
  std::map<std::tuple<DType, int, std::int64_t>, double> best_;
};

/// Rounds in which every contender in turn is called once to warm up and then for a while.
struct Effort {
  int rounds;
  double seconds;  // of a contender in a round
};
inline constexpr Effort kWholeEffort{5, 0.06}, kQuickEffort{3, 0.04};

/// Fills in what is measured, and the peak beside it.
void measure(Row& row, Peaks& peaks, Peers& peers, const Effort& effort);

}  // namespace narrows::cli
