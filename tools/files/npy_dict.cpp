// The header of a .npy file is a Python dict display with three keys. Exactly that grammar is read; nothing is evaluated.
#include <algorithm>
#include <charconv>
#include <cstdint>

#include <fmt/format.h>

#include "tools/files/failure.hpp"
#include "tools/files/npy.hpp"

namespace narrows::files {
namespace {

class DictParser {
 public:
  DictParser(std::string_view subject, std::string_view text) : subject_(subject), text_(text) {}

  NpyDict parse() {
    expect('{');
    while (!accept('}')) {
      parse_item();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_space();
    if (at_ < text_.size()) refuse("the end");
    if (!has_descr_) fail_missing("descr");
    if (!has_order_) fail_missing("fortran_order");
    if (!has_shape_) fail_missing("shape");
    return dict_;
  }

 private:
  void parse_item() {
    const std::string_view key = parse_string();
    expect(':');
    if (key == "descr") {
      once(key, has_descr_);
      dict_.dtype = parse_descr();
    } else if (key == "fortran_order") {
      once(key, has_order_);
      dict_.fortran_order = parse_boolean();
    } else if (key == "shape") {
      once(key, has_shape_);
      dict_.shape = parse_shape();
    } else {
      fail(subject_, fmt::format("header key {} is not one of 'descr', 'fortran_order', 'shape'", printable(key)));
    }
  }

  DType parse_descr() {
    if (peek() == '[') fail(subject_, "descr is a list of fields; only arrays of one number type are read");
    const std::string_view descr = parse_string();
    if (descr == "<f2") return DType::fp16;
    if (descr == "<f4") return DType::fp32;
    if (descr == "<f8") return DType::fp64;
    if (descr == "<i4") return DType::int32;
    if (descr == "<i8") return DType::int64;
    if (descr == "|u1") return DType::uint8;
    if (descr == "|b1") return DType::boolean;
    if (descr == "|V2" || descr == "<V2")
      fail(subject_,
           fmt::format("descr {} is two bytes without a type (NumPy has no bfloat16); store bf16 as .safetensors",
                       printable(descr)));
    if (!descr.empty() && descr[0] == '>')
      fail(subject_, fmt::format("descr {} is big-endian; only little-endian data is read", printable(descr)));
    fail(subject_,
         fmt::format("descr {} is not read; '<f2' '<f4' '<f8' '<i4' '<i8' '|u1' '|b1' are", printable(descr)));
  }

  bool parse_boolean() {
    if (accept_word("True")) return true;
    if (accept_word("False")) return false;
    refuse("True or False");
  }

  Dims parse_shape() {
    Dims shape;
    std::size_t rank = 0;
    bool comma = false;
    expect('(');
    while (!accept(')')) {
      const std::int64_t size = parse_size();
      if (rank++ < Dims::kMaxRank) shape.push_back(size);
      comma = accept(',');
      if (comma) continue;
      if (rank == 1) refuse("',' after the only size of a tuple");
      expect(')');
      break;
    }
    if (rank > Dims::kMaxRank)
      fail(subject_, fmt::format("shape has {} dimensions; at most {} are read", rank, Dims::kMaxRank));
    return shape;
  }

  std::int64_t parse_size() {
    if (peek() < '0' || peek() > '9') refuse("a size");
    std::int64_t size = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), size);
    const std::string_view digits(begin, static_cast<std::size_t>(end - begin));
    if (error != std::errc()) fail(subject_, fmt::format("shape: size {} leaves 63 bits", printable(digits)));
    if (digits.size() > 1 && digits[0] == '0') refuse("a size without leading zeros");
    at_ += digits.size();
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote its long integers so
    return size;
  }

  std::string_view parse_string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') refuse("a string");
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) refuse("a string that ends");
    const std::string_view value = text_.substr(at_ + 1, end - at_ - 1);
    if (value.find('\\') != std::string_view::npos) refuse("a string without escapes");
    at_ = end + 1;
    return value;
  }

  void skip_space() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }

  /// The next character that is not white space; '\0', which the grammar does not have, at the end.
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  bool accept_word(std::string_view word) {
    skip_space();
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  void expect(char c) {
    if (!accept(c)) refuse(fmt::format("'{}'", c));
  }

  void once(std::string_view key, bool& seen) {
    if (seen) fail(subject_, fmt::format("header key {} is given twice", printable(key)));
    seen = true;
  }

  [[noreturn]] void fail_missing(std::string_view key) {
    fail(subject_, fmt::format("header without the key '{}'", key));
  }

  [[noreturn]] void refuse(std::string_view expected) {
    const std::string found = at_ < text_.size() ? printable(text_.substr(at_, 1)) : "the end";
    fail(subject_, fmt::format("header byte {}: expected {}, found {}", at_, expected, found));
  }

  std::string_view subject_, text_;
  std::size_t at_ = 0;
  NpyDict dict_;
  bool has_descr_ = false, has_order_ = false, has_shape_ = false;
};

}  // namespace

NpyDict parse_npy_dict(std::string_view subject, std::string_view text) { return DictParser(subject, text).parse(); }

}  // namespace narrows::files
