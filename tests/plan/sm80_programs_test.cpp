// How few programs of family sm80 many problems need.
#include "plan/sm80.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/plan/random_problems.hpp"

namespace narrows::test {
namespace {

TEST(Sm80Plan, ten_thousand_problems_of_a_kind_need_at_most_six_programs) {
  constexpr std::array kKinds{
      ProgramKind{"plain", DType::bf16, 128, 128},
      ProgramKind{"plain", DType::fp16, 64, 64},
      ProgramKind{"two widths", DType::bf16, 192, 128},
      ProgramKind{"plain", DType::fp32, 96, 96},
      ProgramKind{
          .name = "negative scales", .dtype = DType::bf16, .head_width = 64, .value_width = 64, .negative = true},
      ProgramKind{.name = "softcap", .dtype = DType::bf16, .head_width = 256, .value_width = 256, .softcap = true},
      ProgramKind{.name = "bias",
                  .dtype = DType::fp16,
                  .head_width = 128,
                  .value_width = 128,
                  .bias = true,
                  .bias_dtype = DType::bf16},
      ProgramKind{.name = "all",
                  .dtype = DType::fp32,
                  .head_width = 32,
                  .value_width = 64,
                  .softcap = true,
                  .alibi = true,
                  .bias = true,
                  .mask = true,
                  .dropout = true}};
  for (const std::string_view architecture : {"sm_86", "sm_90a"})
    for (const ProgramKind& kind : kKinds) {
      SCOPED_TRACE(text(architecture, " ", kind.name, " ", kind.dtype, " ", kind.head_width, " ", kind.value_width));
      const Machine machine = cuda::machine_of(architecture);
      RandomProblems problems(kind);
      std::vector<ForwardConstants> found;
      for (int i = 0; i < 10000; ++i) {
        const Call call = problems.next();
        const ForwardConstants constants = forward_constants(call.problem, plan_of(call, machine));
        if (std::find(found.begin(), found.end(), constants) == found.end()) found.push_back(constants);
      }
      // One for each way to copy: 16, 8, 4 bytes, element by element, and 16-bit rows that are shifted.
      EXPECT_EQ(found.size(), kind.dtype == DType::fp32 ? 4u : 5u);
      for (const ForwardConstants& constants : found) {
        EXPECT_EQ(constants.head_width, kind.head_width);
        EXPECT_EQ(constants.natural, kind.softcap || kind.alibi || kind.bias || kind.negative);
      }
    }
}

TEST(Sm80Plan, equal_programs_are_those_of_equal_constants) {
  const auto program = [](const GpuSizes& sizes, const Options& options) {
    const Call call = make_explained(sizes.inputs(), options);
    return forward_program(forward_constants(call.problem, plan_of(call, cuda::machine_of("sm_90a"))));
  };
  const Program plain = program(GpuSizes{}, {});
  EXPECT_EQ(plain.config,
            program(GpuSizes{.b = 7, .sq = 1, .sk = 99, .h = 8, .hk = 8}, {.scale = 3, .window = {4, 5}}).config);
  Options bounded;
  bounded.key_begin = bounded.key_end = on_gpu(DType::int32, {2, 300});
  EXPECT_EQ(plain.config, program(GpuSizes{}, bounded).config);
  EXPECT_FALSE(plain.exact_math);
  EXPECT_TRUE(program(GpuSizes{.dtype = DType::fp32}, {}).exact_math);
  for (const Program& other :
       {program(GpuSizes{.dtype = DType::fp16}, {}), program(GpuSizes{.d = 65}, {}), program(GpuSizes{.dv = 65}, {}),
        program(GpuSizes{.d = 63}, {}), program(GpuSizes{}, {.scale = -1}), program(GpuSizes{}, {.softcap = 2}),
        program(GpuSizes{}, {.dropout = 0.5})})
    EXPECT_NE(other.config, plain.config);
}

}  // namespace
}  // namespace narrows::test
