#include "cuda/digest.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace narrows::cuda {
namespace {

using Word = std::uint32_t;

constexpr std::array<Word, 64> kRound{
    0x428A2F98, 0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0x923F82A4, 0xAB1C5ED5,
    0xD807AA98, 0x12835B01, 0x243185BE, 0x550C7DC3, 0x72BE5D74, 0x80DEB1FE, 0x9BDC06A7, 0xC19BF174,
    0xE49B69C1, 0xEFBE4786, 0x0FC19DC6, 0x240CA1CC, 0x2DE92C6F, 0x4A7484AA, 0x5CB0A9DC, 0x76F988DA,
    0x983E5152, 0xA831C66D, 0xB00327C8, 0xBF597FC7, 0xC6E00BF3, 0xD5A79147, 0x06CA6351, 0x14292967,
    0x27B70A85, 0x2E1B2138, 0x4D2C6DFC, 0x53380D13, 0x650A7354, 0x766A0ABB, 0x81C2C92E, 0x92722C85,
    0xA2BFE8A1, 0xA81A664B, 0xC24B8B70, 0xC76C51A3, 0xD192E819, 0xD6990624, 0xF40E3585, 0x106AA070,
    0x19A4C116, 0x1E376C08, 0x2748774C, 0x34B0BCB5, 0x391C0CB3, 0x4ED8AA4A, 0x5B9CCA4F, 0x682E6FF3,
    0x748F82EE, 0x78A5636F, 0x84C87814, 0x8CC70208, 0x90BEFFFA, 0xA4506CEB, 0xBEF9A3F7, 0xC67178F2};

Word big_endian(const char* bytes) {
  Word word = 0;
  for (int i = 0; i < 4; ++i) word = word << 8 | static_cast<unsigned char>(bytes[i]);
  return word;
}

Word spread(Word x, int a, int b, int c) { return std::rotr(x, a) ^ std::rotr(x, b) ^ std::rotr(x, c); }

constexpr std::string_view kDigits = "0123456789abcdef";

}  // namespace

std::string Digest::hex() const {
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::optional<Digest> Digest::from_hex(std::string_view text) {
  Digest digest;
  if (text.size() != 2 * digest.bytes.size()) return {};
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t value = kDigits.find(text[i]);
    if (value == std::string_view::npos) return {};
    digest.bytes[i / 2] = static_cast<std::uint8_t>(digest.bytes[i / 2] << 4 | static_cast<int>(value));
  }
  return digest;
}

void Hash::block(const char* bytes) {
  std::array<Word, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = big_endian(bytes + 4 * i);
  for (std::size_t i = 16; i < 64; ++i)
    w[i] = w[i - 16] + (std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
           (std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10);
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const Word first = h + spread(e, 6, 11, 25) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const Word second = spread(a, 2, 13, 22) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<Word, 8> mixed{a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state_[i] += mixed[i];
}

void Hash::add(std::string_view bytes) {
  total_ += bytes.size();
  while (!bytes.empty()) {
    if (held_ == 0 && bytes.size() >= waiting_.size()) {
      block(bytes.data());
      bytes.remove_prefix(waiting_.size());
      continue;
    }
    const std::size_t taken = std::min(bytes.size(), waiting_.size() - held_);
    std::memcpy(waiting_.data() + held_, bytes.data(), taken);
    bytes.remove_prefix(taken);
    held_ += taken;
    if (held_ < waiting_.size()) continue;
    block(waiting_.data());
    held_ = 0;
  }
}

void Hash::add_text(std::string_view bytes) {
  add(std::to_string(bytes.size()) + ":");
  add(bytes);
}

Digest Hash::finish() {
  const u64 bits = total_ * 8;
  add(std::string_view("\x80", 1));
  while (held_ != 56) add(std::string_view("\0", 1));
  std::array<char, 8> length;
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(bits >> (56 - 8 * i));
  add({length.data(), length.size()});
  Digest result;
  for (std::size_t i = 0; i < 32; ++i) result.bytes[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return result;
}

Digest digest(std::string_view bytes) {
  Hash hash;
  hash.add(bytes);
  return hash.finish();
}

}  // namespace narrows::cuda
