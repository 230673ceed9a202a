// Programs become binaries with the real compiler; what a binary is found by; what ptxas says of it.
#include "cuda/compile.hpp"

#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cuda/library.hpp"
#include "cuda/planned.hpp"
#include "tests/cuda/small_program.hpp"
#include "tests/support/sanitizer.hpp"

namespace narrows::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Digest, KnownAnswers) {
  EXPECT_EQ(digest("").hex(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc").hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").hex(),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(digest(std::string(1000000, 'a')).hex(),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Digest, PiecesOfAnySizeAreTheWhole) {
  std::string bytes;
  for (int i = 0; i < 300; ++i) bytes += static_cast<char>(i * 7);
  for (const std::size_t size : {1u, 3u, 55u, 56u, 63u, 64u, 65u, 128u}) {
    Hash hash;
    for (std::size_t at = 0; at < bytes.size(); at += size) hash.add(std::string_view(bytes).substr(at, size));
    EXPECT_EQ(hash.finish(), digest(bytes)) << size;
  }
  Hash one, other;
  one.add_text("ab");
  one.add_text("c");
  other.add_text("a");
  other.add_text("bc");
  EXPECT_NE(one.finish(), other.finish());
}

std::vector<std::string> names(const std::vector<SourceFile>& files) {
  std::vector<std::string> all;
  for (const SourceFile& file : files) all.emplace_back(file.name);
  return all;
}

TEST(Sources, OnlyWhatIsReached) {
  const Program program = small_program();
  EXPECT_THAT(names(included_sources(program, kSmallSources)),
              ElementsAre("kernels/small.cu", "config.cuh", "kernels/small.cuh", "shared/number.h"));
  const SourceFile spaced[] = {{"kernels/small.cu", "  #  include   \"a.h\"\n#include <a.h>\n#include \"b.h\""},
                               {"a.h", "#include \"kernels/small.cu\"\n"},
                               {"b.h", ""}};
  EXPECT_THAT(names(included_sources(program, spaced)), ElementsAre("kernels/small.cu", "a.h", "b.h"));
}

TEST(Sources, TheLibraryHoldsTheTree) {
  std::string mask;
  for (const SourceFile& file : embedded_sources())
    if (file.name == "shared/mask.h") mask = file.text;
  EXPECT_THAT(mask, HasSubstr("struct Mask"));
}

/// Begun early without waiting, a kernel would read and write what the one before it still uses.
TEST(Sources, WhatBeginsEarlyWaits) {
  std::set<std::string_view> early;
  for (const Program& program : planned_programs("sm_90a")) {
    const std::string_view text = included_sources(program, embedded_sources()).front().text;
    const std::size_t kernel = text.find("extern \"C\"");
    EXPECT_EQ(text.find("wait_for_previous();", kernel) != std::string_view::npos, program.begins_early)
        << program.source;
    if (program.begins_early) early.insert(program.source);
  }
  EXPECT_THAT(early,
              ElementsAre("append_sm80.cu", "backward_queries_sm80.cu", "backward_sm90.cu", "backward_wide_sm90.cu",
                          "decode_sm80.cu", "decode_sm90.cu", "merge_backward_sm80.cu", "merge_sm80.cu"));
}

TEST(ContentKey, ChangesWithEachInputAndWithNothingElse) {
  const Program program = small_program();
  const Digest key = content_key(program, "sm_80", kSmallSources);
  EXPECT_EQ(content_key(small_program(), "sm_80", kSmallSources), key);
  EXPECT_NE(content_key(program, "sm_86", kSmallSources), key);
  EXPECT_NE(content_key(small_program(128), "sm_80", kSmallSources), key);
  Program exact = program;
  exact.exact_math = true;
  EXPECT_NE(content_key(exact, "sm_80", kSmallSources), key);
  Program other = program;
  other.function = "large";
  EXPECT_NE(content_key(other, "sm_80", kSmallSources), key);
  for (std::size_t i = 0; i < kSmallSources.size(); ++i) {
    std::vector<SourceFile> changed(kSmallSources.begin(), kSmallSources.end());
    const std::string text = std::string(changed[i].text) + "\n";
    changed[i].text = text;
    const bool is_included = changed[i].name != "shared/other.h";
    EXPECT_EQ(content_key(program, "sm_80", changed) != key, is_included) << changed[i].name;
  }
  std::vector<SourceFile> turned(kSmallSources.rbegin(), kSmallSources.rend());
  EXPECT_EQ(content_key(program, "sm_80", turned), key);
}

TEST(Architecture, Names) {
  EXPECT_EQ(architecture(8, 0), "sm_80");
  EXPECT_EQ(architecture(8, 9), "sm_89");
  EXPECT_EQ(architecture(9, 0), "sm_90a");
  EXPECT_EQ(architecture(12, 0), "sm_120");
}

TEST(Usage, ReadFromTheLogOfTheFunctionAskedFor) {
  const std::string log =
      "ptxas info    : 0 bytes gmem\n"
      "ptxas info    : Compiling entry function 'other' for 'sm_80'\n"
      "ptxas info    : Function properties for other\n"
      "    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n"
      "ptxas info    : Used 10 registers, used 0 barriers, 360 bytes cmem[0]\n"
      "ptxas info    : Compiling entry function 'small' for 'sm_80'\n"
      "ptxas info    : Function properties for small\n"
      "    112 bytes stack frame, 40 bytes spill stores, 48 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 1 barriers, 112 bytes cumulative stack size, 1024 bytes smem, 360 "
      "bytes "
      "cmem[0]\n"
      "ptxas info    : Compile time = 5.1 ms\n";
  EXPECT_EQ(parse_usage(log, "small"), (Usage{168, 112, 40, 48, 1024}));
  EXPECT_EQ(parse_usage(log, "other"), (Usage{10, 8, 1, 2, 0}));
  EXPECT_EQ(parse_usage(log, "absent"), Usage{});
  EXPECT_EQ(parse_usage("", "small"), Usage{});
}

TEST(Compile, GivesACubinAndItsUsage) {
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  for (const char* architecture : {"sm_80", "sm_90a"}) {
    const Binary binary = compile(small_program(), architecture, kSmallSources);
    EXPECT_EQ(binary.image.substr(0, 4),
              "\x7F"
              "ELF");
    EXPECT_FALSE(binary.is_ptx);
    EXPECT_EQ(binary.function, "small");
    EXPECT_EQ(binary.architecture, architecture);
    EXPECT_GT(binary.usage.registers, 4);
    EXPECT_EQ(binary.usage.shared_bytes, 1024);
    EXPECT_EQ(binary.usage.spill_store_bytes, 0);
    EXPECT_GE(binary.compiler.major, 12);
    EXPECT_GT(binary.seconds, 0);
  }
}

TEST(Compile, GivesPtxOfTheNewestForWhatTheCompilerDoesNotKnow) {
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  const Compiler& compiler = open_compiler(find_compiler());
  const Binary binary = compile(compiler, small_program(), "sm_999", kSmallSources);
  EXPECT_TRUE(binary.is_ptx);
  EXPECT_THAT(binary.image, HasSubstr(".target sm_" + std::to_string(compiler.architectures.back())));
  EXPECT_EQ(binary.image.back(), '\0');
}

TEST(Compile, RefusesWhatIsOlderThanTheCompiler) {
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  EXPECT_THROW(compile(small_program(), "sm_30", kSmallSources), Error);
  for (const char* wrong : {"", "80", "sm_", "sm_80x", "compute_80", "sm_9 0"})
    EXPECT_THROW(compile(small_program(), wrong, kSmallSources), Error) << wrong;
}

std::string error_of(const Program& program) {
  try {
    compile(program, "sm_80", kSmallSources);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    return error.what();
  }
  ADD_FAILURE() << "compiled";
  return "";
}

TEST(Compile, ErrorsCarryTheLog) {
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  Program program = small_program();
  program.config = "constexpr int kOtherSize = 4;";
  EXPECT_THAT(error_of(program), HasSubstr("small.cu does not compile for sm_80 with NVRTC "));
  EXPECT_THAT(error_of(program), HasSubstr("\"kSize\" is undefined"));
  program.source = "absent.cu";
  EXPECT_THAT(error_of(program), HasSubstr("kernels/absent.cu is not among"));
}

TEST(Compile, Nvrtc12CompilesTheSame) {
  const std::string folder = NARROWS_SOURCE_DIR "/build/nvrtc-12/nvidia/cuda_nvrtc/lib";
  const FoundCompiler old = find_compiler({folder, {}, false}, 0);
  if (old.path.empty()) GTEST_SKIP() << old.absence << "; make nvrtc-12 fetches it";
  EXPECT_EQ(old.version.major, 12);
  if (test::kAddressSanitizer) {
    std::string reason;
    EXPECT_TRUE(Library(folder + "/libnvrtc-builtins.so.12.9", reason)) << reason;
  }
  for (const char* architecture : {"sm_80", "sm_86", "sm_90a"}) {
    const Binary binary = compile(open_compiler(old), small_program(), architecture, kSmallSources);
    EXPECT_FALSE(binary.is_ptx);
    EXPECT_EQ(binary.compiler, old.version);
    EXPECT_EQ(binary.usage.shared_bytes, 1024);
    EXPECT_GT(binary.usage.registers, 4);
  }
}

TEST(Compile, ExactMathDividesExactly) {
  if (!no_compiler().empty()) GTEST_SKIP() << no_compiler();
  const SourceFile source[] = {
      {"kernels/small.cu", "extern \"C\" __global__ void small(float* x) { x[0] = x[1] / x[2]; }"}};
  Program program = small_program();
  const Binary fast = compile(program, "sm_999", source);
  program.exact_math = true;
  const Binary exact = compile(program, "sm_999", source);
  EXPECT_THAT(fast.image, HasSubstr("div.approx.ftz.f32"));
  EXPECT_THAT(exact.image, HasSubstr("div.rn.f32"));
}

}  // namespace
}  // namespace narrows::cuda
