// Packs and cache entries are read from files that anything may have happened to. To get past the digests, which no search
// finds, they are put right first; what is then accepted must be what was written.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "cuda/pack.hpp"

namespace narrows::cuda {
namespace {

constexpr std::size_t kSum = sizeof(Digest::bytes);

File file_of(std::string_view bytes) {
  const int descriptor = memfd_create("pack", MFD_CLOEXEC);
  if (descriptor < 0 || write(descriptor, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    std::abort();
  return File(descriptor);
}

/// `bytes` with a digest of what stands before `at` at `at`.
std::string put_right(std::string bytes, std::size_t at) {
  if (at <= bytes.size() && bytes.size() - at >= kSum) bytes.replace(at, kSum, digest(bytes.substr(0, at)).view());
  return bytes;
}

void check_entry(const std::string& bytes) {
  constexpr std::size_t kKeyAt = 16;  // behind the magic words
  if (bytes.size() < kKeyAt + kSum) return;
  Digest key;
  bytes.copy(reinterpret_cast<char*>(key.bytes.data()), kSum, kKeyAt);
  if (const std::optional<Binary> binary = read_entry(bytes, key)) {
    const std::optional<Binary> again = read_entry(write_entry(key, *binary), key);
    if (!again || again->image != binary->image || again->log != binary->log) std::abort();
  }
}

void check_pack(const std::string& bytes) {
  try {
    const Pack pack(file_of(bytes), "input");
    for (const Digest& key : pack.keys()) pack.find(key);
    if (pack.find(Digest{}) && pack.keys().front() != Digest{}) std::abort();
  } catch (const Error&) {  // a refusal by name is a right answer
  }
}

}  // namespace
}  // namespace narrows::cuda

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace narrows::cuda;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data + 1), size - 1);
  if (data[0] % 2 == 0) {
    check_entry(bytes);
    if (bytes.size() >= kSum) check_entry(put_right(bytes, bytes.size() - kSum));
  } else {
    check_pack(bytes);
    check_pack(put_right(bytes, 24 + std::size_t{data[0]} / 2 * 48));  // for so many entries
  }
  return 0;
}
