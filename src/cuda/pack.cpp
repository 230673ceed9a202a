#include "cuda/pack.hpp"

#include "core/error.hpp"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace narrows::cuda {
namespace {

constexpr std::string_view kPackMagic{"narrows pack 1\n\0", 16};
constexpr std::size_t kKeyBytes = sizeof(Digest::bytes);
constexpr std::size_t kPlaceBytes = kKeyBytes + 2 * sizeof(u64);
constexpr std::size_t kFrontBytes = kPackMagic.size() + sizeof(u64);

void put_u64(std::string& bytes, u64 value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }

u64 number_at(std::string_view bytes, std::size_t at) {
  u64 value = 0;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

Pack::Pack(File file, const std::string& name) : file_(std::move(file)) {
  if (!read_index()) throw Error(ErrorCode::invalid_file, name + ": is not a pack of compiled kernels, or is damaged");
}

bool Pack::read_index() {
  const u64 size = static_cast<u64>(std::max<i64>(file_.size(), 0));
  std::string front(kFrontBytes, '\0');
  if (!file_.read(0, front.data(), front.size()) || !front.starts_with(kPackMagic)) return false;
  const u64 count = number_at(front, kPackMagic.size());
  if (count > size / kPlaceBytes) return false;
  const std::size_t index_bytes = static_cast<std::size_t>(count) * kPlaceBytes;
  const std::size_t entries_begin = kFrontBytes + index_bytes + kKeyBytes;
  std::string bytes(entries_begin, '\0');
  if (!file_.read(0, bytes.data(), bytes.size())) return false;
  const std::string_view covered = std::string_view(bytes).substr(0, kFrontBytes + index_bytes);
  if (digest(covered).view() != std::string_view(bytes).substr(covered.size())) return false;
  for (std::size_t at = kFrontBytes; at < covered.size(); at += kPlaceBytes) {
    Place place{{}, number_at(bytes, at + kKeyBytes), number_at(bytes, at + kKeyBytes + sizeof(u64))};
    std::memcpy(place.key.bytes.data(), bytes.data() + at, kKeyBytes);
    if (place.offset < entries_begin || place.offset > size || place.bytes > size - place.offset) return false;
    if (!index_.empty() && index_.back().key >= place.key) return false;
    index_.push_back(place);
  }
  return true;
}

std::optional<Binary> Pack::find(const Digest& key) const {
  const auto place = std::lower_bound(index_.begin(), index_.end(), key,
                                      [](const Place& entry, const Digest& wanted) { return entry.key < wanted; });
  if (place == index_.end() || place->key != key) return {};
  std::string bytes(static_cast<std::size_t>(place->bytes), '\0');
  if (!file_.read(static_cast<i64>(place->offset), bytes.data(), bytes.size())) return {};
  return read_entry(bytes, key);
}

std::vector<Digest> Pack::keys() const {
  std::vector<Digest> all;
  for (const Place& place : index_) all.push_back(place.key);
  return all;
}

Pack open_pack(const std::string& path) {
  File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw Error(ErrorCode::invalid_file, text(path, ": ", std::generic_category().message(errno)));
  return Pack(std::move(file), path);
}

std::string pack_bytes(std::span<const PackEntry> entries) {
  std::vector<const PackEntry*> sorted;
  for (const PackEntry& entry : entries) sorted.push_back(&entry);
  std::sort(sorted.begin(), sorted.end(), [](const PackEntry* a, const PackEntry* b) { return a->key < b->key; });
  std::string bytes(kPackMagic), content;
  put_u64(bytes, sorted.size());
  const std::size_t entries_begin = kFrontBytes + sorted.size() * kPlaceBytes + kKeyBytes;
  for (const PackEntry* entry : sorted) {
    const std::string written = write_entry(entry->key, entry->binary);
    bytes += entry->key.view();
    put_u64(bytes, entries_begin + content.size());
    put_u64(bytes, written.size());
    content += written;
  }
  bytes += digest(bytes).view();
  return bytes + content;
}

}  // namespace narrows::cuda
