// A compiled program, and as what it lies in files.
#pragma once

#include "cuda/digest.hpp"
#include "cuda/nvrtc.hpp"

#include <optional>
#include <string>
#include <string_view>

namespace narrows::cuda {

/// What ptxas says of a function.
struct Usage {
  int registers = 0;  // a thread
  int stack_bytes = 0;
  int spill_store_bytes = 0, spill_load_bytes = 0;
  int shared_bytes = 0;  // static

  bool operator==(const Usage&) const = default;
};

/// From the log of a compilation. Nothing where it does not speak of `function`, as of PTX.
Usage parse_usage(std::string_view log, std::string_view function);

struct Binary {
  std::string image;  // a cubin; or PTX with its final zero, for a GPU that the compiler did not know
  bool is_ptx = false;
  std::string function;
  std::string architecture;  // asked for, "sm_90a"
  CompilerVersion compiler;
  Usage usage;
  std::string log;
  double seconds = 0;  // that compiling took
};

/// An entry of the disk cache or of a pack: header, texts, image, and the digest of all that.
std::string write_entry(const Digest& key, const Binary& binary);
/// Nothing where a byte is not as written, or the entry is of another key.
std::optional<Binary> read_entry(std::string_view bytes, const Digest& key);

}  // namespace narrows::cuda
