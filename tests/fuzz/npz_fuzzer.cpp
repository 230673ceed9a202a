#include <cstddef>
#include <cstdint>
#include <span>

#include "tests/fuzz/check_file.hpp"
#include "tools/files/npz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace narrows;
  const files::Source source{"input.npz", std::as_bytes(std::span(data, size)), nullptr};
  try {
    files::check_file(files::parse_npz(source, std::uint64_t{1} << 24U));
  } catch (const Error&) {  // a refusal by name is a right answer
  }
  return 0;
}
