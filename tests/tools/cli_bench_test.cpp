// narrows bench: rows, and what it makes of peers. Nothing here depends on how long anything takes.
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

/// A row of forward for each sequence length, and what else the command is to do.
Words small_rows(const std::string& sq, const Words& more) {
  Words words{"bench", "--op",    "forward", "--sq",     sq,      "--d",       "8", "--h",
              "1",     "--dtype", "fp32",    "--causal", "false", "--threads", "1"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST(CliBench, prints_the_row_format_of_every_measurement) {
  const Outcome outcome = narrows({"bench",   "--no-peers", "--op",     "forward", "--sq",      "16",   "--d",
                                   "8",       "--dv",       "4",        "--h",     "2",         "--hk", "1",
                                   "--dtype", "fp32,bf16",  "--causal", "true",    "--threads", "1",    "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 2U);
  const nlohmann::ordered_json first = nlohmann::ordered_json::parse(outcome.out.substr(0, outcome.out.find('\n')));
  std::vector<std::string> keys;
  for (const auto& item : first.items()) keys.push_back(item.key());
  EXPECT_THAT(keys, ElementsAre("op", "backend", "family", "dtype", "b", "h", "hk", "sq", "sk", "d", "dv", "causal",
                                "case", "threads", "ms", "best_ms", "tflops", "peak", "fraction", "extra_bytes",
                                "peers", "against", "ratio"));
  for (const Json& row : outcome.objects()) {
    EXPECT_EQ(row["causal"], true);
    EXPECT_EQ(row["case"], "");
    EXPECT_EQ(row["hk"], 1);
    EXPECT_EQ(row["dv"], 4);
    const double flops = 2.0 * (8 + 4) * 2 * 16 * 16 / 2;
    EXPECT_NEAR(row["tflops"].get<double>() * row["best_ms"].get<double>() * 1e9 / flops, 1, 1e-9);
    EXPECT_NEAR(row["fraction"].get<double>(), row["tflops"].get<double>() / row["peak"].get<double>(), 1e-12);
    EXPECT_LE(row["best_ms"].get<double>(), row["ms"].get<double>());
    EXPECT_GT(row["extra_bytes"].get<std::int64_t>(), 0);
    EXPECT_EQ(row["peers"], Json::object());
    EXPECT_TRUE(row["against"].is_null());
    EXPECT_TRUE(row["ratio"].is_null());
  }
  EXPECT_EQ(outcome.objects()[0]["dtype"], "fp32");
  EXPECT_EQ(outcome.objects()[1]["dtype"], "bf16");
  for (const char* part : {"narrows ", "cpu: ", "L1d ", "instruction set: ", "peers: none"})
    EXPECT_THAT(outcome.err, HasSubstr(part));
}

TEST(CliBench, measures_backward_and_decode) {
  const Outcome outcome = narrows({"bench",     "--no-peers", "--op",     "backward,decode",
                                   "--sq",      "16",         "--sk",     "32",
                                   "--d",       "8",          "--dv",     "4",
                                   "--h",       "4",          "--b",      "2",
                                   "--dtype",   "fp32",       "--causal", "true",
                                   "--threads", "1",          "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 2U);
  const Json backward = outcome.objects()[0], decode = outcome.objects()[1];
  EXPECT_EQ(backward["op"], "backward");
  EXPECT_EQ(backward["hk"], 4);
  const double flops = 2.0 * (3 * 8 + 2 * 4) * 2 * 4 * 16 * 32 / 2;
  EXPECT_NEAR(backward["tflops"].get<double>() * backward["best_ms"].get<double>() * 1e9 / flops, 1, 1e-9);
  EXPECT_EQ(decode["op"], "decode");
  EXPECT_EQ(decode["hk"], 1);
  EXPECT_FALSE(decode.contains("tflops"));
  const double bytes = 4.0 * 2 * (32 * 1 + 16 * 4) * (8 + 4);
  EXPECT_NEAR(decode["gbps"].get<double>() * decode["best_ms"].get<double>() * 1e6 / bytes, 1, 1e-9);
  EXPECT_NEAR(decode["fraction"].get<double>(), decode["gbps"].get<double>() / decode["peak"].get<double>(), 1e-12);
}

TEST(CliBench, every_case_runs_forward_and_backward_and_counts_the_pairs_it_says) {
  const Outcome outcome = narrows({"bench",
                                   "--quick",
                                   "--no-peers",
                                   "--op",
                                   "forward,backward",
                                   "--sq",
                                   "600",
                                   "--h",
                                   "4",
                                   "--d",
                                   "8",
                                   "--dtype",
                                   "bf16",
                                   "--causal",
                                   "false",
                                   "--threads",
                                   "1",
                                   "--case",
                                   "plain,bias,mask,softcap,alibi,dropout,window512,varlen,gqa4",
                                   "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 18U);
  double varlen_pairs = 0;
  for (int rank = 1, left = 600; left > 0; ++rank) {
    const int length = std::min(150 / rank, left);
    varlen_pairs += length * length;
    left -= length;
  }
  const double window_pairs = 512.0 * 513 / 2 + 88.0 * 512;
  for (const Json& row : outcome.objects()) {
    const std::string special = row["case"];
    const double pairs = special == "varlen" ? varlen_pairs : special == "window512" ? window_pairs : 600.0 * 600;
    const double flops = 2.0 * (row["op"] == "backward" ? 5 : 2) * 8 * 4 * pairs;
    EXPECT_NEAR(row["tflops"].get<double>() * row["best_ms"].get<double>() * 1e9 / flops, 1, 1e-9) << row.dump();
    EXPECT_EQ(row["hk"], special == "gqa4" ? 1 : 4);
  }
}

TEST(CliBench, decode_reads_pages_too) {
  const Outcome outcome = narrows({"bench", "--no-peers", "--op", "decode", "--d", "8", "--sk", "100", "--dtype",
                                   "fp16", "--threads", "1", "--case", "plain,paged16", "--json"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 2U);
  for (const Json& row : outcome.objects()) {
    EXPECT_EQ(row["sq"], 1);
    EXPECT_EQ(row["sk"], 100);
    EXPECT_EQ(row["h"], 32);
    EXPECT_EQ(row["hk"], 8);
    EXPECT_EQ(row["causal"], false);
    const double bytes = 2.0 * (100 * 8 + 32) * 16;
    EXPECT_NEAR(row["gbps"].get<double>() * row["best_ms"].get<double>() * 1e6 / bytes, 1, 1e-9);
  }
  EXPECT_EQ(outcome.objects()[0]["case"], "");
  EXPECT_EQ(outcome.objects()[1]["case"], "paged16");
}

TEST(CliBench, text_describes_the_machine_and_has_a_line_for_each_row) {
  const Outcome outcome = narrows(small_rows("16", {"--no-peers"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 6);
  for (const char* part : {"\ncpu: ", "\npeers: none\nop       family dtype", "\nforward  cpu    fp32 "})
    EXPECT_THAT(outcome.out, HasSubstr(part));
}

/// An interpreter that is none: a script of the shell. `answers` are branches of a case on $line, which has its id in $id.
class FakePython {
 public:
  explicit FakePython(const std::string& hello, const std::string& answers = "") : path_(directory_ / "python") {
    files::save(path_, "#!/bin/sh\nsay() { printf '%s\\n' \"$1\"; }\nsay '" + hello +
                           "'\nwhile read -r line; do\nid=${line#*'\"id\":'}; id=${id%%,*}\ncase $line in\n" + answers +
                           "\nesac\ndone\n");
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  }
  Outcome bench(const std::string& sq = "16") const {
    return narrows(small_rows(sq, {"--json", "--peers", path_.string()}));
  }

 private:
  files::TemporaryDirectory directory_;
  std::filesystem::path path_;
};

constexpr const char* kHello = R"({"peers":{"torch":"2.5","onnxruntime":"1.2"},"missing":{"numpy":"none here"}})";
constexpr const char* kReady = R"(*prepare*) say "{\"id\":$id,\"ready\":[\"torch\",\"onnxruntime\"],\"failed\":{}}";;)";

std::size_t occurrences(const std::string& text, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(CliBenchPeers, stand_in_the_row_and_the_fastest_is_what_it_is_judged_by) {
  const FakePython python(kHello, std::string(kReady) + R"(
*torch*) say "{\"id\":$id,\"ms\":[4000]}";;
*onnxruntime*) say "{\"id\":$id,\"ms\":[1000,2000,3000]}";;)");
  const Outcome outcome = python.bench();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json row = outcome.objects()[0];
  EXPECT_EQ(row["peers"], (Json{{"torch", 4000.0}, {"onnxruntime", 2000.0}}));
  EXPECT_EQ(row["against"], "onnxruntime");
  EXPECT_NEAR(row["ratio"].get<double>(), 2000 / row["ms"].get<double>(), 1e-9);
  EXPECT_THAT(outcome.err, HasSubstr("peers: onnxruntime (1.2), torch (2.5)"));
  EXPECT_THAT(outcome.err, HasSubstr("narrows: bench: no peer numpy: none here"));
}

TEST(CliBenchPeers, that_raise_are_missing_from_their_rows_and_said_once) {
  const FakePython python(kHello, std::string(kReady) + R"(
*torch*) say "{\"id\":$id,\"error\":\"ValueError: too long\"}";;
*onnxruntime*) say "{\"id\":$id,\"ms\":[2000]}";;)");
  const Outcome outcome = python.bench("16,32");
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.objects().size(), 2U);
  for (const Json& row : outcome.objects()) {
    EXPECT_EQ(row["peers"], (Json{{"onnxruntime", 2000.0}}));
  }
  EXPECT_EQ(occurrences(outcome.err, "narrows: bench: peer torch failed: ValueError: too long"), 1U);
}

TEST(CliBenchPeers, that_fail_to_prepare_are_missing) {
  const FakePython python(kHello, R"(
*prepare*) say "{\"id\":$id,\"ready\":[\"onnxruntime\",\"made_up\"],\"failed\":{\"torch\":\"OSError: gone\"}}";;
*onnxruntime*) say "{\"id\":$id,\"ms\":[2000]}";;)");
  const Outcome outcome = python.bench();
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.objects().size(), 1U);
  EXPECT_EQ(outcome.objects()[0]["peers"], (Json{{"onnxruntime", 2000.0}}));
  EXPECT_THAT(outcome.err, HasSubstr("peer torch failed: OSError: gone"));
}

TEST(CliBenchPeers, may_break_in_the_middle_and_the_row_lacks_them) {
  // The first round is fine, the second raises: what came before does not count.
  const FakePython python(kHello, std::string(kReady) + R"(
*torch*) if [ "$seen" ]; then say "{\"id\":$id,\"error\":\"late\"}"; else say "{\"id\":$id,\"ms\":[1]}"; fi; seen=1;;
*onnxruntime*) say "{\"id\":$id,\"ms\":[2000]}";;)");
  const Outcome outcome = python.bench();
  EXPECT_EQ(outcome.code, 0);
  ASSERT_EQ(outcome.objects().size(), 1U);
  EXPECT_EQ(outcome.objects()[0]["peers"], (Json{{"onnxruntime", 2000.0}}));
}

TEST(CliBenchPeers, may_end_after_a_row_and_the_others_go_on) {
  const FakePython python(kHello, R"(
*'"sq":32'*) exit 3;;
*prepare*) say "{\"id\":$id,\"ready\":[\"torch\"],\"failed\":{}}";;
*torch*) say "{\"id\":$id,\"ms\":[2000]}";;)");
  const Outcome outcome = python.bench("16,32,48");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 3U);
  EXPECT_EQ(outcome.objects()[0]["peers"], (Json{{"torch", 2000.0}}));
  EXPECT_EQ(outcome.objects()[1]["peers"], Json::object());
  EXPECT_EQ(outcome.objects()[2]["peers"], Json::object());
  EXPECT_EQ(occurrences(outcome.err, "the interpreter of peers ended"), 1U);
}

struct Broken {
  const char* name;
  const char* answers;
  const char* said;
};
void PrintTo(const Broken& broken, std::ostream* out) { *out << broken.name; }

class CliBenchBrokenPeers : public testing::TestWithParam<Broken> {};

TEST_P(CliBenchBrokenPeers, do_not_stop_or_falsify_the_bench) {
  const std::string answers = GetParam().answers;
  const bool prepares = answers.find("*prepare*") != std::string::npos;
  const Outcome outcome = FakePython(kHello, (prepares ? "" : std::string(kReady)) + answers).bench();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json row = outcome.objects()[0];
  EXPECT_EQ(row["peers"], Json::object());
  EXPECT_TRUE(row["against"].is_null());
  EXPECT_GT(row["ms"].get<double>(), 0);
  EXPECT_EQ(occurrences(outcome.err, "narrows: bench: "), 2U) << outcome.err;  // and the missing NumPy
  EXPECT_THAT(outcome.err, HasSubstr(std::string("the interpreter of peers ") + GetParam().said));
}

INSTANTIATE_TEST_SUITE_P(
    All, CliBenchBrokenPeers,
    testing::Values(
        Broken{"dies", "*prepare*) exit 1;;", "ended"}, Broken{"dies_later", "*time*) kill -9 $$;;", "ended"},
        Broken{"no_json", "*prepare*) say hello;;", "answered what was not asked"},
        Broken{"not_asked", R"(*prepare*) say '{"id":77,"ready":[],"failed":{}}';;)", "answered what was not asked"},
        Broken{"no_list", R"(*prepare*) say "{\"id\":$id}";;)", "gave no list"},
        Broken{"list_of_nothing", R"(*prepare*) say "{\"id\":$id,\"ready\":{},\"failed\":{}}";;)", "gave no list"},
        Broken{"no_times", R"(*time*) say "{\"id\":$id,\"ms\":[]}";;)", "gave no times"},
        Broken{"a_time_of_zero", R"(*time*) say "{\"id\":$id,\"ms\":[5,0]}";;)", "gave no times"},
        Broken{"a_negative_time", R"(*time*) say "{\"id\":$id,\"ms\":[-5]}";;)", "gave no times"},
        Broken{"a_time_of_text", R"(*time*) say "{\"id\":$id,\"ms\":[\"5\"]}";;)", "gave no times"},
        Broken{"endless", R"(*time*) say "{\"id\":$id,\"ms\":[1e999]}";;)", "answered what was not asked"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(CliBenchPeers, without_a_greeting_are_none) {
  for (const char* hello : {"hello", "{}", R"({"peers":[1],"missing":{}})", R"({"peers":{"a b":"1"},"missing":{}})",
                            R"({"peers":{"torch":1},"missing":{}})"}) {
    const Outcome outcome = FakePython(hello).bench();
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.objects().size(), 1U);
    EXPECT_THAT(outcome.err, HasSubstr("gave no list of peers")) << hello;
    EXPECT_THAT(outcome.err, HasSubstr("peers: none")) << hello;
  }
}

/// What the user did not ask for is not missed.
TEST(CliBenchPeers, python3_without_any_is_not_worth_a_word) {
  const files::TemporaryDirectory directory;
  const std::filesystem::path python = directory / "python3";
  files::save(python, "#!/bin/sh\necho '{\"peers\":{},\"missing\":{\"torch\":\"no\"}}'\n");
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  for (const std::string& path : {python.parent_path().string(), std::string("/nowhere")}) {
    const std::string variable = "PATH=" + path;
    const Outcome outcome = narrows(small_rows("16", {"--json"}), {variable});
    EXPECT_EQ(outcome.code, 0);
    EXPECT_EQ(outcome.objects().size(), 1U);
    EXPECT_THAT(outcome.err, Not(HasSubstr("narrows: bench")));
    EXPECT_THAT(outcome.err, HasSubstr("peers: none"));
  }
}

}  // namespace
}  // namespace narrows::cli
