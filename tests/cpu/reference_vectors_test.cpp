// The oracle's forward against tests/cpu/data/forward_vectors.json, which numpy_vectors.py computed without it.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "cpu/reference.hpp"
#include "tests/support/tensors.hpp"

namespace narrows::test {
namespace {

using nlohmann::json;

constexpr double kTolerance = 1e-12;

double number(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const double infinity = std::numeric_limits<double>::infinity();
  return value.get<std::string>() == "inf" ? infinity : -infinity;
}

DType type_of(const std::string& name) {
  static const std::vector<std::string> lengths{
      "shift",           "cu_seqlens_q", "cu_seqlens_k",     "seqused_q",   "seqused_k", "cache_seqlens", "block_table",
      "cache_batch_idx", "leftpad",      "cu_seqlens_k_new", "rotary_base", "key_begin", "key_end"};
  if (name == "mask") return DType::boolean;
  return std::find(lengths.begin(), lengths.end(), name) == lengths.end() ? DType::fp64 : DType::int32;
}

Array array_of(const std::string& name, const json& stored) {
  Dims shape;
  for (const json& size : stored.at("shape")) shape.push_back(size.get<std::int64_t>());
  std::vector<double> values;
  for (const json& value : stored.at("data")) values.push_back(number(value));
  return Array(type_of(name), shape, values);
}

void set_tensors(const std::map<std::string, Array>& arrays, Options& options) {
  const std::map<std::string, Tensor Options::*> members{
      {"shift", &Options::shift},
      {"alibi_slopes", &Options::alibi_slopes},
      {"bias", &Options::bias},
      {"mask", &Options::mask},
      {"key_begin", &Options::key_begin},
      {"key_end", &Options::key_end},
      {"sinks", &Options::sinks},
      {"cu_seqlens_q", &Options::cu_seqlens_q},
      {"cu_seqlens_k", &Options::cu_seqlens_k},
      {"seqused_q", &Options::seqused_q},
      {"seqused_k", &Options::seqused_k},
      {"cache_seqlens", &Options::cache_seqlens},
      {"block_table", &Options::block_table},
      {"cache_batch_idx", &Options::cache_batch_idx},
      {"leftpad", &Options::leftpad},
      {"k_new", &Options::k_new},
      {"v_new", &Options::v_new},
      {"cu_seqlens_k_new", &Options::cu_seqlens_k_new},
      {"rotary_cos", &Options::rotary_cos},
      {"rotary_sin", &Options::rotary_sin},
      {"rotary_base", &Options::rotary_base},
  };
  for (const auto& [name, array] : arrays)
    if (name != "q" && name != "k" && name != "v") options.*members.at(name) = array;
}

void set_rules(const json& rules, Options& options) {
  for (const auto& [name, value] : rules.items()) {
    if (name == "scale")
      options.scale = value.get<double>();
    else if (name == "causal")
      options.causal = value == "top_left" ? Causal::top_left : Causal::bottom_right;
    else if (name == "window")
      options.window = {value[0].get<std::int64_t>(), value[1].get<std::int64_t>()};
    else if (name == "chunk")
      options.chunk = value.get<std::int64_t>();
    else if (name == "softcap")
      options.softcap = value.get<double>();
    else if (name == "dropout")
      options.dropout = value.get<double>();
    else if (name == "seed")
      options.seed = value.get<std::uint64_t>();
    else if (name == "offset")
      options.offset = value.get<std::uint64_t>();
    else if (name == "origin")
      options.origin = {value[0], value[1], value[2], value[3], value[4]};
    else if (name == "rotary_interleaved")
      options.rotary_interleaved = value.get<bool>();
    else
      FAIL() << "no such option: " << name;
  }
}

void expect_near(const Array& ours, const Array& expected, const std::string& name) {
  ASSERT_EQ(ours.shape(), expected.shape()) << name;
  expected.for_each([&](const Dims& at) {
    const double value = ours[at], right = expected[at];
    if (std::isinf(right))
      EXPECT_EQ(value, right) << name;
    else
      EXPECT_NEAR(value, right, kTolerance * (1 + std::abs(right))) << name;
  });
}

/// Printed by its name alone: gtest would print all its bytes, into reports too.
struct StoredCase {
  json stored;
  std::string name() const { return stored.at("name").get<std::string>(); }
  friend void PrintTo(const StoredCase& test, std::ostream* out) { *out << test.name(); }
};

std::vector<StoredCase> cases() {
  std::ifstream file(std::string(NARROWS_SOURCE_DIR) + "/tests/cpu/data/forward_vectors.json");
  const json stored = json::parse(file, nullptr, false);
  std::vector<StoredCase> all;
  if (!stored.is_discarded())
    for (const json& test : stored) all.push_back({test});
  return all;  // gtest reports a suite that has no case
}

class ReferenceVectors : public testing::TestWithParam<StoredCase> {};

TEST_P(ReferenceVectors, forward_is_what_numpy_says) {
  const json& stored = GetParam().stored;
  std::map<std::string, Array> arrays;
  for (const auto& [name, tensor] : stored.at("tensors").items()) arrays.emplace(name, array_of(name, tensor));
  Options options;
  set_tensors(arrays, options);
  set_rules(stored.at("options"), options);

  const json& results = stored.at("results");
  const Array expected_o = array_of("o", results.at("o")), expected_lse = array_of("lse", results.at("lse"));
  Array o(DType::fp64, expected_o.shape()), lse(DType::fp64, expected_lse.shape());
  reference::forward({arrays.at("q"), arrays.at("k"), arrays.at("v")}, {o, lse}, options);
  expect_near(o, expected_o, "o");
  expect_near(lse, expected_lse, "lse");
  if (results.contains("k_after")) {
    expect_near(arrays.at("k"), array_of("k", results.at("k_after")), "k");
    expect_near(arrays.at("v"), array_of("v", results.at("v_after")), "v");
  }
}

INSTANTIATE_TEST_SUITE_P(Numpy, ReferenceVectors, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name(); });

}  // namespace
}  // namespace narrows::test
