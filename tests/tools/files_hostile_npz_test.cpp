// .npz archives that are not as they should be, things that are not files, and arrays that no file can hold.
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "tests/tools/files_support.hpp"
#include "tools/files/npz.hpp"

namespace narrows::files {
namespace {

std::string npz_error(const std::string& content, ErrorCode code = ErrorCode::invalid_file,
                      std::uint64_t limit = std::uint64_t{1} << 20U) {
  return error_of([&] { parse_npz(source_of("a.npz", content), limit); }, code);
}

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1U ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

struct Member {
  std::string name;
  std::string content;
  std::size_t method = 0;
  std::size_t flags = 0;
  std::int64_t size = -1;  // that the headers claim; -1 = the truth
  std::uint32_t crc_error = 0;
};

/// A zip archive that says exactly what the members say.
std::string archive(const std::vector<Member>& members) {
  std::string files, directory;
  for (const Member& m : members) {
    const std::size_t size = m.size < 0 ? m.content.size() : static_cast<std::size_t>(m.size);
    const std::string common = little(20, 2) + little(m.flags, 2) + little(m.method, 2) + little(0, 2) +
                               little(0x21, 2) + little(crc32(m.content) ^ m.crc_error, 4) +
                               little(m.content.size(), 4) + little(size, 4) + little(m.name.size(), 2) + little(0, 2);
    directory += "PK\1\2" + little(20, 2) + common + little(0, 2) + little(0, 8) + little(files.size(), 4) + m.name;
    files += "PK\3\4" + common + m.name + m.content;
  }
  return files + directory + "PK\5\6" + little(0, 4) + little(members.size(), 2) + little(members.size(), 2) +
         little(directory.size(), 4) + little(files.size(), 4) + little(0, 2);
}

const std::string& q_npy() {
  static const std::string content = load(data_file("fp32.npy"));
  return content;
}

TEST(HostileNpz, the_builder_of_these_tests_makes_readable_archives) {
  const std::string content = archive({{"q.npy", q_npy()}, {"k", q_npy()}});
  const TensorFile file = parse_npz(source_of("a.npz", content), 48);
  ASSERT_EQ(file.arrays.size(), 2U);
  EXPECT_EQ(values_of<float>(*file.find("k")), (std::vector<float>{-2, -0.5, 1, 2.5, 4, 5.5}));
}

TEST(HostileNpz, truncated_at_every_byte_is_refused) {
  const std::string whole = load(data_file("deflated.npz"));
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(npz_error(whole.substr(0, size)), "") << "cut to " << size << " bytes";
  EXPECT_EQ(npz_error(whole), "");
}

TEST(HostileNpz, no_changed_byte_is_a_crash_and_changed_data_is_noticed) {
  const std::string whole = load(data_file("stored.npz"));
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0x55);
    npz_error(changed);
  }
  std::string changed = archive({{"q.npy", q_npy()}});
  changed[30 + 5 + 128] ^= 1;  // the first byte of the data
  // The words after the last colon are libzip's.
  EXPECT_TRUE(npz_error(changed).starts_with("a.npz: array 'q': broken after 0 bytes: ")) << npz_error(changed);
}

TEST(HostileNpz, archive) {
  EXPECT_EQ(npz_error("GARBAGE"), "a.npz: not .npz data: it does not begin as a zip archive does");
  const std::string unreadable = "a.npz: not a readable zip archive: ";
  EXPECT_TRUE(npz_error("PK\3\4 and nothing of an archive").starts_with(unreadable));
  const std::string twice = archive({{"q.npy", q_npy()}, {"q", q_npy()}});
  EXPECT_EQ(npz_error(twice), "a.npz: array 'q': the name is given twice");
  EXPECT_TRUE(npz_error(archive({{"q", q_npy()}, {"q", q_npy()}})).starts_with(unreadable));
  EXPECT_EQ(npz_error(archive({{".npy", q_npy()}})), "a.npz: array without a name; a name has at least one character");
  EXPECT_EQ(npz_error(archive({{"q\n.npy", q_npy()}})),
            "a.npz: array 'q\\x0a': the name holds a control character; names are printable text");
}

TEST(HostileNpz, a_zip64_record_that_claims_more_members_than_the_file_has_room_for) {
  const std::string record = "PK\6\6" + little(44, 8) + little(45, 2) + little(45, 2) + little(0, 8) +
                             little(1U << 30U, 8) + little(1U << 30U, 8) + little(0, 8) + little(4, 8);
  const std::string content = "PK\3\4" + record + "PK\6\7" + little(0, 4) + little(4, 8) + little(1, 4) + "PK\5\6" +
                              little(0, 4) + little(0xFFFF, 2) + little(0xFFFF, 2) + little(0xFFFFFFFF, 4) +
                              little(0xFFFFFFFF, 4) + little(0, 2);
  EXPECT_EQ(npz_error(content), "a.npz: the archive claims 1073741824 members; its 102 bytes have room for 2");
}

TEST(HostileNpz, members) {
  const std::string q = "a.npz: array 'q': ";
  EXPECT_EQ(npz_error(archive({{"q.npy", q_npy(), 12}})),
            q + "compression method 12 is not read; 0 (stored) and 8 (deflate) are");
  EXPECT_EQ(npz_error(archive({{"q.npy", q_npy(), 0, 1}})), q + "the member is encrypted; only plain members are read");
  EXPECT_EQ(npz_error(archive({{"q.npy", "text"}})), q + "not .npy data: it does not begin with \\x93NUMPY");
  EXPECT_EQ(npz_error(archive({{"q.npy", q_npy().substr(0, 100)}})),
            q + "the member has 100 bytes; its header alone has 128");
  EXPECT_EQ(npz_error(archive({{"q.npy", q_npy().substr(0, 150)}})),
            q + "22 bytes follow the header; shape [2, 3] of <f4 needs 24");
  EXPECT_EQ(npz_error(archive({{"q.npy", q_npy() + "x"}})),
            q + "25 bytes follow the header; shape [2, 3] of <f4 needs 24");
  EXPECT_EQ(npz_error(archive({{"q.npy", "\x93NUMPY" + std::string("\1\0\1\0{x", 6)}})),
            q + "a header of 11 bytes holds no dict");
}

TEST(HostileNpz, sizes_that_lie_are_refused_before_memory_is_taken) {
  EXPECT_EQ(npz_error(archive({{"q.npy", "short", 8, 0, 2'000'000'000}})),
            "a.npz: array 'q': the member claims 2000000000 bytes; its 5 stored bytes hold at most 1032 times as many");
  EXPECT_EQ(npz_error(archive({{"q.npy", "short", 0, 0, 6}})),
            "a.npz: array 'q': the member claims 6 bytes; its 5 stored bytes hold at most 1 times as many");
}

TEST(HostileNpz, a_bomb_is_refused_before_it_is_inflated) {
  const std::string content = load(data_file("deflated.npz"));  // 'zeros' inflates from 90 bytes to 16384
  EXPECT_EQ(npz_error(content, ErrorCode::out_of_memory, 16383),
            "a.npz: array 'zeros': inflates to 16384 bytes; 16383 bytes of memory are left for it");
  EXPECT_EQ(npz_error(content, ErrorCode::out_of_memory, 16384),
            "a.npz: array 'q': inflates to 24 bytes; 0 bytes of memory are left for it");
}

TEST(HostilePaths, what_is_not_a_file_is_refused_by_its_kind) {
  const TemporaryDirectory directory;
  const auto error = [&](std::string_view name) {
    const std::string path = (directory / name).string();
    const std::string text = error_of([&] { read_tensor_file(path); });
    return text.substr(0, path.size()) == path ? text.substr(path.size()) : text;
  };
  std::filesystem::create_directory(directory / "d.npy");
  ASSERT_EQ(::mkfifo((directory / "p.npz").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", directory / "z.safetensors");
  save(directory / "e.npy", "");
  save(directory / "t.txt", "text");
  save(directory / "n.safetensors", q_npy());
  save(directory / "z.npy", archive({}));
  EXPECT_EQ(error("d.npy"), ": is a directory, not a file");
  EXPECT_EQ(error("p.npz"), ": is a pipe, not a file");
  EXPECT_EQ(error("z.safetensors"), ": is a device, not a file");
  EXPECT_EQ(error("e.npy"), ": the file is empty");
  EXPECT_EQ(error("missing.npy"), ": cannot be opened: No such file or directory");
  EXPECT_EQ(error("t.txt"), ": extension '.txt' names no format; .npy, .npz and .safetensors do");
  EXPECT_EQ(error("n.safetensors"), ": is named .safetensors; its content looks like .npy");
  EXPECT_EQ(error("z.npy"), ": is named .npy; its content looks like .npz");
}

TEST(HostileArrays, writers_refuse_what_a_format_cannot_hold_and_leave_the_old_file) {
  const TemporaryDirectory directory;
  const std::vector<std::uint16_t> values{1, 2, 3, 4};
  const Array bf16 = array_of("o", DType::bf16, {4}, values), fp16 = array_of("o", DType::fp16, {4}, values);
  const auto error = [&](std::string_view name, const std::vector<Array>& arrays) {
    const std::string path = (directory / name).string();
    save(path, "old");
    const std::string text = error_of([&] { write_tensor_file(path, arrays); });
    EXPECT_EQ(load(path), "old");
    return text.substr(std::min(path.size(), text.size()));
  };
  const std::string advice = ": array 'o': NumPy has no bfloat16; write bf16 to .safetensors or convert to fp32";
  EXPECT_EQ(error("a.npy", {bf16}), advice);
  EXPECT_EQ(error("a.npz", {bf16}), advice);
  EXPECT_EQ(error("a.npy", {fp16, fp16}), ": array 'o': the name is given twice");
  EXPECT_EQ(error("a.npy", {}), ": 0 arrays; a .npy file holds exactly 1, .npz any number");
  EXPECT_EQ(error("a.npz", {array_of("a\nb", DType::fp16, {4}, values)}),
            ": array 'a\\x0ab': the name holds a control character; names are printable text");
  EXPECT_EQ(error("a.safetensors", {array_of("\xFF", DType::fp16, {4}, values)}),
            ": cannot be written: an array's name is not UTF-8");
  EXPECT_EQ(error("a.safetensors", {array_of("__metadata__", DType::fp16, {4}, values)}),
            ": array '__metadata__': the name is the format's own");
  EXPECT_EQ(error("a.npy", {array_of("o", DType::fp16, {5}, values)}),
            ": array 'o': shape [5] with strides [1] needs 10 bytes; the array has 8");
  Array strided = fp16;
  strided.strides = {-1};
  EXPECT_EQ(error("a.npy", {strided}), ": array 'o': stride -1 of axis 0 is negative or leaves 63 bits");
  strided.strides = {INT64_MAX};
  EXPECT_EQ(error("a.npy", {strided}),
            ": array 'o': stride 9223372036854775807 of axis 0 is negative or leaves 63 bits");
  strided.strides = {1, 1};
  EXPECT_EQ(error("a.npy", {strided}), ": array 'o': strides [1, 1] and shape [4] differ in rank");
  EXPECT_EQ(directory.files(), 3U) << "a temporary file was left";
}

/// Files of this process end at `size` bytes while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t size) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limited{size, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit old_{};
};

TEST(HostileArrays, a_full_disk_leaves_the_old_file_and_nothing_else) {
  const TemporaryDirectory directory;
  const std::vector<float> values(4096, 1.0F);
  const Array array = array_of("a", DType::fp32, {4096}, values);
  for (const std::string extension : {".npy", ".npz", ".safetensors"}) {
    const std::string path = (directory / ("a" + extension)).string();
    save(path, "old");
    std::string text;
    {
      const FileSizeLimit limit(4096);
      text = error_of([&] { write_tensor_file(path, std::span(&array, 1)); });
    }
    EXPECT_TRUE(text.starts_with(path + ": cannot be written: ")) << text;
    EXPECT_EQ(load(path), "old");
  }
  EXPECT_EQ(directory.files(), 3U) << "a temporary file was left";
}

TEST(HostileArrays, writers_replace_only_files) {
  const TemporaryDirectory directory;
  const std::vector<float> values{1};
  const Array array = array_of("a", DType::fp32, {1}, values);
  const auto write = [&](std::string_view name) {
    return error_of([&] { write_tensor_file(directory / name, std::span(&array, 1)); });
  };
  std::filesystem::create_directory(directory / "d.npy");
  EXPECT_EQ(write("d.npy"), (directory / "d.npy").string() + ": exists and is not a file; only files are replaced");
  std::filesystem::create_symlink("/dev/null", directory / "null.npy");
  EXPECT_EQ(write("null.npy"),
            (directory / "null.npy").string() + ": exists and is not a file; only files are replaced");
  EXPECT_EQ(write("missing/a.npy"),
            (directory / "missing/a.npy").string() + ": cannot be written: No such file or directory");
  save(directory / "real.npy", "old");
  std::filesystem::create_symlink("real.npy", directory / "link.npy");
  EXPECT_EQ(write("link.npy"), "");
  EXPECT_TRUE(std::filesystem::is_symlink(directory / "link.npy"));
  EXPECT_EQ(read_tensor_file(directory / "real.npy").arrays.at(0).name, "real");
}

}  // namespace
}  // namespace narrows::files
