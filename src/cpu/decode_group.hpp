// One task of decoding: few query rows of some kv heads of a sequence.
#pragma once

#include "cpu/decode_block.hpp"

#include <array>
#include <optional>

namespace narrows::cpu {

/// Heads whose rows of a key are neighbours in memory, attended to together, some keys at a time, so that memory is read in its
/// order; or one head. A head's bits do not depend on the others.
template <class T> class DecodeGroup {
 public:
  /// The same rows of each head.
  DecodeGroup(const ForwardCall<T>& call, std::span<const KvHead> heads, Range rows, int thread);

  /// O and LSE from all the keys.
  void run();
  /// The partial results of one split.
  void run_split(i64 split);

 private:
  void attend(Range keys);
  void attend_block(Range keys, Range next);
  void find_rows(Range keys, Range next);
  template <class Step>
  void each_step(i64 keys, const View& view, i64 length, const std::byte* const* rows, const Step& step);

  DecodeBlock<T>& head(i64 number) { return *blocks_[static_cast<std::size_t>(number)]; }

  const ForwardCall<T>& call_;
  std::span<const KvHead> heads_;
  std::array<std::optional<DecodeBlock<T>>, kMostHeadsTogether> blocks_;
  // The first head's rows of a block's keys and, to be fetched ahead, of what is read afterwards.
  const std::byte **key_rows_, **value_rows_;
};

extern template class DecodeGroup<float>;
extern template class DecodeGroup<double>;

}  // namespace narrows::cpu
