#include "plan/sm90_backward.hpp"

#include <gtest/gtest.h>

namespace narrows {
namespace {

constexpr i64 kSharedOfHopper = 227 * 1024, kRegistersOfBlock = 168 * 3;  // of three warpgroups' threads, one each

Machine hopper() {
  Machine machine;
  machine.compute_capability = 90;
  return machine;
}

TEST(PlanSm90Backward, what_a_thread_block_takes_fits) {
  for (const i32 width : {64, 128})
    for (const bool limits_keys : {false, true}) {
      const BackwardSm90Constants constants = backward_sm90_constants(width, limits_keys, false);
      EXPECT_EQ(constants.head_width, width);
      EXPECT_LE(backward_sm90_shared_bytes(constants), kSharedOfHopper);
      EXPECT_LE(constants.sum_registers + 2 * constants.key_registers, kRegistersOfBlock);
    }
  // K, V; three stages of Q, dO and facts; two tiles of dS^T; what is beside them.
  EXPECT_EQ(backward_sm90_shared_bytes(backward_sm90_constants(128, false, false)),
            2 * 128 * 256 + 3 * (2 * 64 * 256 + 64 * 8) + 2 * 128 * 128 + 384);
}

TEST(PlanSm90Backward, programs) {
  const std::vector<Program> programs = planned_backward_sm90_programs(hopper());
  ASSERT_EQ(programs.size(), 8u);
  for (const Program& program : programs) {
    EXPECT_EQ(program.source, "backward_sm90.cu");
    EXPECT_EQ(program.function, "backward_sm90");
    EXPECT_FALSE(program.exact_math);
  }
  for (std::size_t a = 0; a < programs.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) EXPECT_NE(programs[a].config, programs[b].config);
  Machine older = hopper();
  older.compute_capability = 89;
  EXPECT_TRUE(planned_backward_sm90_programs(older).empty());
}

TEST(PlanSm90Backward, products) {
  const std::string config = backward_sm90_program(backward_sm90_constants(128, true, true)).config;
  // dQ: both operands' sums run down columns. dV and dK of one width are one function.
  EXPECT_NE(config.find("inline void multiply_gradients(float (&d)[1][8][4], u64 a, u64 b, int adds)"), config.npos);
  EXPECT_NE(config.find("p, 1, 1, 1, 1;}"), config.npos);
  const std::size_t sums = config.find("inline void multiply_sums(");
  ASSERT_NE(sums, config.npos);
  EXPECT_EQ(config.find("inline void multiply_sums(", sums + 1), config.npos);
  EXPECT_NE(config.find("constexpr bool kDeterministic = true;"), config.npos);
}

TEST(PlanSm90Backward, kernels_around_it) {
  const BackwardConstants around = around_backward_sm90(backward_sm90_constants(64, false, false));
  const Program rows = backward_program(BackwardKernel::rows, constants_of(BackwardKernel::rows, around));
  EXPECT_NE(rows.config.find("constexpr bool kFactsApart = true;"), rows.config.npos);
  const Program queries = backward_program(BackwardKernel::queries, constants_of(BackwardKernel::queries, around));
  EXPECT_NE(queries.config.find("constexpr bool kVectorSums = true;"), queries.config.npos);
  EXPECT_NE(queries.config.find("constexpr int kBlockQueries = 64;"), queries.config.npos);
}

}  // namespace
}  // namespace narrows
