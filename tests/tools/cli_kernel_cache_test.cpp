// narrows cache, and what narrows info says of CUDA.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <set>

#include "tests/cuda/cache_support.hpp"
#include "tests/tools/cli_support.hpp"
#include "tools/kernels.hpp"

namespace narrows::cli {
namespace {

using cuda::CacheTest;
using cuda::small_program;
using testing::HasSubstr;

class CliKernelCache : public CacheTest {
 protected:
  std::string variable() const { return "NARROWS_CACHE=" + folder(); }
};

TEST_F(CliKernelCache, lists_and_clears) {
  image(small_program(1));
  image(small_program(2));
  const Outcome listed = narrows({"cache", "list", "--json"}, {variable()});
  EXPECT_EQ(listed.code, 0);
  EXPECT_EQ(listed.err, "");
  ASSERT_EQ(listed.objects().size(), 2U);
  const Json first = listed.objects()[0];
  EXPECT_EQ(first["function"], "small");
  EXPECT_EQ(first["architecture"], "sm_80");
  EXPECT_EQ(first["nvrtc"], "13.0");
  EXPECT_EQ(first["registers"], 40);
  EXPECT_EQ(first["spill_store_bytes"], 2);
  EXPECT_GT(first["bytes"], 100);
  const Outcome text = narrows({"cache", "list"}, {variable()});
  EXPECT_THAT(text.out, HasSubstr("40 registers"));
  EXPECT_THAT(text.out, HasSubstr("2 kernels, "));
  const Outcome cleared = narrows({"cache", "clear"}, {variable()});
  EXPECT_EQ(cleared.code, 0);
  EXPECT_THAT(cleared.out, HasSubstr("2 kernels removed from "));
  EXPECT_EQ(count(""), 0);
  EXPECT_THAT(narrows({"cache", "list"}, {variable()}).out, HasSubstr("0 kernels, "));
}

TEST_F(CliKernelCache, a_folder_that_is_none_is_an_error) {
  for (const char* action : {"list", "clear", "warm"}) {
    const Outcome off = narrows({"cache", action}, {"NARROWS_CACHE=off"});
    EXPECT_EQ(off.code, 2) << action;
    EXPECT_EQ(off.out, "");
    EXPECT_THAT(off.err, HasSubstr("NARROWS_CACHE: "));
  }
  ASSERT_EQ(mkdir(folder().c_str(), 0777), 0);
  ASSERT_EQ(chmod(folder().c_str(), 0777), 0);
  const Outcome open = narrows({"cache", "list"}, {variable()});
  EXPECT_EQ(open.code, 2);
  EXPECT_THAT(open.err, HasSubstr("may write to it"));
}

TEST_F(CliKernelCache, options_that_are_wrong) {
  const auto error = [&](const Words& words) {
    const Outcome outcome = narrows(words, {variable()});
    EXPECT_EQ(outcome.code, 2);
    EXPECT_EQ(outcome.out, "");
    return outcome.err;
  };
  EXPECT_THAT(error({"cache"}), HasSubstr("subcommand is required"));
  EXPECT_THAT(error({"cache", "walk"}), HasSubstr("narrows: "));
  EXPECT_THAT(error({"cache", "pack"}), HasSubstr("FILE is required"));
  EXPECT_THAT(error({"cache", "warm", "--threads", "0"}), HasSubstr("--threads: '0'"));
  EXPECT_THAT(error({"cache", "warm", "--arch", "sm_80,sm_81"}),
              HasSubstr("architecture: sm_81: must be one of sm_80, "));
  EXPECT_THAT(error({"cache", "warm", "--part", "3"}), HasSubstr("--part: 3: must be K/N"));
  EXPECT_THAT(error({"cache", "warm", "--part", "5/4"}), HasSubstr("--part: '5'"));
  EXPECT_THAT(error({"cache", "warm", "--part", "0/4"}), HasSubstr("--part: '0'"));
  EXPECT_THAT(error({"cache", "warm", "--part", "1/"}), HasSubstr("--part: ''"));
}

TEST_F(CliKernelCache, parts_of_what_is_planned) {
  std::vector<Wanted> whole;
  for (int size = 0; size < 10; ++size) whole.push_back({small_program(size), "sm_80"});
  std::vector<int> met(10);
  for (const std::int64_t part : {1, 2, 3})
    for (const Wanted& one : part_of(whole, part, 3))
      for (int size = 0; size < 10; ++size)
        if (cuda::key_of(one.program) == cuda::key_of(small_program(size))) {
          EXPECT_EQ(size % 3, part - 1);
          ++met[static_cast<std::size_t>(size)];
        }
  EXPECT_THAT(met, testing::Each(1));
}

TEST_F(CliKernelCache, without_a_compiler_pack_says_so_and_leaves_no_file) {
  const std::string pack = (directory_ / "new.pack").string();
  const Outcome outcome = narrows({"cache", "pack", pack, "--arch", "sm_80"},
                                  {variable(), "NARROWS_NVRTC=" + (directory_ / "nowhere").string()});
  EXPECT_EQ(outcome.code, 4);
  EXPECT_THAT(outcome.err, HasSubstr("NARROWS_NVRTC: "));
  EXPECT_FALSE(std::filesystem::exists(pack));
}

TEST_F(CliKernelCache, fetches_what_is_wanted_in_order) {
  cuda::Cache cache(settings());
  std::vector<Wanted> wanted;
  for (int size = 1; size <= 20; ++size) wanted.push_back({small_program(size), "sm_80"});
  const std::vector<cuda::PackEntry> entries = fetch(cache, wanted, 4);
  ASSERT_EQ(entries.size(), 20U);
  for (int size = 1; size <= 20; ++size) {
    EXPECT_EQ(entries[static_cast<std::size_t>(size - 1)].key, cuda::key_of(small_program(size)));
    EXPECT_THAT(entries[static_cast<std::size_t>(size - 1)].binary.image, HasSubstr("= " + std::to_string(size) + ";"));
  }
  EXPECT_EQ(compiled_, 20);
  cuda::Cache::Settings failing = settings();
  failing.disk.folder.clear();
  failing.compile = [](const Program&, std::string_view, std::span<const cuda::SourceFile>) -> cuda::Binary {
    throw Error(ErrorCode::internal, "wrong text");
  };
  cuda::Cache wrong(failing);
  EXPECT_THROW(fetch(wrong, wanted, 4), Error);
}

TEST_F(CliKernelCache, plans_for_each_architecture) {
  for (const char* architecture : {"sm_80", "sm_86", "sm_90a", "sm_120"}) {
    const std::vector<Wanted> wanted = planned({architecture});
    EXPECT_FALSE(wanted.empty()) << architecture;
    for (const Wanted& one : wanted) EXPECT_EQ(one.architecture, architecture);
    std::size_t forward = 0, backward = 0, decode = 0;
    std::set<std::string_view> hopper;
    for (const Wanted& one : planned({architecture}, true)) {
      EXPECT_EQ(one.program.config.find("kMask = true"), std::string::npos);
      if (one.program.function.ends_with("sm90")) {
        hopper.insert(one.program.function);
        continue;
      }
      ++(one.program.function == "forward_sm80" ? forward : one.program.function == "decode_sm80" ? decode : backward);
    }
    EXPECT_EQ(hopper.size(), std::string_view(architecture) == "sm_90a" ? 2U : 0U) << "forward, backward";
    EXPECT_EQ(forward, 18U) << architecture << ": 3 dtypes, 6 head dims";
    EXPECT_GE(backward, 3U) << architecture << ": rows, keys, queries";
    EXPECT_LE(backward, 4U) << architecture << ": queries in blocks of two sizes";
    EXPECT_EQ(decode, 5U) << architecture << ": the rows of its table";
  }
  EXPECT_THROW(planned({"sm_75"}), Error);
}

TEST_F(CliKernelCache, plans_of_dtypes_add_up) {
  const auto count = [](const std::vector<DType>& dtypes) { return planned({"sm_90a"}, true, dtypes).size(); };
  const std::size_t fp32 = count({DType::fp32});
  EXPECT_EQ(fp32, 6U) << "forward kernels of 6 head dims";
  EXPECT_GT(count({DType::bf16}), fp32) << "backward and decoding too";
  EXPECT_EQ(count({DType::fp32, DType::bf16}), fp32 + count({DType::bf16}));
  EXPECT_EQ(count({DType::fp16, DType::bf16, DType::fp32}), count({}));
}

TEST_F(CliKernelCache, info_says_what_there_is_or_why_not) {
  image();
  const Outcome outcome = narrows({"info", "--json"}, {variable()});
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json cuda = outcome.objects()[0]["cuda"];
  EXPECT_EQ(cuda["devices"].empty(), cuda["detail"] != "");
  EXPECT_EQ(cuda["nvrtc"]["path"] == "", cuda["nvrtc"]["detail"] != "");
  EXPECT_EQ(cuda["cache"]["folder"], folder());
  EXPECT_EQ(cuda["cache"]["kernels"], 1);
  EXPECT_GT(cuda["cache"]["bytes"], 100);
  const Outcome text = narrows({"info"}, {variable(), "NARROWS_NVRTC=/nowhere/libnvrtc.so"});
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.out, HasSubstr("NARROWS_NVRTC: /nowhere/libnvrtc.so: no such file or folder"));
  EXPECT_THAT(text.out, HasSubstr("1 kernels, "));
  const std::string none = (directory_ / "none").string();
  EXPECT_THAT(narrows({"info"}, {"NARROWS_CACHE=" + none}).out, HasSubstr("0 kernels, 0 B in " + none));
  EXPECT_FALSE(std::filesystem::exists(none));
  EXPECT_THAT(narrows({"info"}, {"NARROWS_CACHE=off"}).out, HasSubstr("not available: off"));
}

}  // namespace
}  // namespace narrows::cli
