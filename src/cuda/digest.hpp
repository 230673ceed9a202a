// SHA-256 (FIPS 180-4). What is found by a digest is run on the GPU, so two texts with one digest must be out of reach, of bad
// luck and of whoever writes to a shared folder; the same digest then serves as the checksum of files.
#pragma once

#include "core/types.hpp"

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace narrows::cuda {

struct Digest {
  std::array<std::uint8_t, 32> bytes{};

  auto operator<=>(const Digest&) const = default;
  std::string hex() const;
  static std::optional<Digest> from_hex(std::string_view text);  // nothing but 64 digits as hex() writes them
  std::string_view view() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
};

class Hash {
 public:
  void add(std::string_view bytes);
  /// With its length in front, so that where one text ends and the next begins counts.
  void add_text(std::string_view bytes);
  Digest finish();

 private:
  void block(const char* bytes);

  std::array<std::uint32_t, 8> state_{0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                                      0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
  std::array<char, 64> waiting_{};
  std::size_t held_ = 0;
  u64 total_ = 0;  // bytes
};

Digest digest(std::string_view bytes);

}  // namespace narrows::cuda
