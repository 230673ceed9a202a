// --device: where a command computes.
#include "cuda/machine.hpp"
#include "tests/tools/cli_support.hpp"

#include <gmock/gmock.h>

namespace narrows::cli {
namespace {

using ::testing::StartsWith;

bool has_gpu() { return cuda::presence().devices > 0; }

TEST(CliDevice, names) {
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", ""}) {
    const Outcome outcome = narrows({"explain", "--sq", "4", "--d", "8", "--device", name});
    EXPECT_EQ(outcome.code, 2) << name;
    EXPECT_THAT(outcome.err, StartsWith("narrows: --device: ")) << name;
  }
}

TEST(CliDevice, the_cpu_by_name_and_by_default_where_there_is_no_gpu) {
  const TemporaryDirectory directory;
  const std::string file = counting().save(directory / "in.safetensors");
  const Outcome outcome = narrows({"run", file, "--device", "cpu", "--check", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json row = outcome.objects().at(0);
  EXPECT_EQ(row["device"], "cpu");
  EXPECT_EQ(row["threads"], 1);
  EXPECT_TRUE(row["passed"]);
  if (has_gpu()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(narrows({"run", file, "--json"}).objects().at(0)["device"], "cpu");
}

TEST(CliDevice, a_gpu_that_is_not_there_is_refused_with_the_reason) {
  if (has_gpu()) GTEST_SKIP() << "this machine has a GPU";
  const TemporaryDirectory directory;
  const std::string file = counting().save(directory / "in.safetensors");
  for (const Words& words : {Words{"run", file}, Words{"run", file, "--backward"}, Words{"explain", file},
                             Words{"explain", "--sq", "4", "--d", "8"}}) {
    Words with = words;
    with.insert(with.end(), {"--device", "cuda:1"});
    const Outcome outcome = narrows(with);
    EXPECT_EQ(outcome.code, 4);
    EXPECT_EQ(outcome.err, "narrows: cuda: " + cuda::presence().detail + "\n");
    EXPECT_EQ(outcome.out, "");
  }
}

void expect_agreement(bool backward) {
  const TemporaryDirectory directory;
  const std::string there = (directory / "gpu.safetensors").string(), here = (directory / "cpu.safetensors").string();
  const auto run = [&](const std::string& output, const Words& more) {
    Words words{"run", minilm(), "--json", "-o", output};
    if (backward) words.push_back("--backward");
    words.insert(words.end(), more.begin(), more.end());
    return narrows(words);
  };
  const Outcome gpu = run(there, {"--check"});
  ASSERT_EQ(gpu.code, 0) << gpu.err;
  for (const Json& row : gpu.objects()) EXPECT_EQ(row["device"], "cuda:0");
  ASSERT_EQ(run(here, {"--device", "cpu"}).code, 0);
  const files::TensorFile results = files::read_tensor_file(there);
  ASSERT_FALSE(results.arrays.empty());
  for (const Array& array : results.arrays) {
    const std::vector<float> a = values_of(there, array.name), b = values_of(here, array.name);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 1e-4) << array.name << " " << i;
  }
}

TEST(CliDevice, a_gpu_agrees_with_fp64_and_with_the_cpu) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU: " << cuda::presence().detail;
  for (const bool backward : {false, true}) ASSERT_NO_FATAL_FAILURE(expect_agreement(backward));
}

}  // namespace
}  // namespace narrows::cli
