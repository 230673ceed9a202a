// narrows run --backward: gradients, where dO is from, what is checked and written.
#include <cmath>
#include <cstdlib>

#include <gmock/gmock.h>

#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;
using testing::Not;

const float kLn3 = std::log(3.0F);

/// Scale 1: P = ((3/4, 1/4), (1/2, 1/2)), O = ((3, 7), (2, 6)).
Fixture inputs() {
  Fixture fixture;
  fixture.add("q", {1, 2, 1, 2}, {1, 0, 0, 1}).add("k", {1, 2, 1, 2}, {kLn3, 0, 0, 0});
  fixture.add("v", {1, 2, 1, 2}, {4, 8, 0, 4});
  return fixture;
}

/// With dO the identity D = (3, 6), dP = ((4, 0), (8, 4)), dS = P (dP - D) = ((3/4, -3/4), (1, -1)).
Fixture with_dout() {
  Fixture fixture = inputs();
  fixture.add("dout", {1, 2, 1, 2}, {1, 0, 0, 1});
  return fixture;
}

TEST(CliBackward, computes_gradients_that_are_known_by_hand) {
  const TemporaryDirectory directory;
  const std::string in = with_dout().save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", in, "--backward", "--scale", "1", "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("backward fp32 cpu b=1 h=1 hk=1 sq=2 sk=2 d=2\n"));
  EXPECT_THAT(outcome.out, HasSubstr("dout           of the file\n"));
  EXPECT_THAT(outcome.out, HasSubstr("error vs fp64  dq  "));
  EXPECT_THAT(values_of(out, "dq"), testing::ElementsAreArray(near({0.75F * kLn3, 0, kLn3, 0})));
  EXPECT_THAT(values_of(out, "dk"), testing::ElementsAreArray(near({0.75, 1, -0.75, -1})));
  EXPECT_THAT(values_of(out, "dv"), testing::ElementsAreArray(near({0.75, 0.5, 0.25, 0.5})));
  EXPECT_EQ(files::read_tensor_file(out).arrays.size(), 3U);
}

TEST(CliBackward, counts_work_by_the_fused_formula_and_checks_every_gradient) {
  const TemporaryDirectory directory;
  Fixture fixture = with_dout();
  fixture.add("dlse", {1, 1, 2}, {1, 2}).add("bias", {2, 2}, {0, 0, 0, 0});
  const std::string in = fixture.save(directory / "in.safetensors"), out = (directory / "out.safetensors").string();
  const Outcome outcome = narrows({"run", in, "--backward", "--scale", "1", "--alibi-slopes", "0", "--sinks=-inf",
                                   "--check", "--json", "-o", out, "--repeat", "2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  ASSERT_EQ(outcome.objects().size(), 1U);
  const Json object = outcome.objects()[0];
  EXPECT_EQ(object["flops"].get<double>(), 2.0 * (3 * 2 + 2 * 2) * 4);
  EXPECT_NEAR(object["gflops"].get<double>() * object["ms"].get<double>() * 1e6, 80, 1e-6);
  EXPECT_EQ(object["dout"], "of the file");
  EXPECT_EQ(object["passed"], true);
  for (const char* name : {"dq", "dk", "dv", "dbias", "dslopes", "dsinks"}) {
    ASSERT_TRUE(object["check"].contains(name)) << name;
    EXPECT_EQ(object["check"][name]["passed"], true) << name;
    EXPECT_TRUE(object["check"][name].contains("plain_error")) << name;
  }
  // dS with dLSE = (1, 2): ((3/2, -1/2), (2, 0)); dslopes = -sum |p - j| dS.
  EXPECT_THAT(values_of(out, "dbias"), testing::ElementsAreArray(near({1.5, -0.5, 2, 0})));
  EXPECT_THAT(values_of(out, "dslopes"), testing::ElementsAreArray(near({-1.5})));
  EXPECT_THAT(values_of(out, "dsinks"), ElementsAre(0));
}

/// One query that sees one key: P = 1, so dV is dO.
Fixture one_key() {
  Fixture fixture;
  fixture.add("q", {1, 1, 1, 1}, {1}).add("k", {1, 1, 1, 1}, {1}).add("v", {1, 1, 1, 3}, {1, 2, 3});
  return fixture;
}

TEST(CliBackward, a_dout_that_no_file_has_is_split_mix) {
  const TemporaryDirectory directory;
  const std::string in = one_key().save(directory / "in.npz"), out = (directory / "out.npz").string();
  const auto uniform = [](std::uint64_t x) { return static_cast<float>(static_cast<double>(x >> 11) * 0x1p-52 - 1); };
  const Outcome outcome = narrows({"run", in, "--backward", "-o", out});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("dout           generated, seed 0\n"));
  EXPECT_THAT(values_of(out, "dv"), ElementsAre(uniform(0xE220A8397B1DCDAF), uniform(0x6E789E6AA1B965F4),
                                                uniform(0x06C45D188009454F)));  // the generator's published outputs
  EXPECT_THAT(narrows({"run", in, "--backward", "--dout_seed", "9", "-o", out}).out, HasSubstr("generated, seed 9\n"));
  EXPECT_THAT(values_of(out, "dv"), Not(testing::Contains(uniform(0xE220A8397B1DCDAF))));
}

TEST(CliBackward, the_generated_dout_does_not_depend_on_the_order_of_axes) {
  const TemporaryDirectory directory;
  Fixture rows_first, heads_first;  // two queries, two heads, one key: dv of a head is the sum of its rows of dO
  rows_first.add("q", {1, 2, 2, 1}, {1, 2, 3, 4}).add("k", {1, 1, 2, 1}, {1, 1}).add("v", {1, 1, 2, 1}, {1, 2});
  heads_first.add("q", {1, 2, 2, 1}, {1, 3, 2, 4}).add("k", {1, 2, 1, 1}, {1, 1}).add("v", {1, 2, 1, 1}, {1, 2});
  const std::string a = (directory / "a.npz").string(), b = (directory / "b.npz").string();
  EXPECT_EQ(narrows({"run", rows_first.save(directory / "r.npz"), "--backward", "-o", a}).code, 0);
  EXPECT_EQ(narrows({"run", heads_first.save(directory / "h.npz"), "--backward", "--layout", "bhsd", "-o", b}).code, 0);
  const std::vector<float> dv = values_of(a, "dv");
  ASSERT_EQ(dv.size(), 2U);
  EXPECT_NE(dv[0], dv[1]);
  EXPECT_EQ(values_of(b, "dv"), dv);
  EXPECT_EQ(files::read_tensor_file(a).find("dv")->shape, (Dims{1, 1, 2, 1}));
  EXPECT_EQ(files::read_tensor_file(b).find("dv")->shape, (Dims{1, 2, 1, 1}));
}

TEST(CliBackward, rounds_what_it_reads_and_compares_with_the_files_own) {
  const TemporaryDirectory directory;
  const std::string in = with_dout().save(directory / "in.npz"), out = (directory / "out.safetensors").string();
  ASSERT_EQ(narrows({"run", in, "--backward", "--dtype", "bf16", "-o", out, "--check"}).code, 0);
  EXPECT_EQ(files::read_tensor_file(out).find("dk")->dtype, DType::bf16);
  const Outcome again = narrows({"run", in, out, "--backward", "--dtype", "bf16", "--json"});
  EXPECT_EQ(again.code, 0) << again.err;
  ASSERT_EQ(again.objects().size(), 1U);
  EXPECT_EQ(again.objects()[0]["file"], (Json{{"dq", 0.0}, {"dk", 0.0}, {"dv", 0.0}}));
  EXPECT_THAT(narrows({"run", in}).err, HasSubstr("no call uses 'dout'"));
}

TEST(CliBackward, checks_two_layers_of_a_real_model) {
  Words words{"run", minilm(), "--backward", "--check", "--json", "--repeat", "1"};
  const bool one = std::getenv("NARROWS_TEST_SMALL");  // the oracle of a layer takes 7 s under a sanitizer
  if (one) words.insert(words.end(), {"--ignore", "layer5.q,layer5.k,layer5.v,layer5.o"});
  const Outcome outcome = narrows(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::vector<Json> objects = outcome.objects();
  ASSERT_EQ(objects.size(), one ? 1U : 2U);
  for (const Json& object : objects) {
    EXPECT_EQ(object["passed"], true);
    EXPECT_EQ(object["flops"].get<double>(), 2.0 * (3 * 32 + 2 * 32) * 209 * 209 * 12 * 2);
    EXPECT_LT(object["file"]["o"].get<double>(), 1e-5);
    EXPECT_LT(object["check"]["dk"]["error"].get<double>(), 1e-5);
  }
}

TEST(CliBackward, what_cannot_be_is_refused) {
  const TemporaryDirectory directory;
  const std::string bare = inputs().save(directory / "bare.npz"), given = with_dout().save(directory / "given.npz");
  Fixture alone = inputs(), wide = inputs(), cached = inputs();
  alone.add("dsinks", {1}, {1});
  wide.add("dout", {1, 2, 1, 3}, {1, 2, 3, 4, 5, 6});
  cached.add_int64("cache_seqlens", {1}, {2});
  const std::vector<std::pair<Words, std::string>> cases{
      {{"run", bare, "--dout-seed", "3"}, "--dout-seed: 3: needs --backward"},
      {{"run", given, "--backward", "--dout-seed", "3"}, "--dout-seed: 3: the file holds dout"},
      {{"run", bare, "--backward", "--dout-seed", "-3"}, "--dout-seed: '-3': must be a whole number from 0 to"},
      {{"run", alone.save(directory / "a.npz"), "--backward"},
       "dsinks: in the file: this call has no such gradient; --ignore leaves it out"},
      {{"run", wide.save(directory / "w.npz"), "--backward"},
       "dout: shape (1, 2, 1, 3): must be (b, sq, h, dv) = (1, 2, 1, 2)"},
      {{"run", cached.save(directory / "c.npz"), "--backward"}, "backward: a cache call: cache calls are forward only"},
      {{"explain", "--sq", "4", "--d", "2", "--cache-seqlens", "3", "--backward"},
       "backward: a cache call: cache calls are forward only"},
  };
  for (const auto& [words, text] : cases) {
    const Outcome outcome = narrows(words);
    EXPECT_EQ(outcome.code, 2) << testing::PrintToString(words);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr(text));
  }
}

}  // namespace
}  // namespace narrows::cli
