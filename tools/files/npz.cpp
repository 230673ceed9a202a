#include "tools/files/npz.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <zip.h>

#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/files/npy.hpp"

namespace narrows::files {
namespace {

// Deflate's longest match, 258 bytes, takes at least two bits.
constexpr std::uint64_t kDeflateRatio = 1032;

struct Discard {
  void operator()(zip_t* archive) const { zip_discard(archive); }
  void operator()(zip_file_t* file) const { zip_fclose(file); }
};
using Archive = std::unique_ptr<zip_t, Discard>;
using Member = std::unique_ptr<zip_file_t, Discard>;

std::uint64_t number(std::span<const std::byte> bytes, std::size_t offset) {
  std::uint64_t value = 0;
  for (std::size_t i = 8; i-- > 0;) value = value << 8U | std::to_integer<std::uint64_t>(bytes[offset + i]);
  return value;
}

/// libzip 1.7 allocates as many entries as a zip64 end record claims before it reads one.
void require_plausible_count(const Source& source) {
  constexpr std::size_t kTail = 65535 + 22 + 20;
  constexpr std::array kLocator{std::byte{'P'}, std::byte{'K'}, std::byte{6}, std::byte{7}};
  constexpr std::size_t kLocatorSize = 20, kCountAt = 32, kEntrySize = 46;
  const std::span<const std::byte> bytes = source.bytes;
  auto at = bytes.end() - static_cast<std::ptrdiff_t>(std::min(bytes.size(), kTail));
  while ((at = std::search(at, bytes.end(), kLocator.begin(), kLocator.end())) != bytes.end()) {
    const auto locator = static_cast<std::size_t>(at++ - bytes.begin());
    if (bytes.size() - locator < kLocatorSize) return;
    const std::uint64_t record = number(bytes, locator + 8);
    if (record >= bytes.size() || bytes.size() - record < kCountAt + 8) continue;
    const std::uint64_t count = number(bytes, static_cast<std::size_t>(record) + kCountAt);
    if (count > bytes.size() / kEntrySize)
      fail(source.name, fmt::format("the archive claims {} members; its {} bytes have room for {}", count, bytes.size(),
                                    bytes.size() / kEntrySize));
  }
}

Archive open_archive(const Source& source) {
  require_plausible_count(source);
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* const buffer = zip_source_buffer_create(source.bytes.data(), source.bytes.size(), 0, &error);
  zip_t* const archive = buffer == nullptr ? nullptr : zip_open_from_source(buffer, ZIP_RDONLY | ZIP_CHECKCONS, &error);
  const std::string reason = archive == nullptr ? zip_error_strerror(&error) : "";
  zip_error_fini(&error);
  if (archive == nullptr) {
    zip_source_free(buffer);
    fail(source.name, "not a readable zip archive: " + reason);
  }
  return Archive(archive);
}

zip_stat_t stat_of(const Source& source, zip_t* archive, zip_uint64_t index) {
  zip_stat_t stat;
  constexpr zip_uint64_t kNeeded =
      ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE | ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
  if (zip_stat_index(archive, index, 0, &stat) != 0 || (stat.valid & kNeeded) != kNeeded)
    fail(source.name, fmt::format("member {} has no readable entry: {}", index, zip_strerror(archive)));
  return stat;
}

std::string array_name(const zip_stat_t& stat) {
  std::string_view name = stat.name;
  constexpr std::string_view kSuffix = ".npy";
  if (name.ends_with(kSuffix)) name.remove_suffix(kSuffix.size());
  return std::string(name);
}

void require_readable(std::string_view subject, const zip_stat_t& stat) {
  if (stat.encryption_method != ZIP_EM_NONE) fail(subject, "the member is encrypted; only plain members are read");
  if (stat.comp_method != ZIP_CM_STORE && stat.comp_method != ZIP_CM_DEFLATE)
    fail(subject, fmt::format("compression method {} is not read; 0 (stored) and 8 (deflate) are", stat.comp_method));
  const std::uint64_t ratio = stat.comp_method == ZIP_CM_STORE ? 1 : kDeflateRatio;
  if (stat.size / ratio > stat.comp_size)
    fail(subject, fmt::format("the member claims {} bytes; its {} stored bytes hold at most {} times as many",
                              stat.size, stat.comp_size, ratio));
}

/// Reads until `target` is full or the member ends; returns how many bytes that were.
std::size_t read_member(std::string_view subject, zip_file_t* member, std::span<std::byte> target) {
  constexpr std::size_t kStep = std::size_t{1} << 20U;
  std::size_t filled = 0;
  while (filled < target.size()) {
    const zip_int64_t count = zip_fread(member, target.data() + filled, std::min(kStep, target.size() - filled));
    if (count < 0)
      fail(subject, fmt::format("broken after {} bytes: {}", filled, zip_error_strerror(zip_file_get_error(member))));
    if (count == 0) break;
    filled += static_cast<std::size_t>(count);
  }
  return filled;
}

void fill_member(std::string_view subject, zip_file_t* member, std::span<std::byte> target) {
  const std::size_t filled = read_member(subject, member, target);
  if (filled < target.size()) fail(subject, fmt::format("ends {} bytes early", target.size() - filled));
}

Array read_header(std::string_view subject, zip_file_t* member, std::uint64_t member_size) {
  std::vector<std::byte> header(kNpyPrefix);
  header.resize(read_member(subject, member, header));
  const std::size_t size = npy_header_size(subject, header);
  if (size > member_size)
    fail(subject, fmt::format("the member has {} bytes; its header alone has {}", member_size, size));
  const std::size_t read = header.size();
  // The smallest header ends where the prefix does: a dict takes more than the two bytes between versions 1 and 2.
  if (size < read) fail(subject, fmt::format("a header of {} bytes holds no dict", size));
  header.resize(size);
  fill_member(subject, member, std::span(header).subspan(read));
  return parse_npy_header(subject, header, member_size - size);
}

Array read_array(const Source& source, zip_t* archive, zip_uint64_t index, std::uint64_t memory_left) {
  const zip_stat_t stat = stat_of(source, archive, index);
  const std::string name = array_name(stat);
  require_name(source.name, "array", name);
  const std::string subject = subject_of(source.name, "array", name);
  require_readable(subject, stat);
  const Member member(zip_fopen_index(archive, index, 0));
  if (member == nullptr) fail(subject, fmt::format("cannot be opened: {}", zip_strerror(archive)));
  Array array = read_header(subject, member.get(), stat.size);
  const auto size = static_cast<std::size_t>(dense_bytes(subject, array.shape, array.dtype));
  if (size > memory_left)
    throw Error(ErrorCode::out_of_memory, fmt::format("{}: inflates to {} bytes; {} bytes of memory are left for it",
                                                      subject, size, memory_left));
  const Memory memory = allocate(subject, size);
  fill_member(subject, member.get(), memory.bytes);
  // libzip compares the checksum when it meets the end, one byte later.
  std::array<std::byte, 1> beyond{};
  if (read_member(subject, member.get(), beyond) != 0)
    fail(subject, "goes on after the size that the archive gives it");
  array.name = name;
  array.bytes = memory.bytes;
  array.owner = memory.owner;
  return checked_array(subject, std::move(array));
}

/// A source of libzip over memory that outlives it.
zip_source_t* fragments_source(zip_t* archive, std::span<const zip_buffer_fragment_t> fragments) {
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* const source = zip_source_buffer_fragment_create(fragments.data(), fragments.size(), 0, &error);
  if (source == nullptr) zip_error_set(zip_get_error(archive), zip_error_code_zip(&error), 0);
  zip_error_fini(&error);
  return source;
}

zip_buffer_fragment_t fragment(std::string& header) {
  return {reinterpret_cast<zip_uint8_t*>(header.data()), header.size()};
}

zip_buffer_fragment_t fragment(std::span<const std::byte> bytes) {
  return {reinterpret_cast<zip_uint8_t*>(const_cast<std::byte*>(bytes.data())), bytes.size()};
}

bool add_member(zip_t* archive, const std::string& name, std::span<const zip_buffer_fragment_t> fragments) {
  constexpr zip_uint16_t kFirstDay = 1U << 5U | 1U;  // 1 January 1980: equal arrays make equal files
  zip_source_t* const source = fragments_source(archive, fragments);
  if (source == nullptr) return false;
  const zip_int64_t index = zip_file_add(archive, name.c_str(), source, ZIP_FL_ENC_UTF_8);
  if (index < 0) {
    zip_source_free(source);
    return false;
  }
  const auto entry = static_cast<zip_uint64_t>(index);
  return zip_set_file_compression(archive, entry, ZIP_CM_STORE, 0) == 0 &&
         zip_file_set_dostime(archive, entry, 0, kFirstDay, 0) == 0;
}

}  // namespace

bool is_zip(std::span<const std::byte> bytes) {
  return bytes.size() >= 4 && bytes[0] == std::byte{'P'} && bytes[1] == std::byte{'K'} &&
         ((bytes[2] == std::byte{3} && bytes[3] == std::byte{4}) ||
          (bytes[2] == std::byte{5} && bytes[3] == std::byte{6}));
}

TensorFile parse_npz(const Source& source, std::uint64_t memory_limit) {
  if (!is_zip(source.bytes)) fail(source.name, "not .npz data: it does not begin as a zip archive does");
  const Archive archive = open_archive(source);
  TensorFile file{source.name, {}, {}};
  std::set<std::string> names;
  const zip_int64_t count = zip_get_num_entries(archive.get(), 0);
  for (zip_int64_t index = 0; index < count; ++index) {
    Array array = read_array(source, archive.get(), static_cast<zip_uint64_t>(index), memory_limit);
    if (!names.insert(array.name).second) fail(subject_of(source.name, "array", array.name), "the name is given twice");
    memory_limit -= array.bytes.size();
    file.arrays.push_back(std::move(array));
  }
  return file;
}

void write_npz(const std::filesystem::path& path, std::string_view file, std::span<const Array> arrays) {
  int code = 0;
  Archive archive(zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, &code));
  if (archive == nullptr) fail(file, fmt::format("cannot be written: libzip error {}", code));
  // libzip reads the fragments when it closes the archive.
  std::vector<std::string> headers;
  headers.reserve(arrays.size());
  for (const Array& array : arrays) headers.push_back(npy_header(subject_of(file, "array", array.name), array));
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const std::array fragments{fragment(headers[i]), fragment(arrays[i].bytes)};
    if (!add_member(archive.get(), arrays[i].name + ".npy", fragments))
      fail(subject_of(file, "array", arrays[i].name),
           fmt::format("cannot be written: {}", zip_strerror(archive.get())));
  }
  if (zip_close(archive.get()) != 0) fail(file, fmt::format("cannot be written: {}", zip_strerror(archive.get())));
  static_cast<void>(archive.release());
}

}  // namespace narrows::files
