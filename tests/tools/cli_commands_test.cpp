// narrows explain, info, --help: what they print.
#include <gmock/gmock.h>

#include "cuda/machine.hpp"
#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::HasSubstr;

Json explained(const Words& options) {
  Words words{"explain", "--json"};
  words.insert(words.end(), options.begin(), options.end());
  const Outcome outcome = narrows(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = outcome.objects();
  EXPECT_EQ(objects.size(), 1U);
  return objects.empty() ? Json{} : objects[0];
}

TEST(CliExplain, counts_from_shapes) {
  const Json dense = explained({"--sq", "4", "--d", "8", "--h", "2"});
  EXPECT_EQ(dense["visible_pairs"], 2 * 16);
  EXPECT_EQ(dense["flops"], 2.0 * (8 + 8) * 32);
  EXPECT_EQ(dense["three_kernel_memory"], 2 * 2 * 16 * 4);  // S and P
  EXPECT_EQ(dense["three_kernel_bytes"], 4 * (4 * 2 * 4 * 8) + 4 * 2 * 16 * 4);
  EXPECT_EQ(dense["family"], "cpu");
  EXPECT_EQ(dense["fused_l2_bytes"], 0);  // a GPU's
  EXPECT_GT(dense["predicted_seconds"].get<double>(), 0);
  EXPECT_GT(dense["three_kernel_seconds"].get<double>(), 0);
  EXPECT_THAT((std::vector<std::string>{"compute", "memory"}),
              testing::Contains(dense["limited_by"].get<std::string>()));

  EXPECT_EQ(explained({"--sq", "4", "--d", "8", "--causal"})["visible_pairs"], 10);
  EXPECT_EQ(explained({"--sq", "2", "--sk", "4", "--d", "8", "--causal=top_left"})["visible_pairs"], 3);
  const Json varlen = explained({"--d", "8", "--dv", "4", "--cu_seqlens_q", "0,1,3", "--cu_seqlens_k", "0,5,6"});
  EXPECT_EQ(varlen["visible_pairs"], 5 + 2);
  EXPECT_EQ(varlen["flops"], 2.0 * (8 + 4) * 7);
  EXPECT_THAT(explained({"--b", "2", "--h", "4", "--hk", "2", "--sq", "3", "--d", "8", "--dtype", "bf16"})["problem"],
              "forward bf16 cpu b=2 h=4 hk=2 sq=3 sk=3 d=8");
  EXPECT_THAT(explained({"--sq", "3", "--d", "8", "--bias-shape", "3,3", "--mask-shape", "1,1,1,3"})["problem"],
              "forward fp32 cpu b=1 h=1 hk=1 sq=3 sk=3 d=8 bias mask");
}

TEST(CliExplain, counts_gradients) {
  const Json object = explained({"--sq", "4", "--d", "8", "--dv", "4", "--h", "2", "--hk", "1", "--backward"});
  EXPECT_EQ(object["problem"], "backward fp32 cpu b=1 h=2 hk=1 sq=4 sk=4 d=8 dv=4");
  EXPECT_EQ(object["visible_pairs"], 32);
  EXPECT_EQ(object["flops"], 2.0 * (3 * 8 + 2 * 4) * 32);
  EXPECT_EQ(object["three_kernel_memory"], 3 * 32 * 4);  // P, dP and dS
  EXPECT_EQ(object["fused_bytes"], 4 * (2 * 64 + 2 * 4 * (8 + 4) + 2 * 32) + 4 * 8);
  EXPECT_EQ(object["family"], "cpu");
  const Outcome file = narrows({"explain", minilm(), "--backward", "--json"});
  EXPECT_EQ(file.code, 0) << file.err;
  ASSERT_EQ(file.objects().size(), 2U);
  EXPECT_EQ(file.objects()[0]["flops"], 2.0 * 5 * 32 * 2 * 12 * 209 * 209);
}

TEST(CliExplain, takes_the_calls_of_a_file) {
  const Outcome outcome = narrows({"explain", minilm(), "--json", "--ignore", "layer0.o,layer5.o"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  const std::vector<Json> objects = outcome.objects();
  ASSERT_EQ(objects.size(), 2U);
  EXPECT_EQ(objects[1]["call"], "layer5");
  EXPECT_EQ(objects[1]["visible_pairs"], 2 * 12 * 209 * 209);
}

TEST(CliExplain, text_says_what_limits) {
  const Outcome outcome = narrows({"explain", "--sq", "128", "--d", "64", "--device", "cpu"});
  EXPECT_EQ(outcome.code, 0);
  for (const char* part : {"three", "FLOP", "intensity", "predicted", "limited by", "family cpu"})
    EXPECT_THAT(outcome.out, HasSubstr(part));
}

TEST(CliInfo, names_instruction_sets_families_and_variables) {
  const Outcome outcome = narrows({"info", "--json"}, {"NARROWS_THREADS=3"});
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json info = outcome.objects()[0];
  EXPECT_EQ(info["version"], std::string(version()));
  int chosen = 0;
  for (const Json& set : info["instruction_sets"]) {
    const bool is_chosen = set["name"] == info["instruction_set"];
    chosen += is_chosen ? 1 : 0;
    EXPECT_EQ(set["detail"] == "chosen", is_chosen);
    EXPECT_TRUE(set["name"] != "portable" || set["available"] == true);
  }
  EXPECT_EQ(chosen, 1);
  for (const auto& [index, name] : {std::pair{std::size_t{0}, "sm90"}, std::pair{std::size_t{1}, "sm80"}}) {
    EXPECT_EQ(info["families"][index]["name"], name);
    EXPECT_EQ(info["families"][index]["available"], cuda::presence().devices > 0);
    EXPECT_EQ(info["families"][index]["detail"], cuda::presence().detail);
  }
  EXPECT_EQ(info["families"][2]["name"], "cpu");
  EXPECT_EQ(info["families"][2]["available"], true);
  bool found = false;
  for (const Json& variable : info["environment"])
    found = found || (variable["name"] == "NARROWS_THREADS" && variable["value"] == "3");
  EXPECT_TRUE(found);

  const Outcome text = narrows({"info"});
  EXPECT_EQ(text.code, 0);
  for (const char* part : {"narrows ", "chosen", "cpu", "NARROWS_FAMILY   (not set)"})
    EXPECT_THAT(text.out, HasSubstr(part));
}

TEST(CliHelp, teaches) {
  const Outcome top = narrows({"--help"});
  EXPECT_EQ(top.code, 0);
  EXPECT_EQ(top.err, "");
  for (const char* part : {"softmax(scale q k^T) v", "narrows run", "narrows explain", "narrows info", "narrows bench",
                           "Exit codes: 0 done; 1 a check failed"})
    EXPECT_THAT(top.out, HasSubstr(part));
  const Outcome run = narrows({"run", "--help"});
  EXPECT_EQ(run.code, 0);
  for (const char* option : {"--scale",           "--softcap",
                             "--alibi-slopes",    "--sinks",
                             "--causal",          "--window",
                             "--chunk",           "--shift",
                             "--dropout",         "--seed",
                             "--offset",          "--origin",
                             "--cu-seqlens-q",    "--cu-seqlens-k",
                             "--seqused-q",       "--seqused-k",
                             "--threads",         "--family",
                             "--num-splits",      "--deterministic",
                             "--batch-invariant", "--rotary-interleaved",
                             "--layout",          "--dtype",
                             "--output",          "--check",
                             "--repeat",          "--json",
                             "--ignore",          "--progress",
                             "--backward",        "--dout-seed",
                             "--cache-seqlens",   "--cache-batch-idx",
                             "--leftpad",         "--rotary-base",
                             "--cu-seqlens-k-new"})
    EXPECT_THAT(run.out, HasSubstr(option));
  EXPECT_EQ(narrows({"--version"}).out, "narrows " + std::string(version()) + "\n");
}

TEST(CliOutput, a_full_disk_is_an_error) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full";
  const std::string command = std::string("'") + NARROWS_CLI + "' info > /dev/full 2> /dev/null";
  EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 3);
}

}  // namespace
}  // namespace narrows::cli
