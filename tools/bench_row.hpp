// One measurement, in the row format that every measurement of this project has.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include <narrows/narrows.hpp>

namespace narrows::cli {

enum class Op : std::uint8_t { forward, backward, decode };
inline constexpr std::array kOps{Op::forward, Op::backward, Op::decode};
std::string_view name(Op op);

/// What a row has beside q, k, v and causal.
enum class Case : std::uint8_t { plain, bias, mask, softcap, alibi, dropout, window512, varlen, gqa4, paged16 };
inline constexpr std::array kCases{Case::plain,   Case::bias,      Case::mask,   Case::softcap, Case::alibi,
                                   Case::dropout, Case::window512, Case::varlen, Case::gqa4,    Case::paged16};
std::string_view name(Case special);  // "plain" is what the format leaves empty

struct Row {
  Op op;
  DType dtype;
  std::int64_t b, h, hk, sq, sk, d, dv;  // varlen: sequences, and rows of all of them
  bool causal;
  Case special;
  int threads;

  double milliseconds = 0, best_milliseconds = 0;  // median and least
  double rate = 0, peak = 0;                       // of the least time: TFLOP/s, of decode GB/s
  std::int64_t extra_bytes = 0;                    // beside inputs and results
  std::map<std::string, double> peers{};           // medians in ms

  double fraction() const { return rate / peak; }
  /// Beyond it a measurement cannot be right.
  double most_fraction() const { return op == Op::decode ? 1.05 : 1.02; }
  bool impossible() const { return fraction() > most_fraction(); }
  /// The fastest peer; peers.end() without any.
  std::map<std::string, double>::const_iterator fastest_peer() const;
};

/// The fields that say what is measured, an object that bench/peers.py reads.
std::string request_of(const Row& row);
std::string as_json(const Row& row);
std::string heading(Op op);
std::string as_text(const Row& row);

}  // namespace narrows::cli
