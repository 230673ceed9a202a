// One measurement, in the row format that every measurement of this project has.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <narrows/narrows.hpp>

namespace narrows::cli {

enum class Op : std::uint8_t { forward, backward, decode };
std::string_view name(Op op);

struct Row {
  Op op;
  DType dtype;
  std::int64_t b, h, hk, sq, sk, d, dv;
  bool causal;
  int threads;
  double milliseconds = 0, rate = 0, peak = 0;  // rate and peak: TFLOP/s, of decode GB/s

  double fraction() const { return rate / peak; }
  /// Beyond it a measurement cannot be right.
  double most_fraction() const { return op == Op::decode ? 1.05 : 1.02; }
  bool impossible() const { return fraction() > most_fraction(); }
};

/// The best rates of this machine seen so far in this run: of multiply-adds for each number of threads, and of reads for
/// each number of threads and bytes.
class Peaks {
 public:
  double measure(const Row& row);

 private:
  std::map<std::pair<int, std::int64_t>, double> best_;
};

/// Fills in what is measured: the median of at least 3 runs after one to warm up, until 0.3 s are spent.
void measure(Row& row, Peaks& peaks);

std::string as_json(const Row& row);
std::string heading(Op op);
std::string as_text(const Row& row);

}  // namespace narrows::cli
