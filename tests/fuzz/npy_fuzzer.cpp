#include <cstddef>
#include <cstdint>
#include <span>

#include "tests/fuzz/check_file.hpp"
#include "tools/files/npy.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace narrows;
  const files::Source source{"input.npy", std::as_bytes(std::span(data, size)), nullptr};
  try {
    files::check_file(files::parse_npy(source));
  } catch (const Error&) {  // a refusal by name is a right answer
  }
  return 0;
}
