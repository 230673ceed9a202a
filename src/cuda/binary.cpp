#include "cuda/binary.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

namespace narrows::cuda {
namespace {

constexpr std::string_view kEntryMagic = "narrows entry 1\n";

/// The number in front of `word`, as in "0 bytes spill stores".
int number_before(std::string_view line, std::string_view word) {
  const std::size_t at = line.find(word);
  if (at == std::string_view::npos || at == 0) return 0;
  std::size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + at, value);
  return value;
}

template <class Number> void put_number(std::string& bytes, Number value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_text(std::string& bytes, std::string_view text) {
  put_number(bytes, static_cast<u64>(text.size()));
  bytes += text;
}

/// Takes values off the front; what is not there reads as 0 or empty and makes the whole bad.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(u64 size) {
    if (size > bytes_.size()) good_ = false;
    const std::string_view taken = bytes_.substr(0, good_ ? static_cast<std::size_t>(size) : 0);
    bytes_.remove_prefix(taken.size());
    return taken;
  }
  template <class Number> Number number() {
    Number value{};
    const std::string_view taken = take(sizeof value);
    if (good_) std::memcpy(&value, taken.data(), sizeof value);
    return value;
  }
  std::string text() { return std::string(take(number<u64>())); }
  bool is_done() const { return good_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool good_ = true;
};

std::array<int Usage::*, 5> usage_fields() {
  return {&Usage::registers, &Usage::stack_bytes, &Usage::spill_store_bytes, &Usage::spill_load_bytes,
          &Usage::shared_bytes};
}

}  // namespace

Usage parse_usage(std::string_view log, std::string_view function) {
  Usage usage;
  const std::string quoted = text("'", function, "'");
  bool speaks_of_it = false;
  while (!log.empty()) {
    const std::size_t end = std::min(log.find('\n'), log.size());
    const std::string_view line = log.substr(0, end);
    log.remove_prefix(std::min(end + 1, log.size()));
    if (line.find("Compiling entry function") != std::string_view::npos)
      speaks_of_it = line.find(quoted) != std::string_view::npos;
    if (!speaks_of_it) continue;
    if (line.find("bytes stack frame") != std::string_view::npos) {
      usage.stack_bytes = number_before(line, " bytes stack frame");
      usage.spill_store_bytes = number_before(line, " bytes spill stores");
      usage.spill_load_bytes = number_before(line, " bytes spill loads");
    } else if (line.find("Used ") != std::string_view::npos) {
      usage.registers = number_before(line, " registers");
      usage.shared_bytes = number_before(line, " bytes smem");
    }
  }
  return usage;
}

std::string write_entry(const Digest& key, const Binary& binary) {
  std::string bytes(kEntryMagic);
  bytes += key.view();
  put_number(bytes, binary.compiler.major);
  put_number(bytes, binary.compiler.minor);
  put_number(bytes, static_cast<int>(binary.is_ptx));
  for (int Usage::*field : usage_fields()) put_number(bytes, binary.usage.*field);
  put_number(bytes, binary.seconds);
  put_text(bytes, binary.function);
  put_text(bytes, binary.architecture);
  put_text(bytes, binary.log);
  put_text(bytes, binary.image);
  bytes += digest(bytes).view();
  return bytes;
}

std::optional<Binary> read_entry(std::string_view bytes, const Digest& key) {
  constexpr std::size_t kSum = sizeof(Digest::bytes);
  if (bytes.size() < kSum) return {};
  const std::string_view content = bytes.substr(0, bytes.size() - kSum);
  if (digest(content).view() != bytes.substr(content.size())) return {};
  Reader reader(content);
  if (reader.take(kEntryMagic.size()) != kEntryMagic || reader.take(kSum) != key.view()) return {};
  Binary binary;
  binary.compiler.major = reader.number<int>();
  binary.compiler.minor = reader.number<int>();
  binary.is_ptx = reader.number<int>() != 0;
  for (int Usage::*field : usage_fields()) binary.usage.*field = reader.number<int>();
  binary.seconds = reader.number<double>();
  binary.function = reader.text();
  binary.architecture = reader.text();
  binary.log = reader.text();
  binary.image = reader.text();
  if (!reader.is_done() || binary.image.empty()) return {};
  return binary;
}

}  // namespace narrows::cuda
