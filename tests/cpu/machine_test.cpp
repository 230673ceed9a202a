#include "cpu/machine.hpp"

#include <gtest/gtest.h>

#include "core/environment.hpp"
#include "core/error.hpp"
#include "cpu/tile_kernels.hpp"

#include <cstdlib>
#include <optional>
#include <string>

namespace narrows::cpu {
namespace {

/// NARROWS_FAMILY for the length of a test.
class ForcedFamily {
 public:
  explicit ForcedFamily(const char* value) {
    if (const char* before = std::getenv(kName)) before_ = before;
    ::setenv(kName, value, 1);
  }
  ~ForcedFamily() {
    if (before_)
      ::setenv(kName, before_->c_str(), 1);
    else
      ::unsetenv(kName);
  }
  ForcedFamily(const ForcedFamily&) = delete;
  ForcedFamily& operator=(const ForcedFamily&) = delete;

 private:
  static constexpr const char* kName = "NARROWS_FAMILY";
  std::optional<std::string> before_;
};

TEST(CpuMachine, has_every_instruction_set_that_can_run_best_first) {
  const ForcedFamily none("");
  const auto kernels = available_tile_kernels<float>();
  const Machine found = machine();
  ASSERT_EQ(found.instruction_sets.size(), kernels.size());
  for (std::size_t set = 0; set < kernels.size(); ++set) EXPECT_EQ(found.instruction_sets[set], kernels[set]->name);
}

TEST(CpuMachine, the_environment_forces_one_instruction_set) {
  const ForcedFamily forced("cpu/portable");
  EXPECT_EQ(environment::family(), "cpu");
  const Machine found = machine();
  ASSERT_EQ(found.instruction_sets.size(), 1U);
  EXPECT_EQ(found.instruction_sets.front(), "portable");
}

TEST(CpuMachine, a_family_alone_forces_no_instruction_set) {
  const ForcedFamily forced("cpu");
  EXPECT_EQ(environment::family(), "cpu");
  EXPECT_EQ(machine().instruction_sets.size(), available_tile_kernels<float>().size());
}

TEST(CpuMachine, an_instruction_set_that_cannot_run_is_refused_by_name) {
  const ForcedFamily forced("cpu/mmx");
  try {
    machine();
    FAIL() << "not refused";
  } catch (const Error& error) {
    const std::string message = error.what(), best = available_tile_kernels<float>().front()->name;
    EXPECT_NE(message.find("NARROWS_FAMILY: cpu/mmx: the instruction sets of this CPU are " + best), message.npos)
        << message;
    EXPECT_NE(message.find("nearest legal: cpu/" + best), message.npos) << message;
  }
}

}  // namespace
}  // namespace narrows::cpu
