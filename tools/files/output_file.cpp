#include "tools/files/output_file.hpp"

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

#include <fmt/format.h>

#include "tools/files/failure.hpp"

namespace narrows::files {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_to_write(const fs::path& path, int error) {
  fail(path.string(), std::string("cannot be written: ") + std::strerror(error));
}

/// The file that a chain of links ends in: replacing the link itself would detach it from its target.
fs::path resolved(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return path;
  if (!fs::is_regular_file(status)) fail(path.string(), "exists and is not a file; only files are replaced");
  return fs::canonical(path);
}

}  // namespace

OutputFile::OutputFile(const fs::path& target) : target_(resolved(target)) {
  static std::atomic<unsigned> counter{0};
  do {
    temporary_ = fmt::format("{}.{}-{}.tmp", target_.string(), ::getpid(), counter++);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
  } while (descriptor_ < 0 && errno == EEXIST);
  if (descriptor_ < 0) fail_to_write(target_, errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_to_write(target_, errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void OutputFile::write(std::string_view text) { write(std::as_bytes(std::span(text))); }

void OutputFile::commit() {
  // Opened anew because a writer that took path() may have put another file there.
  const int file = ::open(temporary_.c_str(), O_RDONLY | O_CLOEXEC);
  const int error = file < 0 || ::fsync(file) != 0 ? errno : 0;
  if (file >= 0) ::close(file);
  if (error != 0) fail_to_write(target_, error);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_to_write(target_, errno);
  ::close(descriptor_);
  descriptor_ = -1;
}

}  // namespace narrows::files
