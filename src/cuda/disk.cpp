#include "cuda/disk.hpp"

#include "core/environment.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

namespace narrows::cuda {
namespace {

constexpr std::string_view kEntryMark = "-nvrtc";
constexpr std::string_view kLockMark = ".lock";
constexpr std::string_view kTemporary = "tmp-";
constexpr i64 kLargestEntry = i64{64} << 20;  // bytes; cubins of attention are a thousandth of that
constexpr i64 kStale = 3'600'000'000'000;     // nanoseconds after which nobody writes a file any more

std::string entry_name(const Digest& key, CompilerVersion compiler) {
  return key.hex() + std::string(kEntryMark) + compiler.text();
}

bool is_passing(std::string_view name) { return name.starts_with(kTemporary) || name.ends_with(kLockMark); }

std::optional<Binary> read(const File& file, const Digest& key) {
  const i64 size = file ? file.size() : 0;
  if (size <= 0 || size > kLargestEntry) return {};
  std::string bytes(static_cast<std::size_t>(size), '\0');
  if (!file.read(0, bytes.data(), bytes.size())) return {};
  return read_entry(bytes, key);
}

i64 now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

/// Whether `name` still means the file that was opened: who had the lock before may have removed it.
bool is_current(const PrivateFolder& folder, const std::string& name, const File& file) {
  struct stat opened {
  }, there{};
  return fstat(file.descriptor(), &opened) == 0 &&
         fstatat(folder.descriptor(), name.c_str(), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         opened.st_ino == there.st_ino && opened.st_dev == there.st_dev;
}

}  // namespace

bool is_kernel(std::string_view name) { return name.find(kEntryMark) != std::string_view::npos; }

DiskCache::Lock::Lock(const PrivateFolder& folder, std::string name, std::chrono::milliseconds limit)
    : name_(std::move(name)) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    File file(openat(folder.descriptor(), name_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!file) return;
    while (flock(file.descriptor(), LOCK_EX | LOCK_NB) != 0) {
      if (std::chrono::steady_clock::now() >= end) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (!is_current(folder, name_, file)) continue;
    folder_ = &folder;
    file_ = std::move(file);
    return;
  }
}

DiskCache::Lock::~Lock() {
  if (file_) folder_->remove(name_);
}

const PrivateFolder& DiskCache::folder() {
  std::call_once(opened_, [this] {
    reason_ = settings_.reason;
    if (!settings_.folder.empty()) folder_ = PrivateFolder(settings_.folder, reason_);
    if (!reason_.empty()) warn(reason_);
  });
  return folder_;
}

std::string DiskCache::reason() {
  if (folder()) return "";
  return reason_.empty() ? "off" : reason_;
}

void DiskCache::warn(const std::string& reason) {
  if (has_warned_.exchange(true)) return;
  const std::string place = settings_.folder.empty() ? "" : " " + settings_.folder;
  fprintf(stderr, "narrows: cache%s: %s; compiled kernels are kept in memory only\n", place.c_str(), reason.c_str());
}

std::optional<Binary> DiskCache::load(const Digest& key, CompilerVersion compiler) {
  if (!folder()) return {};
  const File file = folder_.open(entry_name(key, compiler));
  std::optional<Binary> binary = read(file, key);
  if (binary && binary->compiler != compiler) binary.reset();
  if (binary) folder_.touch(file);
  return binary;
}

void DiskCache::store(const Digest& key, const Binary& binary) {
  if (!folder() || !is_writable_) return;
  std::string reason;
  if (folder_.write(entry_name(key, binary.compiler), write_entry(key, binary), reason)) return trim();
  is_writable_ = false;
  warn(reason);
}

void DiskCache::trim() {
  std::vector<PrivateFolder::Entry> all = folder_.entries();
  i64 total = 0;
  for (const PrivateFolder::Entry& entry : all) {
    if (is_passing(entry.name) && entry.used < now() - kStale) folder_.remove(entry.name);
    if (is_kernel(entry.name)) total += entry.bytes;
  }
  for (const PrivateFolder::Entry& entry : all) {
    if (total <= settings_.limit_bytes) return;
    if (is_kernel(entry.name) && folder_.remove(entry.name)) total -= entry.bytes;
  }
}

DiskCache::Lock DiskCache::lock(const Digest& key) {
  if (!folder() || !is_writable_) return {};
  return Lock(folder_, key.hex() + std::string(kLockMark), settings_.lock_limit);
}

std::vector<DiskCache::Entry> DiskCache::entries() {
  std::vector<Entry> sound;
  if (!folder()) return sound;
  for (const PrivateFolder::Entry& entry : folder_.entries()) {
    const std::optional<Digest> key = Digest::from_hex(entry.name.substr(0, entry.name.find(kEntryMark)));
    if (!key || !is_kernel(entry.name)) continue;
    if (std::optional<Binary> binary = read(folder_.open(entry.name), *key))
      sound.push_back({std::move(*binary), entry.bytes, entry.used});
  }
  return sound;
}

i64 DiskCache::clear() {
  i64 removed = 0;
  if (!folder()) return removed;
  for (const PrivateFolder::Entry& entry : folder_.entries()) {
    if (is_passing(entry.name)) folder_.remove(entry.name);
    if (is_kernel(entry.name) && folder_.remove(entry.name)) ++removed;
  }
  return removed;
}

DiskCache::Settings disk_settings() {
  DiskCache::Settings settings;
  settings.folder = environment::cache();
  if (settings.folder == "off") {
    settings.folder.clear();
  } else if (settings.folder.empty()) {
    settings.folder = environment::default_cache();
    if (settings.folder.empty()) settings.reason = "none of NARROWS_CACHE, XDG_CACHE_HOME and HOME is set";
  }
  return settings;
}

}  // namespace narrows::cuda
