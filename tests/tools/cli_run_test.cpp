// narrows run: results, options, files, what it prints.
#include <cmath>

#include <gmock/gmock.h>

#include "cpu/reference.hpp"
#include "cpu/reference_numbers.hpp"
#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;

TEST(CliRun, computes_a_tiny_call_that_is_known_by_hand) {
  const TemporaryDirectory directory;
  const float ln2 = std::log(2.0F);
  Fixture fixture;
  fixture.add("q", {1, 2, 1, 1}, {1, 2}).add("k", {1, 2, 1, 1}, {0, ln2}).add("v", {1, 2, 1, 1}, {3, 6});
  const std::string out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", fixture.save(directory / "in.npz"), "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("forward fp32 cpu b=1 h=1 hk=1 sq=2 sk=2 d=1\n"));
  EXPECT_THAT(outcome.out, HasSubstr("q (1, 2, 1, 1)  k (1, 2, 1, 1)  v (1, 2, 1, 1)\n"));
  EXPECT_THAT(outcome.out, HasSubstr("error vs fp64"));
  EXPECT_THAT(values_of(out, "o"), testing::ElementsAreArray(near({5, 5.4F})));  // weights 1:2 and 1:4
  EXPECT_THAT(values_of(out, "lse"), testing::ElementsAreArray(near({std::log(3.0F), std::log(5.0F)})));
}

struct OptionCase {
  Words options;
  std::vector<float> o;
  std::vector<float> counts;  // of visible keys and sinks
};

TEST(CliRun, every_rule_of_visibility_is_an_option) {
  const TemporaryDirectory directory;
  const std::string in = counting().save(directory / "in.safetensors");
  const std::vector<OptionCase> cases{
      {{}, {1.5, 1.5}, {4, 4}},
      {{"--causal"}, {1, 1.5}, {3, 4}},
      {{"--causal=bottom_right"}, {1, 1.5}, {3, 4}},
      {{"--causal=top_left"}, {0, 0.5}, {1, 2}},
      {{"--causal", "top_left"}, {0, 0.5}, {1, 2}},
      {{"--causal", "none"}, {1.5, 1.5}, {4, 4}},
      {{"--window", "0,0"}, {2, 3}, {1, 1}},
      {{"--window", "-1,0"}, {1, 1.5}, {3, 4}},
      {{"--window=1,-1"}, {2, 2.5}, {3, 2}},
      {{"--chunk", "2"}, {2.5, 2.5}, {2, 2}},
      {{"--causal", "--shift", "0"}, {0, 0.5}, {1, 2}},
      {{"--sinks", "0"}, {1.2F, 1.2F}, {5, 5}},
      {{"--seqused-k", "2"}, {0.5, 0.5}, {2, 2}},
      {{"--seqused_k=2"}, {0.5, 0.5}, {2, 2}},
      {{"--alibi-slopes", "200"}, {2, 3}, {1, 1}},
      {{"--threads", "1", "--family", "cpu", "--deterministic", "--batch_invariant"}, {1.5, 1.5}, {4, 4}},
  };
  for (const OptionCase& test : cases) {
    SCOPED_TRACE(testing::PrintToString(test.options));
    const std::string out = (directory / "out.safetensors").string();
    Words words{"run", in, "-o", out, "--check"};
    words.insert(words.end(), test.options.begin(), test.options.end());
    const Outcome outcome = narrows(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    std::vector<float> lse;
    for (const float count : test.counts) lse.push_back(std::log(count));
    EXPECT_THAT(values_of(out, "o"), testing::ElementsAreArray(near(test.o)));
    EXPECT_THAT(values_of(out, "lse"), testing::ElementsAreArray(near(lse)));
  }
}

TEST(CliRun, scale_and_softcap_change_the_scores) {
  const TemporaryDirectory directory;
  Fixture fixture;
  fixture.add("q", {1, 1, 1, 1}, {1}).add("k", {1, 4, 1, 1}, {1000, 0, 0, 0}).add("v", {1, 4, 1, 1}, {0, 1, 2, 3});
  const std::string in = fixture.save(directory / "in.npz"), out = (directory / "out.npz").string();
  const std::vector<std::pair<Words, float>> cases{
      {{}, 0}, {{"--scale", "0"}, 1.5}, {{"--scale=-1"}, 2}, {{"--softcap", "1e-9"}, 1.5}};
  for (const auto& [options, expected] : cases) {
    Words words{"run", in, "-o", out};
    words.insert(words.end(), options.begin(), options.end());
    const Outcome outcome = narrows(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_THAT(values_of(out, "o"), ElementsAre(FloatNear(expected, 1e-6F))) << testing::PrintToString(options);
  }
}

TEST(CliRun, takes_the_integers_and_masks_that_numpy_writes) {
  const TemporaryDirectory directory;
  Fixture fixture;
  fixture.add("q", {3, 1, 1}, {0, 0, 0}).add("k", {4, 1, 1}, {1, 2, 3, 4}).add("v", {4, 1, 1}, {0, 1, 2, 3});
  fixture.add_int64("cu_seqlens_q", {3}, {0, 1, 3}).add_int64("cu_seqlens_k", {3}, {0, 3, 4});
  fixture.add_uint8("mask", {1, 3}, {1, 0, 1});
  const std::string out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", fixture.save(directory / "in.npz"), "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(values_of(out, "o"), ElementsAre(1, 3, 3));
  EXPECT_THAT(outcome.out, HasSubstr("q=varlen k=varlen mask"));
}

TEST(CliRun, takes_bounds_of_rows_from_a_file) {
  const TemporaryDirectory directory;
  Fixture fixture;
  fixture.add("q", {1, 3, 1, 1}, {0, 0, 0}).add("k", {1, 4, 1, 1}, {1, 2, 3, 4}).add("v", {1, 4, 1, 1}, {0, 1, 2, 3});
  fixture.add_int64("key_begin", {1, 3}, {0, 1, 4}).add_int64("key_end", {1, 3}, {1, 4, 2});
  const std::string in = fixture.save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", in, "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(values_of(out, "o"), ElementsAre(0, 2, 0));
  EXPECT_THAT(outcome.out, HasSubstr("d=1 key_begin key_end\n"));
  EXPECT_THAT(narrows({"explain", in}).out, HasSubstr("over 4 visible"));
  const Outcome gradients = narrows({"run", in, "--backward", "--check"});
  EXPECT_EQ(gradients.code, 0) << gradients.err;
}

TEST(CliRun, one_cu_seqlens_and_slopes_are_second_names) {
  const TemporaryDirectory directory;
  Fixture fixture;
  fixture.add("q", {3, 1, 1}, {0, 0, 0}).add("k", {3, 1, 1}, {1, 2, 3}).add("v", {3, 1, 1}, {0, 1, 2});
  fixture.add_int64("cu_seqlens", {3}, {0, 1, 3}).add("slopes", {1}, {200});
  const std::string out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", fixture.save(directory / "in.npz"), "-o", out});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(values_of(out, "o"), testing::ElementsAreArray(near({0, 1, 2})));  // each its own key
}

TEST(CliRun, npy_files_are_named_by_their_stems_and_heads_may_come_first) {
  const TemporaryDirectory directory;
  const std::vector<float> q{1, 2, 3, 4}, k{0.5, -1, 0.25, 2}, v{1, 2, 3, 4};  // (1, 2, 2, 1): s, h
  const auto heads_first = [](const std::vector<float>& x) { return std::vector<float>{x[0], x[2], x[1], x[3]}; };
  Words words{"run", "-o", (directory / "a.npz").string()};
  for (const auto& [name, values] : {std::pair{"q", q}, {"k", k}, {"v", v}}) {
    Fixture fixture;
    words.push_back(fixture.add(name, {1, 2, 2, 1}, values).save(directory / (std::string(name) + ".npy")));
  }
  EXPECT_EQ(narrows(words).code, 0);
  Fixture exchanged;
  for (const auto& [name, values] : {std::pair{"q", q}, {"k", k}, {"v", v}})
    exchanged.add(name, {1, 2, 2, 1}, heads_first(values));
  const std::string in = exchanged.save(directory / "in.npz"), out = (directory / "b.npz").string();
  EXPECT_EQ(narrows({"run", in, "--layout", "bhsd", "-o", out, "--check"}).code, 0);
  const std::vector<float> o = values_of((directory / "a.npz").string(), "o");
  ASSERT_EQ(o.size(), 4U);
  EXPECT_EQ(values_of(out, "o"), heads_first(o));
  EXPECT_EQ(values_of(out, "lse"), values_of((directory / "a.npz").string(), "lse"));
}

TEST(CliRun, its_own_results_are_the_files_own_the_second_time) {
  const TemporaryDirectory directory;
  const std::string in = counting().save(directory / "in.safetensors"), out = (directory / "out.safetensors").string();
  ASSERT_EQ(narrows({"run", in, "-o", out, "--causal"}).code, 0);
  const Outcome again = narrows({"run", in, out, "--causal", "--json"});
  EXPECT_EQ(again.code, 0);
  ASSERT_EQ(again.objects().size(), 1U);
  EXPECT_EQ(again.objects()[0]["file"], (Json{{"o", 0.0}, {"lse", 0.0}}));
  EXPECT_FALSE(again.objects()[0].contains("passed"));
  const Outcome other = narrows({"run", in, out, "--json"});  // row 0: 1.5 and 4 keys against 1 and 3
  EXPECT_DOUBLE_EQ(other.objects()[0]["file"]["o"].get<double>(), 0.5);
  EXPECT_NEAR(other.objects()[0]["file"]["lse"].get<double>(), std::log(4.0 / 3.0), 1e-6);
}

TEST(CliRun, dtype_rounds_the_inputs) {
  const TemporaryDirectory directory;
  Fixture fixture;
  fixture.add("q", {1, 1, 1, 1}, {0}).add("k", {1, 1, 1, 1}, {0}).add("v", {1, 1, 1, 1}, {1.001F});
  const std::string in = fixture.save(directory / "in.npz"), out = (directory / "out.safetensors").string();
  const Outcome outcome = narrows({"run", in, "--dtype", "bf16", "--check", "-o", out});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("forward bf16"));
  EXPECT_THAT(outcome.out, HasSubstr("three-kernel attention in bf16"));
  const files::TensorFile file = files::read_tensor_file(out);
  ASSERT_NE(file.find("o"), nullptr);
  EXPECT_EQ(file.find("o")->dtype, DType::bf16);
  EXPECT_EQ(reference::load(file.find("o")->bytes.data(), DType::bf16, 0), 1.0);
}

/// What the report must say of a call of the MiniLM file, computed here once more.
void expect_numbers_of(const Json& object, const std::string& prefix, const std::string& out) {
  const files::TensorFile file = files::read_tensor_file(minilm());
  const auto tensor = [&](const std::string& name) {
    const Array* const array = file.find(name);
    return Tensor{const_cast<std::byte*>(array->bytes.data()), array->dtype, array->shape, array->strides, Device{}};
  };
  Options options;
  options.mask = tensor("mask");
  const Inputs in{tensor(prefix + ".q"), tensor(prefix + ".k"), tensor(prefix + ".v")};
  const reference::ForwardResult exact = reference::exact_forward(in, options);
  const std::vector<float> ours = values_of(out, prefix + ".o"), theirs = values_of(minilm(), prefix + ".o");
  ASSERT_EQ(ours.size(), exact.o.value.size());
  double error = 0, norm = 0, largest = 0;
  for (std::size_t n = 0; n < ours.size(); ++n) {
    error += std::pow(ours[n] - exact.o.value[n], 2);
    norm += std::pow(exact.o.value[n], 2);
    largest = std::max(largest, std::abs(double{ours[n]} - double{theirs[n]}));
  }
  EXPECT_NEAR(object["check"]["o"]["error"].get<double>(), std::sqrt(error / norm), 1e-12);
  EXPECT_EQ(object["file"]["o"].get<double>(), largest);
  EXPECT_LT(largest, 1e-5);
  EXPECT_EQ(object["flops"].get<double>(), 2.0 * (32 + 32) * 209 * 209 * 12 * 2);
  EXPECT_NEAR(object["gflops"].get<double>(), object["flops"].get<double>() / object["ms"].get<double>() * 1e-6,
              1e-6 * object["gflops"].get<double>());
}

TEST(CliRun, checks_two_layers_of_a_real_model) {
  const TemporaryDirectory directory;
  const std::string out = (directory / "out.safetensors").string();
  const Outcome outcome = narrows({"run", minilm(), "--check", "--json", "-o", out, "--repeat", "2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  const std::vector<Json> objects = outcome.objects();
  ASSERT_EQ(objects.size(), 2U);
  for (std::size_t n = 0; n < 2; ++n) {
    const std::string prefix = n == 0 ? "layer0" : "layer5";
    EXPECT_EQ(objects[n]["call"], prefix);
    EXPECT_EQ(objects[n]["passed"], true);
    EXPECT_EQ(objects[n]["repeat"], 2);
    EXPECT_EQ(objects[n]["q"], (Json{2, 209, 12, 32}));
    EXPECT_EQ(objects[n]["b"], 2);
    EXPECT_EQ(objects[n]["h"], 12);
    EXPECT_TRUE(objects[n]["check"].contains("lse"));
    expect_numbers_of(objects[n], prefix, out);
  }
}

TEST(CliRun, tensors_that_no_call_takes_are_named) {
  const TemporaryDirectory directory;
  Fixture fixture = counting();
  fixture.add("msk", {1}, {0}).add("layer3.weights", {1}, {0});
  const std::string in = fixture.save(directory / "in.npz");
  EXPECT_EQ(narrows({"run", in}).err,
            "narrows: note: no call uses 'msk', 'layer3.weights'; --ignore leaves tensors out\n");
  EXPECT_EQ(narrows({"run", in, "--ignore", "msk,layer3.weights"}).err, "");
  EXPECT_EQ(narrows({"run", in, "--ignore", "msk", "--ignore", "layer3.weights"}).err, "");
}

TEST(CliRun, progress_is_said_where_it_is_asked_for) {
  const TemporaryDirectory directory;
  const std::string in = counting().save(directory / "in.npz");
  EXPECT_EQ(narrows({"run", in, "--check"}).err, "");
  EXPECT_EQ(narrows({"run", in, "--check", "--progress"}).err, "narrows: attention\nnarrows: check in fp64, 32 FLOP\n");
}

}  // namespace
}  // namespace narrows::cli
