// What the disk holds is used only where it is as it was written, by this user, out of reach of others.
#include "cuda/cache.hpp"

#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <utime.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "tests/cuda/cache_support.hpp"

namespace narrows::cuda {
namespace {

using ::testing::HasSubstr;

TEST(Entry, ComesBackAsItWasWritten) {
  const Program program = small_program();
  Binary binary = stand_in(program, "sm_90a");
  binary.is_ptx = true;
  const std::optional<Binary> read = read_entry(write_entry(key_of(program), binary), key_of(program));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->image, "image of constexpr int kSize = 256;\n");
  EXPECT_TRUE(read->is_ptx);
  EXPECT_EQ(read->function, "small");
  EXPECT_EQ(read->architecture, "sm_90a");
  EXPECT_EQ(read->compiler, (CompilerVersion{13, 0}));
  EXPECT_EQ(read->usage, (Usage{40, 1, 2, 3, 4}));
  EXPECT_EQ(read->log, "a log");
  EXPECT_EQ(read->seconds, 0.5);
  EXPECT_FALSE(read_entry(write_entry(key_of(program), binary), key_of(small_program(1))));
}

TEST_F(CacheTest, CompiledOnceThenReadFromTheDisk) {
  EXPECT_EQ(image(), "image of constexpr int kSize = 256;\n");
  EXPECT_EQ(compiled_, 1);
  EXPECT_EQ(image(), "image of constexpr int kSize = 256;\n");
  EXPECT_EQ(compiled_, 0);
  EXPECT_EQ(image(small_program(8)), "image of constexpr int kSize = 8;\n");
  EXPECT_EQ(compiled_, 1);
  EXPECT_EQ(count(""), 2);
  struct stat facts {};
  ASSERT_EQ(stat(folder().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  ASSERT_EQ(stat(file(entry_name(small_program())).c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0600u);
}

TEST_F(CacheTest, AnotherCompilerCompilesAgain) {
  image();
  Cache::Settings other = settings();
  other.version = [] { return CompilerVersion{12, 9}; };
  compiled_ = 0;
  Cache(std::move(other)).get(small_program(), "sm_80");
  EXPECT_EQ(compiled_, 1);
}

TEST_F(CacheTest, NoByteOfAnEntryMayDiffer) {
  image();
  const std::string path = file(entry_name(small_program()));
  const std::string sound = files::load(path);
  ASSERT_GT(sound.size(), 100u);
  for (std::size_t i = 0; i < sound.size(); ++i) {
    std::string damaged = sound;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_FALSE(read_entry(damaged, key_of(small_program()))) << i;
    EXPECT_FALSE(read_entry(sound.substr(0, i), key_of(small_program()))) << i;
  }
  for (const std::string& damaged : {std::string(), sound.substr(0, 40), sound + '\0', sound.substr(1)}) {
    files::save(path, damaged);
    EXPECT_EQ(image(), "image of constexpr int kSize = 256;\n");
    EXPECT_EQ(compiled_, 1);
    EXPECT_EQ(files::load(path), sound);  // the entry is good again
  }
}

TEST_F(CacheTest, AnEntryOfAnotherProgramUnderThisName) {
  image(small_program(8));
  std::filesystem::rename(file(entry_name(small_program(8))), file(entry_name(small_program())));
  EXPECT_EQ(image(), "image of constexpr int kSize = 256;\n");
  EXPECT_EQ(compiled_, 1);
}

TEST_F(CacheTest, EntriesThatOthersMayHaveWritten) {
  image();
  const std::filesystem::path path = file(entry_name(small_program()));
  for (const unsigned mode : {0602u, 0620u, 0666u}) {
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
    image();
    EXPECT_EQ(compiled_, 1) << mode;
    image();
    EXPECT_EQ(compiled_, 0) << mode;
  }
  std::filesystem::rename(path, directory_ / "elsewhere");
  std::filesystem::create_symlink(directory_ / "elsewhere", path);
  image();
  EXPECT_EQ(compiled_, 1);
  EXPECT_FALSE(std::filesystem::is_symlink(path));
  if (geteuid() != 0) GTEST_SKIP() << "an entry of another user's takes root to make";
  ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
  image();
  EXPECT_EQ(compiled_, 1);
}

/// The folder is of no use: two programs, each compiled once for as long as the process lives, and one warning that holds
/// `reason`.
void expect_memory_only(Cache::Settings settings, std::atomic<int>& compiled, const std::string& reason) {
  compiled = 0;
  Cache cache(std::move(settings));
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cache.get(small_program(), "sm_80")->image, "image of constexpr int kSize = 256;\n");
    EXPECT_EQ(cache.get(small_program(8), "sm_80")->image, "image of constexpr int kSize = 8;\n");
  }
  EXPECT_EQ(compiled, 2);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_THAT(said, HasSubstr("kept in memory only"));
  EXPECT_THAT(said, HasSubstr(reason));
}

TEST_F(CacheTest, FoldersThatOthersMayWriteTo) {
  image();
  for (const unsigned mode : {0702u, 0720u, 0777u}) {
    ASSERT_EQ(chmod(folder().c_str(), mode), 0);
    expect_memory_only(settings(), compiled_, "may write to it");
  }
  ASSERT_EQ(chmod(folder().c_str(), 0755), 0);
  image();
  EXPECT_EQ(compiled_, 0);
  if (geteuid() != 0) GTEST_SKIP() << "a folder of another user's takes root to make";
  ASSERT_EQ(chown(folder().c_str(), 65534, 65534), 0);
  expect_memory_only(settings(), compiled_, "belongs to user 65534");
}

TEST_F(CacheTest, FoldersThatAreNone) {
  std::filesystem::create_directory(directory_ / "real");
  std::filesystem::create_symlink(directory_ / "real", folder());
  expect_memory_only(settings(), compiled_, "symbolic link");
  Cache::Settings slash = settings();
  slash.disk.folder += "/";
  expect_memory_only(slash, compiled_, "symbolic link");
  EXPECT_TRUE(std::filesystem::is_empty(directory_ / "real"));
  std::filesystem::remove(folder());
  files::save(folder(), "a file");
  expect_memory_only(settings(), compiled_, "Not a directory");
  slash.disk.folder = "/proc/no such folder/cache";
  expect_memory_only(slash, compiled_, "No such file or directory");
}

TEST_F(CacheTest, OffIsAskedForAndNotWarnedOf) {
  Cache::Settings off = settings();
  off.disk.folder.clear();
  Cache cache(off);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 2; ++i) cache.get(small_program(), "sm_80");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(compiled_, 1);
  EXPECT_EQ(cache.disk().reason(), "off");
  off.disk.reason = "none is set";
  expect_memory_only(off, compiled_, "none is set");
}

TEST_F(CacheTest, AReadOnlyFolderIsRead) {
  ASSERT_EQ(mkdir(folder().c_str(), 0700), 0);
  image();
  const int user = geteuid() == 0 ? 65534 : static_cast<int>(geteuid());
  std::filesystem::permissions(directory_ / "", std::filesystem::perms(0755));
  for (const std::string& path : {folder(), file(entry_name(small_program())).string()})
    ASSERT_EQ(chown(path.c_str(), static_cast<uid_t>(user), static_cast<gid_t>(-1)), 0);
  ASSERT_EQ(chmod(folder().c_str(), 0500), 0);
  const pid_t process = start_process([&] {
    if (setuid(static_cast<uid_t>(user)) != 0) return 1;
    compiled_ = 0;
    Cache cache(settings());
    testing::internal::CaptureStderr();
    cache.get(small_program(), "sm_80");
    if (compiled_ != 0) return 2;
    for (int size = 1; size < 4; ++size) cache.get(small_program(size), "sm_80");
    if (compiled_ != 3) return 3;
    const std::string said = testing::internal::GetCapturedStderr();
    if (said.find("Permission denied; compiled kernels are kept in memory only") == std::string::npos) return 4;
    return std::count(said.begin(), said.end(), '\n') == 1 ? 0 : 5;
  });
  EXPECT_EQ(wait_for(process), 0);
  ASSERT_EQ(chmod(folder().c_str(), 0700), 0);
}

TEST_F(CacheTest, AFullDiskLeavesNothingBehind) {
  const pid_t process = start_process([&] {
    signal(SIGXFSZ, SIG_IGN);
    testing::internal::CaptureStderr();
    const rlimit few{100, 100};  // bytes of a file
    if (setrlimit(RLIMIT_FSIZE, &few) != 0) return 1;
    Cache cache(settings());
    for (int size = 1; size < 4; ++size) cache.get(small_program(size), "sm_80");
    if (compiled_ != 3) return 2;
    for (int size = 1; size < 4; ++size) cache.get(small_program(size), "sm_80");
    if (compiled_ != 3) return 3;
    return 0;
  });
  EXPECT_EQ(wait_for(process), 0);
  EXPECT_EQ(count(""), 0);
}

TEST_F(CacheTest, ALimitInBytesKeepsWhatWasUsedLast) {
  image(small_program(100));
  const i64 bytes = static_cast<i64>(std::filesystem::file_size(file(entry_name(small_program(100)))));
  Cache::Settings small = settings();
  small.disk.limit_bytes = 3 * bytes;
  files::save(file("mine.pack"), "not the cache's to remove");
  const auto use = [&](int size) { Cache(small).get(small_program(size), "sm_80"); };
  const auto age = [&](int size, int seconds) {
    const utimbuf times{1000 + seconds, 1000 + seconds};
    utime(file(entry_name(small_program(size))).c_str(), &times);
  };
  const auto is_there = [&](int size) { return std::filesystem::exists(file(entry_name(small_program(size)))); };
  testing::internal::CaptureStderr();  // of what is no pack
  use(101);
  use(102);
  age(100, 1);
  age(101, 2);
  age(102, 3);
  use(100);  // the oldest is the youngest now
  use(103);
  EXPECT_TRUE(is_there(100));
  EXPECT_FALSE(is_there(101));
  EXPECT_TRUE(is_there(102));
  EXPECT_TRUE(is_there(103));
  EXPECT_EQ(count("-nvrtc"), 3);
  small.disk.limit_bytes = bytes - 1;
  use(104);
  EXPECT_EQ(count("-nvrtc"), 0);
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(count("mine.pack"), 1);
}

TEST_F(CacheTest, WhatACrashLeftGoesAfterAnHour) {
  image(small_program(1));
  files::save(file("tmp-1-1"), "");
  files::save(file("old.lock"), "");
  files::save(file("tmp-2-2"), "");
  const utimbuf long_ago{1000, 1000};
  utime(file("tmp-1-1").c_str(), &long_ago);
  utime(file("old.lock").c_str(), &long_ago);
  image(small_program(2));
  EXPECT_EQ(count("tmp-1-1") + count("old.lock"), 0);
  EXPECT_EQ(count("tmp-2-2"), 1);
}

TEST_F(CacheTest, ListedAndCleared) {
  image(small_program(1));
  image(small_program(2));
  files::save(file("tmp-1-1"), "");
  files::save(file(entry_name(small_program(3))), "damaged");
  DiskCache disk({folder(), "", 1 << 20, std::chrono::milliseconds(10)});
  const std::vector<DiskCache::Entry> entries = disk.entries();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].binary.function, "small");
  EXPECT_GT(entries[0].bytes, 100);
  EXPECT_EQ(disk.clear(), 3);
  EXPECT_EQ(count(""), 0);
}

TEST_F(CacheTest, ALockThatIsNotGivenBackIsWaitedForUpToItsLimit) {
  ASSERT_EQ(mkdir(folder().c_str(), 0700), 0);
  const std::string path = file(key_of(small_program()).hex() + ".lock");
  const int held = open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  Cache::Settings patient = settings();
  patient.disk.lock_limit = std::chrono::milliseconds(30);
  Cache(patient).get(small_program(), "sm_80");
  EXPECT_EQ(compiled_, 1);
  EXPECT_TRUE(std::filesystem::exists(path));  // it is the holder's to remove
  close(held);
  image();
  EXPECT_EQ(compiled_, 0);
}

TEST_F(CacheTest, AnErrorOfTheCompilerIsTheCallersAndLeavesNothing) {
  Cache::Settings failing = settings();
  failing.compile = [](const Program&, std::string_view, std::span<const SourceFile>) -> Binary {
    throw Error(ErrorCode::internal, "wrong text");
  };
  Cache cache(failing);
  EXPECT_THROW(cache.get(small_program(), "sm_80"), Error);
  EXPECT_THROW(cache.get(small_program(), "sm_80"), Error);
  EXPECT_EQ(count(""), 0);
}

TEST(DiskSettings, FollowTheEnvironment) {
  const auto with = [](const char* cache, const char* xdg, const char* home) {
    for (const auto& [name, value] : {std::pair{"NARROWS_CACHE", cache}, {"XDG_CACHE_HOME", xdg}, {"HOME", home}})
      value ? setenv(name, value, 1) : unsetenv(name);
    return disk_settings();
  };
  const char* home = getenv("HOME");
  const std::string own_home = home ? home : "";
  EXPECT_EQ(with("/a/folder", "/b", "/c").folder, "/a/folder");
  EXPECT_EQ(with(nullptr, "/b", "/c").folder, "/b/narrows");
  EXPECT_EQ(with(nullptr, "relative", "/c").folder, "/c/.cache/narrows");
  EXPECT_EQ(with("", nullptr, "/c").folder, "/c/.cache/narrows");
  EXPECT_EQ(with("off", "/b", "/c").folder, "");
  EXPECT_EQ(with("off", "/b", "/c").reason, "");
  EXPECT_EQ(with(nullptr, nullptr, nullptr).folder, "");
  EXPECT_THAT(with(nullptr, nullptr, nullptr).reason, HasSubstr("NARROWS_CACHE"));
  EXPECT_EQ(with(nullptr, nullptr, "/c").limit_bytes, 256 << 20);
  setenv("HOME", own_home.c_str(), 1);
}

}  // namespace
}  // namespace narrows::cuda
