// narrows explain, info, bench, --help: what they print.
#include <gmock/gmock.h>

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
  const Outcome outcome = narrows({"explain", "--sq", "128", "--d", "64"});
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
  EXPECT_EQ(info["families"][0]["name"], "cpu");
  EXPECT_EQ(info["families"][0]["available"], true);
  bool found = false;
  for (const Json& variable : info["environment"])
    found = found || (variable["name"] == "NARROWS_THREADS" && variable["value"] == "3");
  EXPECT_TRUE(found);

  const Outcome text = narrows({"info"});
  EXPECT_EQ(text.code, 0);
  for (const char* part : {"narrows ", "chosen", "cpu", "NARROWS_FAMILY   (not set)"})
    EXPECT_THAT(text.out, HasSubstr(part));
}

TEST(CliBench, prints_the_row_format_of_every_measurement) {
  const Outcome outcome =
      narrows({"bench", "--op", "forward", "--sq",    "16",        "--d",      "8",    "--dv",      "4", "--h",
               "2",     "--hk", "1",       "--dtype", "fp32,bf16", "--causal", "true", "--threads", "1", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  ASSERT_EQ(outcome.objects().size(), 2U);
  const nlohmann::ordered_json first = nlohmann::ordered_json::parse(outcome.out.substr(0, outcome.out.find('\n')));
  std::vector<std::string> keys;
  for (const auto& item : first.items()) keys.push_back(item.key());
  EXPECT_THAT(keys,
              testing::ElementsAre("op", "backend", "family", "dtype", "b", "h", "hk", "sq", "sk", "d", "dv", "causal",
                                   "case", "threads", "ms", "tflops", "peak", "fraction", "peers", "against", "ratio"));
  for (const Json& row : outcome.objects()) {
    EXPECT_EQ(row["causal"], true);
    EXPECT_EQ(row["hk"], 1);
    EXPECT_EQ(row["dv"], 4);
    const double flops = 2.0 * (8 + 4) * 2 * 16 * 16 / 2;
    EXPECT_NEAR(row["tflops"].get<double>() * row["ms"].get<double>() * 1e9 / flops, 1, 1e-9);
    EXPECT_NEAR(row["fraction"].get<double>(), row["tflops"].get<double>() / row["peak"].get<double>(), 1e-12);
    EXPECT_EQ(row["peers"], Json::object());
    EXPECT_TRUE(row["ratio"].is_null());
  }
  EXPECT_EQ(outcome.objects()[0]["dtype"], "fp32");
  EXPECT_EQ(outcome.objects()[1]["dtype"], "bf16");
}

TEST(CliBench, measures_backward_and_decode) {
  const Outcome outcome = narrows({"bench",   "--op",      "backward,decode",
                                   "--sq",    "16",        "--sk",
                                   "32",      "--d",       "8",
                                   "--dv",    "4",         "--h",
                                   "4",       "--b",       "2",
                                   "--dtype", "fp32",      "--causal",
                                   "true",    "--threads", "1",
                                   "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 2U);
  const Json backward = outcome.objects()[0], decode = outcome.objects()[1];
  EXPECT_EQ(backward["op"], "backward");
  EXPECT_EQ(backward["hk"], 4);
  const double flops = 2.0 * (3 * 8 + 2 * 4) * 2 * 4 * 16 * 32 / 2;
  EXPECT_NEAR(backward["tflops"].get<double>() * backward["ms"].get<double>() * 1e9 / flops, 1, 1e-9);
  EXPECT_EQ(decode["op"], "decode");
  EXPECT_EQ(decode["hk"], 1);
  EXPECT_FALSE(decode.contains("tflops"));
  const double bytes = 4.0 * 2 * (32 * 1 + 16 * 4) * (8 + 4);
  EXPECT_NEAR(decode["gbps"].get<double>() * decode["ms"].get<double>() * 1e6 / bytes, 1, 1e-9);
  EXPECT_NEAR(decode["fraction"].get<double>(), decode["gbps"].get<double>() / decode["peak"].get<double>(), 1e-12);
}

TEST(CliBench, a_row_of_decode_is_one_query_and_a_long_cache) {
  const Outcome outcome =
      narrows({"bench", "--op", "decode", "--d", "8", "--sk", "64", "--dtype", "bf16", "--threads", "1", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json row = outcome.objects()[0];
  EXPECT_EQ(row["sq"], 1);
  EXPECT_EQ(row["h"], 32);
  EXPECT_EQ(row["hk"], 8);
  EXPECT_EQ(row["causal"], false);
}

TEST(CliBench, text_has_a_heading_and_a_line_for_each_row) {
  const Outcome outcome = narrows({"bench", "--op", "forward", "--sq", "16,32", "--d", "8", "--h", "1", "--dtype",
                                   "fp32", "--causal", "false", "--threads", "1"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 3);
  EXPECT_THAT(outcome.out, testing::StartsWith("op       family dtype"));
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
