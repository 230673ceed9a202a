// What the results of this program stand for: its sources, and the GPU.
#include "tests/gpu/device.hpp"
#include "tests/gpu/source_hash.hpp"

namespace narrows::test {
namespace {

TEST(GpuBuild, describes_itself) {
  RecordProperty("family", "any");
  RecordProperty("source_hash", kSourceHash);
  EXPECT_EQ(std::string(kSourceHash).size(), 64u);
  if (const std::string reason = no_gpu(); !reason.empty()) GTEST_SKIP() << reason;
  const cuda::DeviceFacts& facts = cuda::device_facts(0);
  RecordProperty("device", facts.name);
  RecordProperty("driver", cuda::version_text(facts.driver_version));
  RecordProperty("multiprocessors", facts.multiprocessors);
}

}  // namespace
}  // namespace narrows::test
