// Keys and values of consecutive tiles as the backward products read them.
#pragma once

#include "cpu/backward_call.hpp"

#include <span>

namespace narrows::cpu {

struct KeyTile {
  i64 first = 0;               // key
  i64 count = 0;               // of keys
  i64 columns = 0;             // the same in whole strips; what was added is zeros
  Packed* keys = nullptr;      // key strips, for S = Q K^T
  Packed* values = nullptr;    // V in key strips, for dP = dO V^T
  Packed* key_rows = nullptr;  // K in value strips, for dQ += dS K
};
static_assert(sizeof(KeyTile) <= kKeyTileBytes);

template <class T> class KeyTiles {
 public:
  /// In the thread's scratch.
  KeyTiles(const BackwardCall<T>& call, int thread);

  /// Tiles of call.key_block keys from keys.begin on, at most call.key_chunk in all. A key that none of the heads' rows sees is read as zeros.
  void load(const QueryHeads& heads, Range keys);
  std::span<const KeyTile> tiles() const { return {tiles_, static_cast<std::size_t>(count_)}; }

 private:
  void pack(const KeyTile& tile);
  bool drop_hidden_keys(const QueryHeads& heads, const KeyTile& tile);

  const BackwardCall<T>& call_;
  KeyTile* tiles_;
  i64 count_ = 0;
  const std::byte **k_, **v_;  // rows of the tile being packed; null where nobody sees the key
  Packed* packed_;
};

extern template class KeyTiles<float>;
extern template class KeyTiles<double>;

}  // namespace narrows::cpu
