// Every way to go wrong: its exit code and its one line on stderr.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

struct ErrorCase {
  Words words;
  int code;
  std::string text;  // what follows "narrows: "
};

void expect_error(const ErrorCase& test) {
  SCOPED_TRACE(testing::PrintToString(test.words));
  const Outcome outcome = narrows(test.words);
  EXPECT_EQ(outcome.code, test.code);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, StartsWith("narrows: "));
  EXPECT_THAT(outcome.err, HasSubstr(test.text));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_TRUE(outcome.err.ends_with('\n'));
}

/// A file of three tensors that `narrows run` computes, unless an option is wrong.
class CliErrors : public testing::Test {
 protected:
  Words with(const Words& options) const {
    Words words{"run", in_};
    words.insert(words.end(), options.begin(), options.end());
    return words;
  }
  TemporaryDirectory directory_;
  std::string in_ = counting().save(directory_ / "in.npz");
};

TEST_F(CliErrors, command_lines) {
  for (const ErrorCase& test : {
           ErrorCase{{}, 2, "A subcommand is required"},
           ErrorCase{{"walk"}, 2, "command: 'walk': must be run, explain, info, bench or cache"},
           ErrorCase{{"run"}, 2, "FILE is required"},
           ErrorCase{with({"--casual"}), 2, "--casual"},
           ErrorCase{with({"--check=maybe"}), 2, "maybe"},
           ErrorCase{with({"--chunk"}), 2, "--chunk"},
           ErrorCase{with({"--chunk", "2", "--chunk", "3"}), 2, "--chunk"},
           ErrorCase{{"info", "extra"}, 2, "extra"},
       })
    expect_error(test);
}

TEST_F(CliErrors, numbers) {
  const std::string huge = "99999999999999999999";
  for (const ErrorCase& test : {
           ErrorCase{with({"--chunk", huge}), 2,
                     "--chunk: '99999999999999999999': must be a whole number from -9223372036854775808 to "
                     "9223372036854775807; nearest legal: 9223372036854775807"},
           ErrorCase{with({"--chunk", "2.5"}), 2, "--chunk: '2.5': must be a whole number"},
           ErrorCase{with({"--chunk", ""}), 2, "--chunk: '': must be a whole number"},
           ErrorCase{with({"--chunk", "0x10"}), 2, "--chunk: '0x10': must be a whole number"},
           ErrorCase{with({"--chunk", "-1"}), 2, "chunk: -1: must be >= 0 (0 = off); nearest legal: 0"},
           ErrorCase{with({"--scale", "nan"}), 2, "scale: nan: must be finite"},
           ErrorCase{with({"--scale=-inf"}), 2, "scale: -inf: must be finite"},
           ErrorCase{with({"--scale", "1e999"}), 2, "--scale: '1e999': is beyond what a double holds"},
           ErrorCase{with({"--scale", "1e"}), 2, "--scale: '1e': must be a number"},
           ErrorCase{with({"--softcap", "-2"}), 2, "softcap: -2: must be finite and >= 0"},
           ErrorCase{with({"--window", "3"}), 2, "--window: '3': must be LEFT,RIGHT: 2 whole numbers"},
           ErrorCase{with({"--window", "3,x"}), 2, "--window: 'x': must be a whole number"},
           ErrorCase{with({"--window", "-2,0"}), 2, "window.left: -2: must be >= 0, or -1 for unlimited"},
           ErrorCase{with({"--causal=left"}), 2, "--causal: 'left': must be bottom_right, top_left or none"},
           ErrorCase{with({"--threads", "-1"}), 2, "threads: -1: must be in [0, 1024]"},
           ErrorCase{with({"--threads", "3000000000"}), 2, "--threads: '3000000000': must be a whole number from"},
           ErrorCase{with({"--repeat", "0"}), 2, "--repeat: '0': must be a whole number from 1 to 1000000"},
           ErrorCase{with({"--dtype", "fp8"}), 2, "--dtype: 'fp8': must be fp16, bf16, fp32 or fp64"},
           ErrorCase{with({"--layout", "hbsd"}), 2, "--layout: 'hbsd': must be bshd or bhsd"},
           ErrorCase{with({"--family", "gpu"}), 2, "family: gpu: must be one of: sm90, sm80, cpu"},
           ErrorCase{with({"--seqused-k", "5"}), 2, "seqused_k[0]: 5: must be in [0, 4]"},
           ErrorCase{with({"--seqused-k", "1,2"}), 2, "seqused_k: shape (2,): must be (b) = (1,)"},
           ErrorCase{with({"--sinks", "1,2"}), 2, "sinks: shape (2,)"},
           ErrorCase{with({"--cache-seqlens", "5"}), 2, "cache_seqlens[0]: 5: must be in [0, 4]"},
           ErrorCase{with({"--num-splits", "-4"}), 2, "num_splits: -4: must be >= 0 (0 = the plan decides)"},
           ErrorCase{with({"--dropout", "1"}), 2, "dropout: 1: must be in [0, 1)"},
           ErrorCase{with({"--seed", "-1"}), 2, "--seed: '-1': must be a whole number from 0 to 18446744073709551615"},
           ErrorCase{with({"--origin", "1,2"}), 2, "--origin: '1,2': must be b,h,i,j,H: 5 whole numbers"},
           ErrorCase{{"explain", "--sq", "4"}, 2, "--d: not given: a call is described by a FILE or by --sq and --d"},
           ErrorCase{{"explain", "--sq", "-4", "--d", "8"}, 2, "q: shape (1, -4, 1, 8): sizes must be >= 0"},
           ErrorCase{{"explain", "--sq", "4", "--d", "8", "--h", "3", "--hk", "2"},
                     2,
                     "k: 2 kv heads: q's 3 heads must be a multiple"},
           ErrorCase{{"explain", "--sq", "4000000000000000000", "--d", "8"}, 2, "2^63"},
           ErrorCase{{"explain", in_, "--d", "8"}, 2, "its tensors have shapes"},
           ErrorCase{{"explain", "--sq", "4", "--d", "8", "--cu-seqlens-q", "0,4"},
                     2,
                     "--sq: 4: cu_seqlens_q already says how many rows there are"},
           ErrorCase{{"bench", "--dtype", "fp64"}, 2, "--dtype: fp64: has no measured peak"},
           ErrorCase{{"bench", "--sq", "0"}, 2, "--sq: '0': must be a whole number from 1 to 1048576"},
           ErrorCase{{"bench", "--op", "sideways"}, 2, "--op: 'sideways': must be forward, backward or decode"},
           ErrorCase{{"bench", "--case", "odd"}, 2, "--case: 'odd': must be one of plain, bias, mask, softcap"},
           ErrorCase{{"bench", "--op", "decode", "--case", "bias"}, 2, "--case: bias: paged16 is of decode"},
           ErrorCase{{"bench", "--case", "varlen", "--b", "2"}, 2, "--b: 2: sequences and lengths of --case varlen"},
           ErrorCase{{"bench", "--case", "gqa4", "--h", "6"}, 2, "--h: 6: --case gqa4 has four query heads"},
           ErrorCase{{"bench", "--peers", ""}, 2, "--peers: '': must name a Python interpreter"},
           ErrorCase{{"bench", "--peers", "/no/python", "--sq", "16"}, 2, "--peers: '/no/python': cannot be started"},
           ErrorCase{{"bench", "--peers", "python3", "--no-peers"}, 2, "--peers: 'python3': contradicts --no-peers"},
       })
    expect_error(test);
}

TEST_F(CliErrors, files) {
  const std::string no_file = (directory_ / "none.npz").string();
  files::save(directory_ / "text.npz", "not a zip archive");
  files::save(directory_ / "cut.safetensors", "abc");
  files::save(directory_ / "data.bin", "");
  const std::string twin = counting().save(directory_ / "twin.safetensors");
  for (const ErrorCase& test : {
           ErrorCase{{"run", no_file}, 3, no_file},
           ErrorCase{{"run", (directory_ / "text.npz").string()}, 3, "text.npz"},
           ErrorCase{{"run", (directory_ / "cut.safetensors").string()}, 3, "cut.safetensors"},
           ErrorCase{{"run", (directory_ / "data.bin").string()}, 3, "extension '.bin' names no format"},
           ErrorCase{{"run", (directory_ / "").string()}, 3, "names no format"},
           ErrorCase{{"run", in_, twin}, 3, "tensor 'q' is also in " + in_},
           ErrorCase{with({"--ignore", "w"}), 2, "--ignore: 'w': no file holds a tensor of this name"},
           ErrorCase{
               with({"--ignore", "k"}), 3,
               "no tensor 'k'; a call needs q, k and v, and here are 'q' fp32 (1, 2, 1, 1), 'v' fp32 (1, 4, 1, 1)"},
           ErrorCase{with({"-o", (directory_ / "no folder/o.npz").string()}), 3, "cannot be written"},
           ErrorCase{with({"-o", in_}), 2, "--output: " + in_ + ": is read too; results would replace its q, k and v"},
           ErrorCase{with({"-o", (directory_ / "o.npy").string()}), 3,
                     "results are several tensors a call; name a .npz or .safetensors file"},
           ErrorCase{with({"--output", (directory_ / "o.npz").string(), "--dtype", "bf16"}), 3, "NumPy has no bf16"},
       })
    expect_error(test);
  EXPECT_EQ(directory_.files(), 5U) << "a refused call leaves no file behind";
}

TEST_F(CliErrors, tensors) {
  const auto file = [this](const char* name, const auto& add) {
    Fixture fixture = counting();
    add(fixture);
    return fixture.save(directory_ / name);
  };
  const std::string scalar = file("scalar.npz", [](Fixture& f) { f.add("sinks", {}, {1}); });
  const std::string large = file("large.npz", [](Fixture& f) { f.add_int64("shift", {1}, {3000000000}); });
  const std::string grey = file("grey.npz", [](Fixture& f) { f.add_uint8("mask", {4}, {1, 0, 255, 1}); });
  const std::string both =
      file("both.npz", [](Fixture& f) { f.add("slopes", {1}, {1}).add("alibi_slopes", {1}, {1}); });
  const std::string wide = file("wide.npz", [](Fixture& f) { f.add("o", {1, 2, 1, 3}, {1, 2, 3, 4, 5, 6}); });
  const std::string sink = file("sink.npz", [](Fixture& f) { f.add("sinks", {1}, {1}); });
  const std::string half = file("half.npz", [](Fixture& f) { f.add("layer1.q", {1, 2, 1, 2}, {1, 2, 3, 4}); });
  const std::string bits = file("bits.npz", [](Fixture& f) { f.add("mask", {4}, {1, 0, 1, 1}); });
  for (const ErrorCase& test : {
           ErrorCase{{"run", scalar}, 3, "tensor 'sinks': a number without axes; a tensor has at least one"},
           ErrorCase{{"run", large}, 2, "tensor 'shift'[0]: 3000000000: must fit in int32"},
           ErrorCase{{"run", grey}, 2, "tensor 'mask'[2]: 255: a mask of uint8 holds 0 and 1"},
           ErrorCase{{"run", both}, 3, "tensor 'alibi_slopes': 'slopes' is also given and means the same"},
           ErrorCase{{"run", wide}, 2, "o: shape (1, 2, 1, 3): the file's own must have the shape of the result"},
           ErrorCase{{"run", sink, "--sinks", "2"}, 2, "sinks: given twice: by an option and by " + sink},
           ErrorCase{{"run", half, "--ignore", "q"}, 2, "layer1: k: head dim 1: must be q's; nearest legal: 2"},
           ErrorCase{{"run", bits}, 2, "mask: fp32: must be"},
       })
    expect_error(test);
}

TEST_F(CliErrors, control_characters_in_names_stay_out_of_the_terminal) {
  const Outcome outcome = narrows({"run", "a\033[31mb\n.npz"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(outcome.err.find('\033'), std::string::npos);
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1);
}

TEST_F(CliErrors, environment_variables_are_checked_too) {
  const Outcome outcome = narrows({"run", in_}, {"NARROWS_THREADS=many"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("NARROWS_THREADS: many: a whole number from 1 to 1024"));
}

}  // namespace
}  // namespace narrows::cli
