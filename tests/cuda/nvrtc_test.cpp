// Which of several compilers is taken; the compilers are stand-ins that are never opened, told apart by their names.
#include "cuda/nvrtc.hpp"

#include <cstdlib>
#include <filesystem>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cuda/driver.hpp"
#include "tests/tools/files_support.hpp"

namespace narrows::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Toolkits : public testing::Test {
 protected:
  std::string add(const std::string& folder, const std::string& version) {
    std::filesystem::create_directories(directory_ / folder);
    const std::string major = version.substr(0, version.find('.'));
    files::save(directory_ / (folder + "/libnvrtc.so." + major), "");
    files::save(directory_ / (folder + "/libnvrtc-builtins.so." + version), "");
    return (directory_ / folder).string();
  }

  files::TemporaryDirectory directory_;
};

TEST_F(Toolkits, TheNewestThatTheDriverTakes) {
  const std::string old = add("old", "12.9"), recent = add("new", "13.0");
  const CompilerPlaces places{"", {old, recent}, false};
  EXPECT_EQ(find_compiler(places, 0).path, recent + "/libnvrtc.so.13");
  EXPECT_EQ(find_compiler(places, 13000).version, (CompilerVersion{13, 0}));
  EXPECT_EQ(find_compiler(places, 14020).version, (CompilerVersion{13, 0}));
  EXPECT_EQ(find_compiler(places, 12080).path, old + "/libnvrtc.so.12");
  EXPECT_EQ(find_compiler(places, 12080).version, (CompilerVersion{12, 9}));
}

TEST_F(Toolkits, OneTooNewIsRefusedWithBothNumbers) {
  const CompilerPlaces places{"", {add("new", "13.0")}, false};
  const FoundCompiler found = find_compiler(places, 12080);
  EXPECT_EQ(found.path, "");
  EXPECT_THAT(found.absence, AllOf(HasSubstr("NVRTC 13.0"), HasSubstr("driver of CUDA 13"), HasSubstr("CUDA 12.8")));
  const CompilerPlaces chosen{places.folders[0] + "/libnvrtc.so.13", {}, false};
  EXPECT_THAT(find_compiler(chosen, 12080).absence, AllOf(HasSubstr("NARROWS_NVRTC"), HasSubstr("CUDA 12.8")));
}

TEST_F(Toolkits, TheChosenOneAndNoOther) {
  const std::string old = add("old", "12.9"), recent = add("new", "13.0");
  const std::vector<std::string> folders{recent};
  EXPECT_EQ(find_compiler({old, folders, true}, 13000).path, old + "/libnvrtc.so.12");
  EXPECT_EQ(find_compiler({old + "/libnvrtc.so.12", folders, true}, 13000).version, (CompilerVersion{12, 9}));
  EXPECT_THAT(find_compiler({old + "/absent", folders, true}, 13000).absence,
              AllOf(HasSubstr("NARROWS_NVRTC: "), HasSubstr("/absent: no such file or folder")));
  std::filesystem::create_directories(directory_ / "empty");
  const std::string empty = (directory_ / "empty").string();
  EXPECT_THAT(find_compiler({empty, folders, true}, 13000).absence, AllOf(HasSubstr(empty), HasSubstr("not found")));
  files::save(directory_ / "empty/libnvrtc.so.13", "not a library");
  EXPECT_EQ(find_compiler({empty, folders, true}, 13000).path, "");
  EXPECT_THAT(find_compiler({empty + "/libnvrtc.so.13", folders, true}, 13000).absence, HasSubstr("NARROWS_NVRTC: "));
}

TEST_F(Toolkits, NoneIsAReason) {
  EXPECT_THAT(find_compiler({"", {}, false}, 13000).absence, HasSubstr("not found"));
  EXPECT_THROW(open_compiler(find_compiler({"", {}, false}, 13000)), Error);
}

TEST_F(Toolkits, OfThisMachineTellsItsVersionBeforeItIsOpened) {
  const FoundCompiler found = find_compiler();
  if (found.path.empty()) GTEST_SKIP() << found.absence;
  const Compiler& compiler = open_compiler(found);
  EXPECT_EQ(compiler.version, found.version);
  EXPECT_THAT(compiler.architectures, testing::Contains(80));
  EXPECT_EQ(&open_compiler(found), &compiler);
}

TEST(Driver, AbsenceIsAReason) {
  const Driver none = open_driver("libnarrows-absent.so.1");
  EXPECT_EQ(none.functions, nullptr);
  EXPECT_EQ(none.absence, "libnarrows-absent.so.1: not found");
  const Driver wrong = open_driver("libm.so.6");
  EXPECT_EQ(wrong.functions, nullptr);
  EXPECT_THAT(wrong.absence, AllOf(HasSubstr("has no cuInit"), HasSubstr("12.0")));
}

TEST(Driver, OfThisMachineIsThereOrSaysWhyNot) {
  const Driver& found = find_driver();
  if (found.functions) {
    EXPECT_GE(found.devices, 1);
    EXPECT_GE(found.version, kOldestDriver);
    EXPECT_GT(device_facts(0).multiprocessors, 0);
    EXPECT_THROW(device_facts(found.devices), Error);
  } else {
    EXPECT_NE(found.absence, "");
    EXPECT_THROW(driver(), Error);
    EXPECT_THROW(device_facts(0), Error);
  }
}

}  // namespace
}  // namespace narrows::cuda
