// Packs: found by key alone, refused where a byte of the index differs, passed over where one of an entry does.
#include "cuda/pack.hpp"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "tests/cuda/cache_support.hpp"

namespace narrows::cuda {
namespace {

using ::testing::HasSubstr;

class PackTest : public CacheTest {
 protected:
  std::string bytes_of(int programs) {
    std::vector<PackEntry> entries;
    for (int size = 1; size <= programs; ++size)
      entries.push_back({key_of(small_program(size)), stand_in(small_program(size), "sm_80")});
    return pack_bytes(entries);
  }
  std::string save(const std::string& bytes) {
    const std::string path = (directory_ / "some.pack").string();
    files::save(path, bytes);
    return path;
  }
  /// Without a compiler.
  Cache::Settings closed() {
    Cache::Settings all = settings();
    all.version = []() -> CompilerVersion { throw Error(ErrorCode::not_implemented, "no compiler here"); };
    return all;
  }
};

TEST_F(PackTest, ComesBackAsItWasWritten) {
  const Pack pack = open_pack(save(bytes_of(9)));
  EXPECT_EQ(pack.keys().size(), 9u);
  for (int size = 1; size <= 9; ++size) {
    const std::optional<Binary> binary = pack.find(key_of(small_program(size)));
    ASSERT_TRUE(binary);
    EXPECT_EQ(binary->image, small_program(size).config.insert(0, "image of "));
  }
  EXPECT_FALSE(pack.find(key_of(small_program(10))));
  EXPECT_FALSE(pack.find(Digest{}));
  EXPECT_TRUE(open_pack(save(bytes_of(0))).keys().empty());
}

TEST_F(PackTest, NoByteMayDiffer) {
  const std::string sound = bytes_of(2);
  const std::size_t index_end = 24 + 2 * 48 + 32;
  for (std::size_t i = 0; i < sound.size(); ++i) {
    std::string damaged = sound;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    const std::string path = save(damaged);
    if (i < index_end) {
      EXPECT_THROW(open_pack(path), Error) << i;
      continue;
    }
    const Pack pack = open_pack(path);
    EXPECT_EQ(pack.find(key_of(small_program(1))).has_value() + pack.find(key_of(small_program(2))).has_value(), 1)
        << i;
  }
}

TEST_F(PackTest, Truncated) {
  const std::string sound = bytes_of(2);
  for (std::size_t size = 0; size < sound.size(); ++size)
    EXPECT_THROW(open_pack(save(sound.substr(0, size))), Error) << size;
}

TEST_F(PackTest, AnIndexThatLiesUnderARightDigest) {
  const auto with = [&](std::size_t at, u64 value) {
    std::string bytes = bytes_of(2);
    bytes.replace(at, 8, reinterpret_cast<const char*>(&value), 8);
    bytes.replace(24 + 96, 32, digest(std::string_view(bytes).substr(0, 24 + 96)).view());
    return save(bytes);
  };
  EXPECT_NO_THROW(open_pack(with(16, 2)));
  for (const u64 count : {1ull, 3ull, 1ull << 40, ~0ull}) EXPECT_THROW(open_pack(with(16, count)), Error) << count;
  for (const u64 offset : {0ull, 100ull, 1ull << 40, ~0ull}) EXPECT_THROW(open_pack(with(24 + 32, offset)), Error);
  for (const u64 bytes : {1ull << 40, ~0ull}) EXPECT_THROW(open_pack(with(24 + 40, bytes)), Error) << bytes;
  EXPECT_FALSE(open_pack(with(24 + 40, 0)).find(open_pack(with(24 + 40, 0)).keys()[0]));
  EXPECT_THROW(open_pack(with(24, ~0ull)), Error);  // the first key above the second
}

TEST_F(PackTest, ErrorsNameTheFile) {
  try {
    open_pack("/no such folder/a.pack");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_file);
    EXPECT_THAT(error.what(), HasSubstr("/no such folder/a.pack: No such file or directory"));
  }
  EXPECT_THROW(open_pack(directory_ / ""), Error);
}

TEST_F(PackTest, NeedsNoCompiler) {
  Cache cache(closed());
  cache.add_pack(save(bytes_of(2)));
  EXPECT_EQ(cache.get(small_program(2), "sm_80")->image, "image of constexpr int kSize = 2;\n");
  EXPECT_THROW(cache.get(small_program(3), "sm_80"), Error);
  EXPECT_THROW(cache.get(small_program(2), "sm_86"), Error);
  EXPECT_EQ(compiled_, 0);
}

TEST_F(PackTest, BesideTheLibraryAndInTheCacheFolder) {
  Cache::Settings some = closed();
  some.own_packs = {save(bytes_of(1)), (directory_ / "absent.pack").string()};
  ASSERT_EQ(mkdir(folder().c_str(), 0700), 0);
  const std::vector<PackEntry> two{{key_of(small_program(2)), stand_in(small_program(2), "sm_80")}};
  files::save(file("two.pack"), pack_bytes(two));
  Cache cache(some);
  EXPECT_EQ(cache.get(small_program(1), "sm_80")->image, "image of constexpr int kSize = 1;\n");
  EXPECT_EQ(cache.get(small_program(2), "sm_80")->image, "image of constexpr int kSize = 2;\n");
  ASSERT_EQ(chmod(file("two.pack").c_str(), 0666), 0);
  Cache careful(some);
  testing::internal::CaptureStderr();
  EXPECT_THROW(careful.get(small_program(2), "sm_80"), Error);
  EXPECT_THROW(careful.get(small_program(2), "sm_80"), Error);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("two.pack"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(PackTest, ADamagedEntryIsCompiled) {
  std::string bytes = bytes_of(2);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  Cache cache(settings());
  cache.add_pack(save(bytes));
  EXPECT_EQ(cache.get(small_program(1), "sm_80")->image, "image of constexpr int kSize = 1;\n");
  EXPECT_EQ(cache.get(small_program(2), "sm_80")->image, "image of constexpr int kSize = 2;\n");
  EXPECT_EQ(compiled_, 1);
}

}  // namespace
}  // namespace narrows::cuda
