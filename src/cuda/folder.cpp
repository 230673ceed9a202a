#include "cuda/folder.hpp"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

namespace narrows::cuda {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

/// Empty, or why what lies there is not this user's alone.
std::string fault(const struct stat& facts) {
  if (facts.st_uid != geteuid()) return text("belongs to user ", facts.st_uid, ", not to user ", geteuid());
  if (facts.st_mode & (S_IWGRP | S_IWOTH)) return "others than its owner may write to it";
  return "";
}

i64 nanoseconds(const timespec& time) { return i64{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return fsync(descriptor) == 0;
}

/// A file that was not there before. Its name tells the process, which another machine may have one of too.
File create_temporary(int folder, std::string& name) {
  static std::atomic<unsigned> count{0};
  for (int tries = 0; tries < 1000; ++tries) {
    name = text("tmp-", getpid(), "-", count++);
    File file(openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file || errno != EEXIST) return file;
  }
  return {};
}

}  // namespace

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

int File::release() { return std::exchange(descriptor_, -1); }

i64 File::size() const {
  struct stat facts {};
  return fstat(descriptor_, &facts) == 0 ? i64{facts.st_size} : -1;
}

bool File::read(i64 offset, char* to, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t taken = pread(descriptor_, to, bytes, offset);
    if (taken < 0 && errno == EINTR) continue;
    if (taken <= 0) return false;
    offset += taken;
    to += taken;
    bytes -= static_cast<std::size_t>(taken);
  }
  return true;
}

PrivateFolder::PrivateFolder(const std::string& path, std::string& reason) {
  // A slash at the end would have a link followed after all.
  std::filesystem::path clean = std::filesystem::path(path).lexically_normal();
  if (!clean.has_filename()) clean = clean.parent_path();
  std::error_code failure;
  if (clean.has_parent_path()) std::filesystem::create_directories(clean.parent_path(), failure);
  if (mkdir(clean.c_str(), 0700) != 0 && errno != EEXIST) {
    reason = error_text(errno);
    return;
  }
  File folder(::open(clean.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat facts {};
  if (!folder || fstat(folder.descriptor(), &facts) != 0) {
    const int error = errno;
    reason = std::filesystem::is_symlink(clean, failure) ? "is a symbolic link" : error_text(error);
    return;
  }
  reason = fault(facts);
  if (reason.empty()) folder_ = std::move(folder);
}

File PrivateFolder::open(const std::string& name) const {
  // Opening a pipe would wait for its other end.
  File file(openat(descriptor(), name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  if (!file || fstat(file.descriptor(), &facts) != 0 || !S_ISREG(facts.st_mode) || !fault(facts).empty()) return {};
  return file;
}

bool PrivateFolder::write(const std::string& name, std::string_view bytes, std::string& reason) const {
  std::string temporary;
  const File file = create_temporary(descriptor(), temporary);
  if (file && write_all(file.descriptor(), bytes) &&
      renameat(descriptor(), temporary.c_str(), descriptor(), name.c_str()) == 0)
    return true;
  reason = error_text(errno);
  if (file) remove(temporary);
  return false;
}

bool PrivateFolder::remove(const std::string& name) const { return unlinkat(descriptor(), name.c_str(), 0) == 0; }

void PrivateFolder::touch(const File& file) const { futimens(file.descriptor(), nullptr); }

std::vector<PrivateFolder::Entry> PrivateFolder::entries() const {
  std::vector<Entry> all;
  // A stream of its own, which begins at the first entry.
  const int again = openat(descriptor(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(again < 0 ? nullptr : fdopendir(again), &closedir);
  while (const dirent* entry = stream ? readdir(stream.get()) : nullptr) {
    struct stat facts {};
    if (fstatat(descriptor(), entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(facts.st_mode)) continue;
    all.push_back({entry->d_name, i64{facts.st_size}, nanoseconds(facts.st_mtim)});
  }
  std::sort(all.begin(), all.end(),
            [](const Entry& a, const Entry& b) { return a.used != b.used ? a.used < b.used : a.name < b.name; });
  return all;
}

}  // namespace narrows::cuda
